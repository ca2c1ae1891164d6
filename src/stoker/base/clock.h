// Time, replaceable: the real monotonic clock, or a virtual one that a simulator moves.
#pragma once

#include <cstdint>

namespace stoker {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual uint64_t now_ns() const = 0;  // monotonic; from an arbitrary start
  static const Clock& real();
};

// Moves only when told to. One thread moves it; any may read.
class VirtualClock final : public Clock {
 public:
  uint64_t now_ns() const override { return __atomic_load_n(&now_ns_, __ATOMIC_RELAXED); }
  void advance_to(uint64_t ns) { __atomic_store_n(&now_ns_, ns, __ATOMIC_RELAXED); }

 private:
  uint64_t now_ns_ = 0;
};

}  // namespace stoker
