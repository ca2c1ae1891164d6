// What tests of caches share.
#pragma once

#include "stoker/base/bytes.h"
#include "stoker/memory/budget.h"

namespace stoker {

inline constexpr uint32_t kBlock = 64 * kKiB;  // of a cache

inline Budget& no_limit() {
  static Budget budget(UINT64_MAX);
  return budget;
}

}  // namespace stoker
