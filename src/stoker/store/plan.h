// Plan: what will be read from a store, and in which order. Data: whoever holds a copy computes the
// same future from it.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace stoker {

// Items of equal bytes in one object, `stride` bytes from one to the next.
struct PlanRun {
  uint64_t object = 0;  // which of the keys
  uint64_t offset = 0;  // of the first item
  uint64_t bytes = 0;   // of each
  uint64_t items = 1;
  uint64_t stride = 0;
};

struct Plan {
  // Each item once, from the first to the last.
  struct Listed {};
  // All items once an epoch: in epoch e, the order of Permutation(items, seed, e).
  struct Shuffled {
    uint64_t seed = 0;
  };
  // Endless draws by Mixture(weights, seed). Source i has the next items[i] items, and is shuffled
  // with the seed `seed + 1 + i`, epoch by epoch.
  struct Mixed {
    std::vector<uint64_t> items;
    std::vector<double> weights;
    uint64_t seed = 0;
  };

  std::string name = {};  // of who follows it: a plan takes the place of the one of its name
  std::vector<std::string> keys = {};
  std::vector<PlanRun> runs = {};
  std::variant<Listed, Shuffled, Mixed> order = Listed{};
  uint64_t position = 0;  // that is read next, counted through all epochs
  // Reads come in this order, all of them through this store: what comes next is fetched ahead of
  // them. Without it the order says only what is worth keeping.
  bool ahead = false;
};

}  // namespace stoker
