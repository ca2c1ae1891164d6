#include "stoker/store/coded/shards/pace.h"

#include <algorithm>
#include <utility>

namespace stoker::coded {
namespace {

constexpr uint64_t kBusyNs = 100'000'000;
constexpr double kBurstSeconds = 0.1;  // what may be saved up

}  // namespace

bool Pace::busy(uint64_t now) const {
  const uint64_t used = used_ns_.load(std::memory_order_relaxed);
  return used != 0 && now < used + kBusyNs;
}

bool Pace::free() const { return rate_ == 0 && (busy_rate_ == 0 || !busy(clock_.now_ns())); }

uint64_t Pace::wait_ns() {
  const uint64_t now = clock_.now_ns();
  uint64_t rate = rate_;
  if (busy(now) && busy_rate_ != 0) rate = rate == 0 ? busy_rate_ : std::min(rate, busy_rate_);
  const auto seconds = static_cast<double>(now - at_ns_) / 1e9;
  at_ns_ = now;
  const uint64_t spent = this->spent();
  tokens_ -= static_cast<double>(spent - std::exchange(counted_, spent));
  if (rate == 0) {
    tokens_ = 0;
    return 0;
  }
  tokens_ = std::min(tokens_ + seconds * static_cast<double>(rate),
                     kBurstSeconds * static_cast<double>(rate));
  return tokens_ >= 0 ? 0 : static_cast<uint64_t>(-tokens_ / static_cast<double>(rate) * 1e9) + 1;
}

}  // namespace stoker::coded
