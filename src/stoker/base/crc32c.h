// CRC32C (Castagnoli), the checksum of every chunk and frame. crc32c(b, crc32c(a)) == crc32c(a +
// b); crc32c("") == 0.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stoker {

// By ISA-L (which dispatches to hardware); `seed` is the CRC of the bytes before.
uint32_t crc32c(const void* data, size_t bytes, uint32_t seed = 0);
// Bytewise reference of the same function, for differential tests.
uint32_t crc32c_reference(const void* data, size_t bytes, uint32_t seed = 0);

}  // namespace stoker
