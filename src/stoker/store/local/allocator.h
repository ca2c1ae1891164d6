// Allocator: which blocks of the volumes are free. Not thread-safe: the store's mutex guards it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "stoker/base/result.h"
#include "stoker/store/local/map.h"

namespace stoker::local {

// The free ranges of one volume, coalesced.
class FreeMap {
 public:
  void add(uint64_t block, uint64_t blocks);
  // Blocks that start exactly at `at`, if they are free.
  bool take_at(uint64_t at, uint64_t blocks);
  // From the start of the largest free range, so that what follows can lie behind it; short pieces
  // from the smallest that fits. The range at the end comes last: what was never written lies
  // there, and costs a file system more (it must note that it was) than to be written again.
  std::optional<uint64_t> take(uint64_t blocks);
  uint64_t free_blocks() const { return free_; }
  uint64_t largest() const { return sizes_.empty() ? 0 : sizes_.rbegin()->first; }

 private:
  using Ranges = std::map<uint64_t, uint64_t>;            // block -> blocks
  using Sizes = std::set<std::pair<uint64_t, uint64_t>>;  // (blocks, block) of the same ranges
  void carve(Ranges::iterator range, uint64_t at, uint64_t blocks);
  bool at_end(const Sizes::value_type& range) const { return range.second + range.first == end_; }
  Ranges ranges_;
  Sizes sizes_;
  uint64_t free_ = 0;
  uint64_t end_ = 0;  // behind the last block there ever was
};

// A contiguous piece set aside for the chunks of one object that are still to come.
struct Run {
  uint64_t next = 0, left = 0;  // blocks
};

class Allocator {
 public:
  explicit Allocator(const MapLimits& limits);
  // Takes what `map` names. corruption: two chunks overlap (named by volume and block).
  Status take_all(const Map& map);

  // `blocks` on `volume`, out of the object's run if there is one. A new run of up to `ahead`
  // blocks is set aside where space abounds.
  std::optional<Extent> take(size_t volume, uint64_t blocks, uint64_t ahead, Run& run);
  void give(const Extent& extent);
  void give_back(size_t volume, Run& run);

  size_t volumes() const { return volumes_.size(); }
  uint64_t free_blocks(size_t volume) const { return volumes_[volume].free_blocks(); }
  uint64_t largest_blocks(size_t volume) const { return volumes_[volume].largest(); }
  uint64_t free_bytes() const;
  uint64_t largest_bytes() const;
  uint64_t capacity_bytes() const { return capacity_; }

 private:
  bool inside(const Extent& extent) const;
  const MapLimits limits_;
  std::vector<FreeMap> volumes_;
  uint64_t capacity_ = 0;
};

}  // namespace stoker::local
