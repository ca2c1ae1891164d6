// The order of samples as pure functions: no arrays, O(1) time and memory both ways.
//
// The same functions tell a loader what to read and a cache what is read next. So both compute the
// same future from a few integers.
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

// What a window order is an order of, and how.
struct WindowShape {
  uint64_t count = 1;  // samples, 1 to 2^62
  // So many samples that follow one another stay together, until a window mixes them.
  uint64_t run = 1;
  uint64_t window = 1;  // samples that a window mixes
  // The places of a batch are shared out evenly among so many lanes, and each has windows of its
  // own: who reads some places of each batch needs the bytes of their lanes only. It divides
  // `batch`.
  uint64_t lanes = 1;
  uint64_t batch = 1;
};

// Samples that follow one another and stand in one window: what is read together.
struct Stretch {
  uint64_t lane = 0;    // the last one, lanes + 1 in all, has what does not fill a batch
  uint64_t window = 0;  // of the lane
  uint64_t sample = 0;  // the first
  uint64_t count = 0;

  friend bool operator==(const Stretch&, const Stretch&) = default;
};

// A permutation of [0, count) in two levels, for sources where neighbours are read at one cost.
//
// Runs are permuted and laid one behind the other: the line. Each lane has an equal part of the
// line, whole batches of it, and cuts that into windows; each window is permuted by itself. Batch b
// has the b-th samples of each lane. What does not fill a batch follows at the end, as one window
// of its own. As in Permutation, nothing of this needs an array, and the bits never change.
class WindowOrder {
 public:
  WindowOrder(const WindowShape& shape, uint64_t seed, uint64_t epoch);

  uint64_t count() const { return shape_.count; }
  uint64_t sample(uint64_t position) const;
  // The inverse of sample().
  uint64_t position(uint64_t sample) const;
  // The one that sample(position) is in.
  Stretch stretch(uint64_t position) const;
  // How much of its window was passed before this position, of `kWhole`.
  static constexpr uint64_t kWhole = 1024;
  uint64_t passed(uint64_t position) const;
  // All of a window of a lane; empty: the lane has not as many.
  std::vector<Stretch> stretches(uint64_t lane, uint64_t window) const;

 private:
  struct Place {
    uint64_t lane, within;  // the lane
  };
  struct Part {
    uint64_t first, last;  // of the line
  };
  struct Slot {
    uint64_t run, first, last;  // of the line
  };

  uint64_t lane_samples(uint64_t lane) const;
  uint64_t window_samples(uint64_t lane) const;
  Place place(uint64_t position) const;
  Part part(uint64_t lane, uint64_t window) const;
  Permutation mixed(uint64_t lane, uint64_t window, const Part& part) const;
  uint64_t line(const Place& place) const;
  Slot slot(uint64_t number) const;
  Slot slot_at(uint64_t line) const;

  WindowShape shape_;
  uint64_t seed_, epoch_;
  uint64_t lane_samples_;  // of each lane but the last
  Permutation runs_;
  uint64_t short_slot_, short_run_;  // where the last run stands, and its samples
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
