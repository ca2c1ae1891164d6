#include "stoker/base/clock.h"

#include <chrono>

namespace stoker {
namespace {
class RealClock final : public Clock {
 public:
  uint64_t now_ns() const override {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                     std::chrono::steady_clock::now().time_since_epoch())
                                     .count());
  }
};
}  // namespace

const Clock& Clock::real() {
  static const RealClock clock;
  return clock;
}

}  // namespace stoker
