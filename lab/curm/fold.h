// Fold: computes the new parity bytes of a stripe whose data chunks have newer bytes than their
// bases. What is read, by whom, is decided range by range: the old bytes of what is dirty and the
// old parity, or the clean chunks instead (reconstruct-write).
#pragma once

#include <functional>
#include <map>
#include <vector>

#include "curm/range_map.h"
#include "curm/substrate.h"

namespace stoker::curm {

class Fold {
 public:
  using Newest = std::map<int, RangeMap<Value>>;          // by position of the data chunk
  using Ranges = std::vector<std::pair<uint64_t, Slot>>;  // offset, new bytes
  Fold(Substrate& substrate, const Geometry& geometry, const codec::ErasureCode& code,
       uint64_t stripe, const Newest& newest, uint64_t gap_max = 0)
      : substrate_(substrate),
        geometry_(geometry),
        code_(code),
        stripe_(stripe),
        newest_(newest),
        gap_max_(gap_max) {}

  // Cuts the stripe into ranges, and reads of data chunks what they need. `reconstructs`: of so
  // many dirty chunks.
  Status read_data(const std::function<bool(int dirty)>& reconstructs, bool background);
  // The new bytes of the parity, computed on its node within the errand, or sent to it.
  Ranges parity(Errand& errand, int index) const;
  // The new bytes of the dirty data chunks.
  std::map<Chunk, Ranges> data() const;

 private:
  std::vector<Value> column(uint64_t at, uint64_t bytes) const;
  Value newest(int position, uint64_t at, uint64_t bytes) const;

  Substrate& substrate_;
  const Geometry& geometry_;
  const codec::ErasureCode& code_;
  const uint64_t stripe_;
  const Newest& newest_;
  const uint64_t gap_max_;               // a gap of a chunk that is read along
  RangeMap<int> by_delta_, by_columns_;  // the ranges of either way
  std::map<int, RangeMap<Value>> base_;  // what was read of data chunks
};

}  // namespace stoker::curm
