// Makes the floats of a checkpoint smaller without loss: the bytes of each element are grouped by
// their significance, and zstd's Huffman coder, which finds that exponents repeat, packs the
// groups. What comes out is standard: `zstd -d` gives the groups back. docs/formats/checkpoint.md
// has the format.
//
// Any thread, which keeps some memory for its next call: as much as a chunk, and zstd's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "stoker/base/bytes.h"
#include "stoker/base/result.h"

namespace stoker::codec {

// Stored bytes are a multiple of this, so that the next chunk lies where a disk likes it.
inline constexpr size_t kReducedAlign = 4 * kKiB;

struct Reduced {
  size_t bytes = 0;    // of what is stored
  uint32_t width = 0;  // bytes of an element: 1, 2, 4 or 8; 0: stored as it is
};

// Into memory of the same size, which shares none with `from`. Which width is tried on a part.
// What does not get smaller is stored as it is, and is then not copied.
Reduced reduce(std::span<const std::byte> from, std::span<std::byte> into);

// The way back. `corruption` unless `stored` is what reduce() makes of so many bytes.
Status expand(std::span<const std::byte> stored, uint32_t width, std::span<std::byte> into);

}  // namespace stoker::codec
