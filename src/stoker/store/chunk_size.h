// The sizes that a chunk of an object may have, the same in every store.
#pragma once

#include <cstdint>

#include "stoker/base/bytes.h"
#include "stoker/base/result.h"

namespace stoker {

inline constexpr uint32_t kChunkMin = 64 * kKiB;
inline constexpr uint32_t kChunkMax = 8 * kMiB;

constexpr bool valid_chunk_bytes(uint32_t bytes) {
  return bytes % kIoAlign == 0 && bytes >= kChunkMin && bytes <= kChunkMax;
}

// invalid_argument unless a caller may ask for chunks of this size.
inline Status check_chunk_bytes(uint32_t bytes) {
  if (valid_chunk_bytes(bytes)) return {};
  return fail(Code::invalid_argument,
              "chunk_bytes is a multiple of 4 KiB from 64 KiB to 8 MiB, not {} bytes", bytes);
}

}  // namespace stoker
