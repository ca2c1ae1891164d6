// Pace: how much of the background may move now, so that those who use the store are not kept
// waiting. A token bucket with two rates.
#pragma once

#include <atomic>
#include <cstdint>

#include "stoker/base/clock.h"

namespace stoker::coded {

// One thread asks; any thread spends, and tells that the store is used.
class Pace {
 public:
  // Bytes a second, 0: no limit; `busy_rate` also holds while others use the store (within the last
  // 100 ms).
  Pace(uint64_t rate, uint64_t busy_rate, const Clock& clock = Clock::real())
      : rate_(rate), busy_rate_(busy_rate), clock_(clock), at_ns_(clock.now_ns()) {}

  void used() { used_ns_.store(clock_.now_ns(), std::memory_order_relaxed); }
  // How long until the next step may begin; 0: now.
  uint64_t wait_ns();
  // Nothing holds it back now: there is no rate, or only one for while others use the store.
  bool free() const;
  // What a step moved. It may be more than was there: the next one then waits for it.
  void spend(uint64_t bytes) { spent_.fetch_add(bytes, std::memory_order_relaxed); }
  uint64_t spent() const { return spent_.load(std::memory_order_relaxed); }  // in all

 private:
  bool busy(uint64_t now) const;

  const uint64_t rate_, busy_rate_;
  const Clock& clock_;
  std::atomic<uint64_t> used_ns_{0};
  uint64_t at_ns_;     // when tokens_ was counted
  double tokens_ = 0;  // bytes; below 0: owed
  std::atomic<uint64_t> spent_{0};
  uint64_t counted_ = 0;  // of what was spent, in tokens_
};

// Of what goes on in the background of one store.
struct Paces {
  Pace repair;  // and scrub
  Pace fold;
  Pace patrol;
  void used() {  // any thread: somebody uses the store
    repair.used();
    fold.used();
  }
};

}  // namespace stoker::coded
