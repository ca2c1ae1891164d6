// DirStore: docs/stores/dir.md is the protocol.
//
// Threads: any thread calls in. resize(), stat(), list() and copy() make system calls on the
// caller's thread. Writes, reads and commits run on the store's own threads, which wait there for
// the disk. One more thread gives back the space of files that were replaced. No mutex is held over
// a write or a flush.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/base/pool.h"
#include "stoker/io/buffered.h"
#include "stoker/store/condition.h"
#include "stoker/store/dir/beneath.h"
#include "stoker/store/dir/spares.h"
#include "stoker/store/dir/store.h"
#include "stoker/store/one_object.h"
#include "stoker/store/read_many.h"

namespace stoker::dir {

// What a transaction has staged. Outlives it while writes or the commit are under way.
struct Staged : OneObject {
  Staged();

  // Set by resize(), then read by the writes.
  Fd file, folder;
  std::string folder_path, name;  // of the temporary file
  FileId direct = -1;             // opened in the Loop by the first write that wants it
  // Of a spare: what was written, begin to end; all else holds what was there before. Guarded as
  // what OneObject has.
  std::optional<std::map<uint64_t, uint64_t>> written;

  std::string path() const { return folder_path.empty() ? name : folder_path + "/" + name; }
};
using StagedPtr = std::shared_ptr<Staged>;

// A piece that the page cache takes, in a call of read_many().
struct Small {
  size_t piece = 0;  // its number there
  uint64_t offset = 0;
  Slice into;
};

class DirStore final : public Store {
 public:
  static Result<std::unique_ptr<Store>> open(const std::string& path, const Runtime& runtime,
                                             const StoreOptions& options, const DirOptions& dir);

  Features features() const override { return {.atomic = AtomicUnit::object, .conditional = true}; }
  Result<ObjectInfo> stat(std::string_view key, std::string_view snapshot) override;
  Result<std::vector<ObjectInfo>> list(std::string_view prefix, std::string_view snapshot) override;
  Result<Level> list_level(std::string_view prefix, std::string_view snapshot) override;
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override;
  Future<void> read_many(std::span<const std::string> keys, std::span<const Piece> pieces,
                         Slice into, ReadOptions options) override;
  Result<std::unique_ptr<Transaction>> begin() override;
  Result<Version> copy(std::string_view from, std::string_view to) override;
  Future<void> snapshot(std::string_view name) override;
  Future<void> drop(std::string_view name, Durability durability) override;
  void keep_space(uint64_t bytes) override;
  StoreInfo info() const override;

  // write.cc: for its transactions
  using Store::remove;
  Status resize(Staged& staged, std::string_view key, uint64_t bytes, uint32_t chunk_bytes);
  Future<void> write(const StagedPtr& staged, std::string_view key, uint64_t offset, Slice from,
                     Priority priority);
  Status remove(Staged& staged, std::string_view key);
  Status require(Staged& staged, std::string_view key, std::string_view tag);
  Future<Version> commit(const StagedPtr& staged);
  void abandon(const StagedPtr& staged);

 private:
  DirStore(Beneath root, Fd folder, const Runtime& runtime, const StoreOptions& options,
           const DirOptions& dir);

  // read.cc
  Status read_now(const std::string& key, uint64_t offset, Slice into,
                  const ReadOptions& options) const;
  Result<Fd> open_object(const std::string& key, uint64_t* bytes) const;
  void read_small(const std::map<std::string, std::vector<Small>>& by_key, Countdown& rest);
  std::unique_ptr<BufferedReader> take_reader();
  struct Walk;
  Result<Fd> open_prefix(std::string_view prefix) const;
  Status walk(const Fd& folder, const std::string& path, Walk& walk) const;

  // write.cc
  Status begin_object(Staged& staged, uint64_t bytes);
  Status make_temporary(Staged& staged, uint64_t bytes);
  void take_spare(Staged& staged, uint64_t bytes);
  Status clear_unwritten(Staged& staged) const;
  void sweep(const Fd& folder, const std::string& path);
  void remove_dead(const Fd& folder) const;
  Status write_now(Staged& staged, FileId direct, uint64_t offset, Slice from, Priority priority);
  void ended(const StagedPtr& staged, const Status& status);
  Result<Version> commit_now(Staged& staged);
  Status publish(Staged& staged);
  Result<Version> publish_link(Staged& staged);
  Fd hold_old(const Staged& staged) const;
  void free_later(Fd old);
  void wait_for_freed();
  Status place(Staged& staged, const std::string& name) const;
  Status take_away(const Staged& staged, const std::optional<Spare>& spare) const;
  void drop_temporary(Staged& staged);
  void close_direct(Staged& staged) const;
  void prune(std::string folder) const;
  Status stamp(const Fd& file, const std::string& path);
  Result<Fd> lock(bool alone) const;
  void step(const DirStep& done) const;
  Error read_only_error() const;

  const Runtime runtime_;
  const bool read_only_;
  const DirOptions options_;
  const Beneath root_;
  std::atomic<uint64_t> commits_{0};
  std::atomic<int64_t> last_stamp_ns_{0};
  Mutex swept_mutex_;
  // folders in which temporary files of the dead were looked for
  std::set<std::string> swept_ GUARDED_BY(swept_mutex_);
  Mutex readers_mutex_;
  // that no job uses now, one a thread at most
  std::vector<std::unique_ptr<BufferedReader>> readers_ GUARDED_BY(readers_mutex_);
  Spares spares_;
  std::atomic<size_t> freeing_{0};
  Pool freer_{1};
  Pool files_{4};  // the last member: it ends before what its jobs use
};

using DirTransaction = OneObjectTransaction<DirStore, Staged>;

// A file's inode, size and modification time.
std::string tag_of(const struct stat& status);

}  // namespace stoker::dir
