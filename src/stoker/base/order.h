// The order of samples as pure functions: no arrays, O(1) time and memory both ways.
//
// The same functions tell a loader what to read and a cache what is read next, so both compute
// the same future from a few integers.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "stoker/base/result.h"

namespace stoker {

// An invertible permutation of [0, count), keyed by (seed, epoch).
//
// A balanced Feistel network permutes the smallest even number of bits that holds `count`. A value
// that falls outside [0, count) is sent through again until it is inside: at most 4 times on
// average. The bits are part of what a saved data position means: they never change.
class Permutation {
 public:
  // count: at least 1 and at most 2^63.
  Permutation(uint64_t count, uint64_t seed, uint64_t epoch);

  uint64_t count() const { return count_; }
  // position: less than count().
  uint64_t sample(uint64_t position) const;
  // The inverse of sample(). sample: less than count().
  uint64_t position(uint64_t sample) const;

 private:
  // Four rounds make a pseudo-random permutation of large halves; two more serve counts of few
  // bits.
  static constexpr size_t kRounds = 6;

  uint64_t forward(uint64_t value) const;
  uint64_t backward(uint64_t value) const;

  uint64_t count_;
  uint32_t half_bits_;
  uint64_t half_mask_;
  std::array<uint64_t, kRounds> keys_;
};

// One step of a mixture: the draw number `number` (from 0) of source `source`.
struct Draw {
  uint32_t source = 0;
  uint64_t number = 0;

  friend bool operator==(const Draw&, const Draw&) = default;
};

// Which of several sources each position of an endless sequence draws from.
//
// A cycle has 65,536 draws. Each source has a fixed count of them: its share, rounded so that the
// counts add up and none is zero. Each cycle permutes its draws anew. So a share is exact in every
// cycle, and position <-> draw needs no history.
class Mixture {
 public:
  static constexpr uint64_t kCycle = 65'536;

  // weights: 1 to 65,536 of them, finite and above zero, of any sum. invalid_argument names the
  // wrong one.
  static Result<Mixture> make(std::span<const double> weights, uint64_t seed);

  Draw draw(uint64_t position) const;
  // The inverse of draw(). draw.source: less than counts().size().
  uint64_t position(const Draw& draw) const;
  // Draws of each source in a cycle; they add up to kCycle.
  std::span<const uint32_t> counts() const { return counts_; }

 private:
  Mixture(std::vector<uint32_t> counts, uint64_t seed);

  std::vector<uint32_t> counts_;
  std::vector<uint32_t> starts_;  // first draw of each source in a cycle that is not permuted
  uint64_t seed_;
};

}  // namespace stoker
