// Slice: borrowed bytes. Whoever hands one over keeps the memory alive and still until the work on
// it is done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "stoker/base/check.h"

namespace stoker {

struct Slice {
  std::byte* data = nullptr;
  size_t size = 0;
  // Arena::id() of the arena it lies in (an engine may have it registered), or -1
  int32_t arena = -1;

  Slice sub(size_t offset, size_t bytes) const {
    STOKER_CHECK(offset <= size && bytes <= size - offset);
    return {data + offset, bytes, arena};
  }
  std::span<std::byte> span() const { return {data, size}; }
};

}  // namespace stoker
