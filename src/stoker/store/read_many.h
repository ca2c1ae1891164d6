// Many ranges of many objects by one call: a batch of samples.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "stoker/store/store.h"

namespace stoker {

struct Piece {
  uint64_t object = 0;  // which of the keys
  uint64_t offset = 0;  // in the object
  uint64_t bytes = 0;
  uint64_t into = 0;  // in the memory
};

// Reads every piece into its place; pieces may be of any order and length, their places must not
// overlap. All are asked for at once, and the memory stays untouched by others until the future is
// done. The error is that of the first piece that failed, in the order given; no read is going on
// any more then. invalid_argument: a piece of a key that is not there, or outside the memory;
// nothing was read then.
Future<void> read_many(Store& store, std::span<const std::string> keys,
                       std::span<const Piece> pieces, Slice into, const ReadOptions& options = {});

}  // namespace stoker
