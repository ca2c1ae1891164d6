// Which sample of which source stands at each position: pure functions of a few integers.
//
// Positions count through all epochs: position p of n samples is position p % n of epoch p / n. So
// a resume needs one integer, and any rank can compute any part of any epoch.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "stoker/base/order.h"

namespace stoker::data {

struct Pick {
  uint32_t source = 0;
  uint64_t sample = 0;

  friend bool operator==(const Pick&, const Pick&) = default;
};

// Immutable; any thread.
class Sequence {
 public:
  // All samples of one source, from the first to the last, every epoch. count: at least 1.
  static Sequence in_order(uint64_t count);
  // All samples of one source, once an epoch, each epoch in an order of its own.
  static Sequence shuffled(uint64_t count, uint64_t seed);
  // Endless draws from several sources by exact shares. Each source is shuffled, epoch by epoch: a
  // small one repeats sooner. counts: samples of each source, at least 1. invalid_argument names a
  // wrong weight, or says that there are not as many.
  static Result<Sequence> mixed(const std::vector<uint64_t>& counts,
                                const std::vector<double>& weights, uint64_t seed);

  // Samples of an epoch; nothing where there are no epochs.
  std::optional<uint64_t> count() const;
  // Of positions [first, last).
  std::vector<Pick> picks(uint64_t first, uint64_t last) const;

 private:
  struct InOrder {
    uint64_t count;
  };
  struct Shuffled {
    uint64_t count, seed;
  };
  struct Mixed {
    Mixture mixture;
    std::vector<Shuffled> parts;
  };
  explicit Sequence(std::variant<InOrder, Shuffled, Mixed> kind) : kind_(std::move(kind)) {}

  std::variant<InOrder, Shuffled, Mixed> kind_;
};

}  // namespace stoker::data
