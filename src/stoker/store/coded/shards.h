// The shards of a coded store: their files, locks, identity and superblocks; who is live; batches
// of transfers that tell which shard failed.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "stoker/io/loop.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/coded/format.h"
#include "stoker/store/coded/log.h"
#include "stoker/store/coded/store.h"
#include "stoker/store/coded/stragglers.h"
#include "stoker/store/store_file.h"

namespace stoker::coded {

struct Shard : StoreFile {
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

  bool present() const { return file.id >= 0; }
};

// Closes and unlocks when destroyed, once no reads are left behind. Not thread-safe, but for the
// files, which any thread may read and write.
class Shards {
 public:
  // Opens, locks and identifies the shards of one store and puts them in the order of their
  // indices; makes them where there is none (fresh() then), if options.create says so.
  static Result<std::unique_ptr<Shards>> open(const CodedPlan& plan, Loop& loop,
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

  Shard& operator[](size_t shard) { return shards_[shard]; }
  const Shard& operator[](size_t shard) const { return shards_[shard]; }
  size_t size() const { return shards_.size(); }
  Loop& loop() { return loop_; }
  Stragglers& stragglers() { return stragglers_; }
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
  explicit Shards(Loop& loop) : loop_(loop) {}
  Status open_one(Shard& shard, const StoreOptions& options, bool files);
  void read_superblock(Shard& shard, std::optional<Superblock>& found);
  bool is_zeros(const Shard& shard);
  static const Superblock& of_most(const std::vector<std::optional<Superblock>>& found);
  Status identify(const CodedPlan& plan, std::vector<std::optional<Superblock>> found);
  Status make(const CodedPlan& plan, const StoreOptions& options, const CodedOptions& coded,
              const std::vector<std::optional<Superblock>>& found);
  Status make_one(Shard& shard, const StoreOptions& options, bool files, bool had_superblock);

  Loop& loop_;
  Shape shape_;
  StoreId store_{};
  std::vector<Shard> shards_;
  bool fresh_ = false;
  Stragglers stragglers_;
};

// A piece of a shard that is to be read as far as it can be.
struct Area {
  size_t shard = 0;
  uint64_t offset = 0;
  Slice into;
  std::vector<bool> readable = {};  // by block
  bool any() const { return std::find(readable.begin(), readable.end(), true) != readable.end(); }
};
// Reads them all at once, and what fails of them block by block: a bad sector takes nothing with it
// that stands beside it. What cannot be read is zeros. Why something could not; empty: all was
// read.
std::string read_areas(Shards& shards, Priority priority, std::span<Area> areas);

// Transfers on several shards that start together. Use once.
class ShardBatch {
 public:
  ShardBatch(Shards& shards, Priority priority)
      : shards_(shards), batch_(shards.loop(), priority) {}
  size_t read(size_t shard, uint64_t offset, Slice into) {
    return note(shard, [&] { batch_.read(shards_[shard].file.id, offset, into); });
  }
  size_t write(size_t shard, uint64_t offset, Slice from) {
    return note(shard, [&] { batch_.write(shards_[shard].file.id, offset, from); });
  }
  void sync(ShardSet set);
  bool empty() const { return batch_.empty(); }
  size_t size() const { return batch_.size(); }
  // The shards of which any transfer failed; each is told in `trouble` of its Shard by whoever
  // drops it.
  ShardSet run();
  bool ok(size_t index) const { return batch_.result(index).has_value(); }
  const std::string& why() const { return why_; }  // of the first failure

 private:
  template <typename Add>
  size_t note(size_t shard, Add add) {
    STOKER_CHECK(shards_[shard].present());
    add();
    shard_of_.push_back(shard);
    return shard_of_.size() - 1;
  }
  Shards& shards_;
  IoBatch batch_;
  std::vector<size_t> shard_of_;
  std::string why_;
};

}  // namespace stoker::coded
