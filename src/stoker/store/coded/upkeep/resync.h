// Resync: a shard that was away, or made anew, gets the chunks that it misses while the store works
// on. It counts again once it has all. And blocks that readers found bad are mended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "stoker/store/coded/fold/folder.h"

namespace stoker::coded {

// Writer thread. What it moves is spent of `pace`.
class Resync {
 public:
  Resync(const FoldParts& parts, Folder& folder, Pace& pace)
      : map_(parts.map),
        shards_(parts.shards),
        shape_(parts.shards.shape()),
        logs_(parts.logs),
        rebuilder_(parts.rebuilder),
        joining_(parts.joining),
        folder_(folder),
        pace_(pace) {}

  // A piece of a chunk, or an admission. False: there is nothing to do.
  Result<bool> step();
  // Shards that were given up are tried once more.
  void retry() { joining_.retry(); }

 private:
  Result<bool> mend_step();    // false: there is nothing to do
  Result<bool> resync_step();  // false: there is nothing to do
  void choose_to_mend(const MapState& map);
  // admit.cc
  Status admit();
  Status begin_log(size_t shard);
  Status make_readable(size_t shard, uint64_t offset, size_t bytes);
  Status make_zeros(size_t shard, const std::vector<uint64_t>& blocks);

  CommittedMap& map_;
  Shards& shards_;
  const Shape& shape_;
  LogSet& logs_;
  Rebuilder& rebuilder_;
  Joining& joining_;
  Folder& folder_;
  Pace& pace_;
  std::optional<Rebuilding> mending_;
  std::vector<ChunkAt> to_mend_;  // some of the bad ones, the last one first
};

}  // namespace stoker::coded
