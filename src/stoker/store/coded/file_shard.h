// FileShard: a shard in a file or on a device of this machine.
#pragma once

#include "stoker/base/mutex.h"
#include "stoker/store/coded/shard.h"

namespace stoker::coded {

class FileShard final : public Shard {
 public:
  // Whoever opened the file closes it, after this.
  FileShard(Loop& loop, FileId file) : loop_(loop), file_(file) {}
  Result<Fence> fenced() override EXCLUDES(fencing_);
  Status fence(const Fence& fence) override EXCLUDES(fencing_, mutex_);
  void read(ShardRead& request, Plug& plug) override;
  void put(ShardPut& request, Plug& plug) override EXCLUDES(mutex_);
  ShardScan scan(const ShardSegment& segment, Priority priority) override;

 private:
  class PutFlight;
  std::vector<uint64_t> read_each(Priority priority, uint64_t offset, Slice into);
  Fence stored();
  Status store(const Fence& fence);
  void ended() EXCLUDES(mutex_);  // a put that was taken

  Loop& loop_;
  const FileId file_;
  Mutex fencing_;  // one at a time reads or writes what is stored
  Mutex mutex_;
  CondVar none_under_way_;
  Fence fence_ GUARDED_BY(mutex_);  // number 0: nobody's puts are taken
  size_t under_way_ GUARDED_BY(mutex_) = 0;
};

}  // namespace stoker::coded
