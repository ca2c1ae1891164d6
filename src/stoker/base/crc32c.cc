#include "stoker/base/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>

namespace stoker {

uint32_t crc32c(const void* data, size_t bytes, uint32_t seed) {
  // ISA-L takes an int length and neither inverts its seed nor its result.
  constexpr size_t piece_max = size_t{1} << 30;
  auto* at = static_cast<const unsigned char*>(data);
  uint32_t state = ~seed;
  while (bytes > 0) {
    const size_t piece = std::min(bytes, piece_max);
    state = crc32_iscsi(const_cast<unsigned char*>(at), static_cast<int>(piece), state);
    at += piece;
    bytes -= piece;
  }
  return ~state;
}

uint32_t crc32c_reference(const void* data, size_t bytes, uint32_t seed) {
  constexpr uint32_t reversed_polynomial = 0x82F63B78U;
  auto* at = static_cast<const unsigned char*>(data);
  uint32_t state = ~seed;
  for (size_t i = 0; i < bytes; ++i) {
    state ^= at[i];
    for (int bit = 0; bit < 8; ++bit)
      state = (state >> 1) ^ ((state & 1U) != 0 ? reversed_polynomial : 0U);
  }
  return ~state;
}

}  // namespace stoker
