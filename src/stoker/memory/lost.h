// Memory of transfers that were given up (io/loop.h): the kernel may read or write it at any later
// time, so it is never used again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "stoker/memory/slice.h"

namespace stoker {

// Slice::arena of heap memory whose owner asks is_lost() before it frees it, and then does not.
inline constexpr int32_t kLosableHeap = -2;

// Whoever owns this memory keeps it back when it is lost: an Arena, or as above.
inline bool losable(const Slice& memory) {
  return memory.arena >= 0 || memory.arena == kLosableHeap;
}

// For the life of the process. Any thread.
void lose(const Slice& memory);
// Whether any byte of these was lost. One load while nothing was.
bool is_lost(const std::byte* data, size_t bytes);

}  // namespace stoker
