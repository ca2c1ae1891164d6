#include "stoker/store/s3/pace.h"

#include <algorithm>

namespace stoker::s3 {
namespace {

constexpr double kWindowMin = 2, kWindowMax = 64;
constexpr uint64_t kCutPause_ns = 200'000'000;  // one storm makes the window smaller once
// Where the first byte takes so many times as long as at best, fewer at once are done as soon. By
// that alone the window stays large enough to keep a quick server busy.
constexpr uint64_t kCrowdedFactor = 4, kCrowdedMin_ns = 20'000'000;
constexpr double kCrowdedCut = 0.75, kCrowdedWindowMin = 8;
constexpr size_t kWaits = 256, kWaitsMin = 20;        // that say what is usual
constexpr double kHedgeShare = 0.02, kHedgesMax = 8;  // of all requests; at once

}  // namespace

// More at once as long as all goes well and as quickly; fewer, once in the time that an answer
// takes, where it goes slowly.
void Pace::well(uint64_t now_ns) {
  if (!crowded()) {
    window_ = std::min(kWindowMax, window_ + 1 / window_);
  } else if (window_ > kCrowdedWindowMin && now_ns - cut_at_ns_ > recent_wait_ns_) {
    window_ = std::max(kCrowdedWindowMin, kCrowdedCut * window_);
    cut_at_ns_ = now_ns;
  }
}

void Pace::refused(uint64_t now_ns) {
  if (now_ns - cut_at_ns_ <= kCutPause_ns) return;
  window_ = std::max(kWindowMin, window_ / 2);
  cut_at_ns_ = now_ns;
}

void Pace::waited(uint64_t wait_ns) {
  recent_wait_ns_ = recent_wait_ns_ == 0 ? wait_ns : (7 * recent_wait_ns_ + wait_ns) / 8;
  if (waits_ns_.size() < kWaits)
    waits_ns_.push_back(wait_ns);
  else
    waits_ns_[next_wait_++ % kWaits] = wait_ns;
}

std::optional<uint64_t> Pace::usual_ns() {
  hedges_ = std::min(kHedgesMax, hedges_ + kHedgeShare);
  if (waits_ns_.size() < kWaitsMin) return {};
  std::vector<uint64_t> waits = waits_ns_;
  const auto at = waits.begin() + static_cast<std::ptrdiff_t>(waits.size() * 95 / 100);
  std::nth_element(waits.begin(), at, waits.end());
  return *at;
}

bool Pace::take_hedge() {
  if (hedges_ < 1) return false;
  hedges_ -= 1;
  return true;
}

bool Pace::crowded() const {
  if (waits_ns_.empty()) return false;
  const uint64_t best = *std::min_element(waits_ns_.begin(), waits_ns_.end());
  return recent_wait_ns_ > kCrowdedFactor * std::max(best, kCrowdedMin_ns);
}

}  // namespace stoker::s3
