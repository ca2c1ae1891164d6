// Random numbers for generated traces, the same everywhere: std::mt19937_64 is, the standard's
// distributions are not.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>

namespace stoker::curm {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  double share() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  uint64_t below(uint64_t end) { return static_cast<uint64_t>(share() * static_cast<double>(end)); }
  bool chance(double probability) { return share() < probability; }
  uint64_t log_uniform(uint64_t low, uint64_t high) {
    return static_cast<uint64_t>(
        static_cast<double>(low) *
        std::pow(static_cast<double>(high) / static_cast<double>(low), share()));
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace stoker::curm
