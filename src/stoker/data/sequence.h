// Which sample of which source stands at each position: pure functions of a few integers.
//
// Positions count through all epochs: position p of n samples is position p % n of epoch p / n. So
// a resume needs one integer, and any rank can compute any part of any epoch.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <variant>
#include <vector>

#include "stoker/base/order.h"

namespace stoker::data {

struct Pick {
  uint32_t source = 0;
  uint64_t sample = 0;

  friend bool operator==(const Pick&, const Pick&) = default;
};

// Samples of a source that follow one another and are used about the same time: worth one read.
struct Neighbours {
  uint32_t source = 0;
  uint64_t lane = 0;  // of WindowOrder
  uint64_t turn = 0;  // windows of this lane that were before, of all epochs
  uint64_t sample = 0;
  uint64_t count = 0;

  friend bool operator<(const Neighbours& a, const Neighbours& b) {
    return std::tie(a.source, a.lane, a.turn, a.sample, a.count) <
           std::tie(b.source, b.lane, b.turn, b.sample, b.count);
  }
};

// What positions mean for who reads them.
struct Reads {
  std::vector<Pick> picks;
  // The neighbours of each pick; empty: samples are used far from their neighbours.
  std::vector<Neighbours> of_picks;
  // What the next window begins with, as far as this one was passed: worth reading ahead.
  std::vector<Neighbours> soon;
};

// Immutable; any thread.
class Sequence {
 public:
  // All samples of one source, from the first to the last, every epoch. count: at least 1.
  static Sequence in_order(uint64_t count);
  // All samples of one source, once an epoch, each epoch in an order of its own.
  static Sequence shuffled(uint64_t count, uint64_t seed);
  // As shuffled(), each epoch in the order of a WindowOrder.
  static Sequence windowed(const WindowShape& shape, uint64_t seed);
  // Endless draws from several sources by exact shares. Each source is shuffled, epoch by epoch: a
  // small one repeats sooner. counts: samples of each source, at least 1. invalid_argument names a
  // wrong weight, or says that there are not as many.
  static Result<Sequence> mixed(const std::vector<uint64_t>& counts,
                                const std::vector<double>& weights, uint64_t seed);

  // Samples of an epoch; nothing where there are no epochs.
  std::optional<uint64_t> count() const;
  // Of positions [first, last).
  std::vector<Pick> picks(uint64_t first, uint64_t last) const;
  Reads reads(uint64_t first, uint64_t last) const;

 private:
  struct InOrder {
    uint64_t count;
  };
  struct Shuffled {
    uint64_t count, seed;
  };
  struct Windowed {
    WindowShape shape;
    uint64_t seed;
  };
  struct Mixed {
    Mixture mixture;
    std::vector<Shuffled> parts;
  };
  using Kind = std::variant<InOrder, Shuffled, Windowed, Mixed>;
  explicit Sequence(Kind kind) : kind_(std::move(kind)) {}

  Kind kind_;
};

}  // namespace stoker::data
