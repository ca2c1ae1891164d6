#include "stoker/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace stoker {

void check_failed(const char* condition, const char* file, int line) noexcept {
  std::fprintf(stderr, "stoker: bug: %s does not hold at %s:%d\n", condition, file, line);
  std::abort();
}

}  // namespace stoker
