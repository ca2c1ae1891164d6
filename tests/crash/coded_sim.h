// Seeded simulation of a coded store: random operations and faults against a reference model. One
// seed is one story, the same each time: nothing in it depends on the machine but the moment at
// which threads run, and no two of them ever have work at once.
#pragma once

#include <cstdint>
#include <string>

namespace stoker {

// What happened, to see that everything did.
struct SimCounts {
  uint64_t commits = 0, batches = 0, folds = 0, repairs = 0;
  uint64_t opens = 0, crashes = 0, crashes_in_recovery = 0;
  uint64_t lost = 0, returned = 0, old_copies = 0, failed = 0, flipped = 0, slowed = 0;
  uint64_t final_losses = 0;

  void add(const SimCounts& other);
  std::string text() const;
};

struct SimStory {
  std::string wrong;  // empty: nothing
  SimCounts counts;
};

// `tell`: prints each step.
SimStory simulate_coded(uint64_t seed, bool tell = false);

}  // namespace stoker
