// FileShard: a shard in a file or on a device of this machine.
#pragma once

#include "stoker/base/mutex.h"
#include "stoker/base/pool.h"
#include "stoker/store/coded/shards/shard.h"

namespace stoker::coded {

class FileShard final : public Shard {
 public:
  // Whoever opened the file closes it, after this. Checksums are compared on the pool.
  FileShard(Loop& loop, Pool& pool, FileId file) : loop_(loop), pool_(pool), file_(file) {}
  Result<Fence> fenced() override EXCLUDES(fencing_);
  Status fence(const Fence& fence) override EXCLUDES(fencing_, mutex_);
  void read(ShardRead& request, Plug& plug) override;
  void put(ShardPut& request, Plug& plug) override EXCLUDES(mutex_);
  ShardScan scan(const ShardSegment& segment, Priority priority) override;
  ShardHealth health() const override EXCLUDES(health_mutex_);

 private:
  class PutFlight;
  struct ReadFlight;
  std::vector<uint64_t> read_each(Priority priority, uint64_t offset, Slice into);
  Fence stored() EXCLUDES(health_mutex_);
  Status store(const Fence& fence);
  void ended() EXCLUDES(mutex_);  // a put that was taken
  void note(uint64_t ShardHealth::*count, uint64_t more, std::string why) EXCLUDES(health_mutex_);

  Loop& loop_;
  Pool& pool_;
  const FileId file_;
  Mutex fencing_;  // one at a time reads or writes what is stored
  Mutex mutex_;
  CondVar none_under_way_;
  Fence fence_ GUARDED_BY(mutex_);  // number 0: nobody's puts are taken
  size_t under_way_ GUARDED_BY(mutex_) = 0;
  mutable Mutex health_mutex_;
  ShardHealth health_ GUARDED_BY(health_mutex_);
};

}  // namespace stoker::coded
