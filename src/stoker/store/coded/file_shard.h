// FileShard: a shard in a file or on a device of this machine.
#pragma once

#include "stoker/store/coded/shard.h"

namespace stoker::coded {

class FileShard final : public Shard {
 public:
  // Whoever opened the file closes it, after this.
  FileShard(Loop& loop, FileId file) : loop_(loop), file_(file) {}
  void read(ShardRead& request, Plug& plug) override;
  void put(ShardPut& request, Plug& plug) override;

 private:
  Loop& loop_;
  const FileId file_;
};

}  // namespace stoker::coded
