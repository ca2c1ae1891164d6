// TileMemory: the places that tiles live in, and with that the bound on the tiles in flight.
//
// Some are its own for good. Others are lent, for one tile each: the memory of gradients that do
// not exist yet holds state that is read ahead. They are not used again, so that the lender rarely
// waits when it wants the memory back. Not thread-safe; guarded by the Updater's mutex.
#pragma once

#include <cstdint>
#include <vector>

#include "stoker/memory/arena.h"

namespace stoker::offload {

class TileMemory {
 public:
  explicit TileMemory(std::vector<Buffer> own);  // all of one size, that of a tile

  // own ones, and lent ones that were not given back yet, nor recalled
  size_t places() const { return places_; }
  bool any_free() const { return !free_.empty(); }
  Slice take();  // one is free; lent ones first
  void give(const Slice& place);
  bool lent(const Slice& place) const;  // it serves no other tile after this one

  // Adds as many places as the region holds whole; how many. The region lent last is taken first.
  size_t lend(const Slice& region);
  // No place of the region is handed out any more. False if it is not lent. Several may recall one
  // region.
  bool begin_recall(const Slice& region);
  // Whether no tile lives there any more; then the region is its lender's again.
  bool end_recall(const Slice& region);
  static bool within(const Slice& place, const Slice& region) {
    return place.data >= region.data && place.data < region.data + region.size;
  }

 private:
  struct Loan {
    Slice region;
    size_t taken = 0;  // places in which a tile lives
    bool recalled = false;
  };
  Loan* loan_of(const Slice& place);
  const Loan* loan_of(const Slice& place) const {
    return const_cast<TileMemory*>(this)->loan_of(place);
  }

  const std::vector<Buffer> own_;
  const size_t place_bytes_;
  std::vector<Slice> free_;  // own ones first, so that lent ones are taken from the back
  std::vector<Loan> loans_;
  size_t places_;
};

}  // namespace stoker::offload
