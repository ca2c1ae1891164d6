// The shards of a coded store as its members: their files, locks, identity and superblocks; who is
// live; batches of transfers that tell which shard failed.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/io/loop.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/coded/format/format.h"
#include "stoker/store/coded/format/log.h"
#include "stoker/store/coded/shards/shard.h"
#include "stoker/store/coded/shards/stragglers.h"
#include "stoker/store/coded/store.h"
#include "stoker/store/store_file.h"

namespace stoker::coded {

struct Member : StoreFile {
  std::unique_ptr<Shard> shard;  // what its bytes are reached through, while it is present
  Superblock super;
  // why it is missing or was dropped; empty: nothing is wrong with it. Of a store that serves:
  // guarded by the CommittedMap's mutex
  std::string trouble;
  std::unique_ptr<ShardLog> log;
  size_t image_area = 1;        // that holds the newest table image; the next goes into the other
  std::optional<Error> hidden;  // why nobody can tell what is there, if anything is
  // its head holds something, and no superblock: a store that exists does without it, and it is
  // never written to
  bool spoiled = false;

  bool present() const { return shard != nullptr; }
};

// Closes and unlocks when destroyed, once no reads are left behind. Not thread-safe, but for the
// files, which any thread may read and write.
class Shards {
 public:
  // Opens, locks and identifies the shards of one store and puts them in the order of their
  // indices. Makes them where there is none (fresh() then), if options.create says so. To write, it
  // fences them before anything that counts is read.
  static Result<std::unique_ptr<Shards>> open(const CodedPlan& plan, const Runtime& runtime,
                                              const StoreOptions& options,
                                              const CodedOptions& coded);
  ~Shards();

  const Shape& shape() const { return shape_; }
  const StoreId& store() const { return store_; }
  bool fresh() const { return fresh_; }
  void keep_files();
  // Makes the shard at this path anew, to be rebuilt: a superblock of epoch 0, durable. Nothing
  // where one of this store is there already.
  Status replace(const std::string& named, const StoreOptions& options, bool files);

  Member& operator[](size_t shard) { return shards_[shard]; }
  const Member& operator[](size_t shard) const { return shards_[shard]; }
  size_t size() const { return shards_.size(); }
  Loop& loop() { return loop_; }
  Stragglers& stragglers() { return stragglers_; }
  // What this writer puts by.
  const Fence& fence() const { return fence_; }
  // Whether a shard refused that: another writer has opened the store. Any thread.
  bool outdone() const { return outdone_; }
  void note_outdone() { outdone_ = true; }
  ShardSet present() const;
  // Those of them that ever were members: a new one knows of no epoch. All, of a store that is
  // being made.
  ShardSet knowing() const;
  // why those are that are not present: "; 'd0' is not there; 'd3' is blank"
  std::string missing() const;
  // The members of the highest confirmed epoch that are there and know of it: those that hold what
  // was acknowledged.
  ShardSet current() const;
  uint64_t epoch_seen() const;  // the highest, confirmed or proposed
  // Writes the superblocks of these shards, one copy after the other, durably. Returns the shards
  // that failed.
  ShardSet write_superblocks(ShardSet set, std::string& why);

 private:
  explicit Shards(const Runtime& runtime) : loop_(runtime.loop), pool_(runtime.pool) {}
  size_t index_of(const Member& member) const {
    return static_cast<size_t>(&member - shards_.data());
  }
  // Its bytes are reached by this file from now on.
  void reach(Member& member, const FileInfo& file) const;
  Status let_go(Member& member) const;  // of the file
  Status open_one(Member& shard, const StoreOptions& options, bool files);
  void read_superblock(Member& shard, std::optional<Superblock>& found);
  bool is_zeros(const Member& shard);
  static const Superblock& of_most(const std::vector<std::optional<Superblock>>& found);
  Status identify(const CodedPlan& plan, std::vector<std::optional<Superblock>> found);
  Status make(const CodedPlan& plan, const StoreOptions& options, const CodedOptions& coded,
              const std::vector<std::optional<Superblock>>& found);
  Status make_one(Member& shard, const StoreOptions& options, bool files, bool had_superblock);
  Status fence_present();
  Status fence_members();
  Status fence_one(Member& shard);
  void read_superblocks_again();

  Loop& loop_;
  Pool& pool_;
  Shape shape_;
  StoreId store_{};
  std::vector<Member> shards_;
  bool fresh_ = false;
  Fence fence_;
  std::atomic<bool> outdone_ = false;
  Stragglers stragglers_;
};

// A piece of a shard that is to be read as far as it can be.
struct Area {
  size_t shard = 0;
  uint64_t offset = 0;
  Slice into;
  std::vector<bool> readable = {};  // by block
  bool any() const { return std::find(readable.begin(), readable.end(), true) != readable.end(); }
  bool all() const { return std::find(readable.begin(), readable.end(), false) == readable.end(); }
};
// Reads them all at once, and what fails of them block by block: a bad sector takes nothing with it
// that stands beside it. What cannot be read is zeros. Why something could not; empty: all was
// read.
std::string read_areas(Shards& shards, Priority priority, std::span<Area> areas);

// Transfers on several shards that start together: reads, and waves of what is written to each.
// Use once.
class ShardBatch {
 public:
  ShardBatch(Shards& shards, Priority priority) : shards_(shards), priority_(priority) {}
  ShardBatch(const ShardBatch&) = delete;
  ShardBatch& operator=(const ShardBatch&) = delete;
  ~ShardBatch() { wait(); }  // for what was started and is not finished

  // The index of the read. `crcs`: what those of its blocks should be; none: they are not compared.
  size_t read(size_t shard, uint64_t offset, Slice into, std::vector<uint32_t> crcs = {});
  void write(size_t shard, uint64_t offset, Slice from);
  // What is written from here on follows, on each shard, once what stands before is durable there.
  // A shard does not wait for others.
  void next_wave() { ++wave_; }
  // These shards make durable at the end what was written, here and before.
  void flush(ShardSet set);
  bool empty() const { return reads_.empty() && puts_.empty(); }
  void start();
  // Waits for all of them. The shards of which any transfer failed; each is told in `trouble` of
  // its Member by whoever drops it.
  ShardSet finish();
  ShardSet run() {
    start();
    return finish();
  }
  // Of a read.
  bool ok(size_t index) const { return reads_[index].request.status.has_value(); }
  // Likewise: this block of it came, and is what its CRC says.
  bool right(size_t index, size_t block) const {
    const ShardRead& read = reads_[index].request;
    return ok(index) && (read.wrong.empty() || !read.wrong[block]);
  }
  const std::string& why() const { return why_; }  // of the first failure

 private:
  struct Read {
    ShardRead request;
    size_t shard;
  };
  ShardPut& put_to(size_t shard);
  template <typename Request>
  static void on_done(Request& request) noexcept;
  void wait();
  bool take_busy();
  void note(size_t shard, const Status& status, ShardSet& failed);

  Shards& shards_;
  const Priority priority_;
  std::deque<Read> reads_;           // do not move
  std::map<size_t, ShardPut> puts_;  // by shard
  size_t wave_ = 0;
  Mutex mutex_;
  CondVar done_;
  size_t left_ GUARDED_BY(mutex_) = 0;
  std::string why_;
};

// A shard that should come back cannot: `why` tells.
Error stays_out(const std::string& path, const std::string& why, Code code = Code::io);

}  // namespace stoker::coded
