// Stories of coded stores: stoker_coded_checker_test --seed=N tells one of them again, step by
// step.
#include <gtest/gtest.h>

#include <cstdio>
#include <random>

#include "coded_sim.h"
#include "lab.h"

namespace stoker {
namespace {

TEST(CodedSim, NoStoryLosesOrMixesAnything) {
  const uint64_t alone = story_seed;
  // The same ones each time in CI; a soak has its own.
  const uint64_t first = alone != 0 ? alone : soak_factor > 1 ? std::random_device{}() + 1ULL : 1;
  const uint64_t last = alone != 0 ? alone : first + 200 / kLess * soak_factor - 1;
  SimCounts counts;
  for (uint64_t seed = first; seed <= last; ++seed) {
    if (soak_factor > 1 && (seed - first) % 100 == 0) {
      std::printf("coded simulation, seed %llu of %llu to %llu\n",
                  static_cast<unsigned long long>(seed), static_cast<unsigned long long>(first),
                  static_cast<unsigned long long>(last));
      std::fflush(stdout);
    }
    story_seed = seed;  // to be told if a check in the store ends the process
    const SimStory story = simulate_coded(seed, alone != 0);
    counts.add(story.counts);
    EXPECT_EQ(story.wrong, "") << "tell it again with --seed=" << seed;
  }
  story_seed = alone;
  std::printf("coded simulation, seeds %llu to %llu: %s\n", static_cast<unsigned long long>(first),
              static_cast<unsigned long long>(last), counts.text().c_str());
  if (alone != 0) return;
  for (const uint64_t count :
       {counts.batches, counts.crashes, counts.crashes_in_recovery, counts.lost, counts.returned,
        counts.old_copies, counts.failed, counts.flipped, counts.slowed})
    EXPECT_GT(count, 10 / kLess);
}

}  // namespace
}  // namespace stoker
