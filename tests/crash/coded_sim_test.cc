// Stories of coded stores: stoker_coded_sim_test --seed=N tells one of them again, step by step.
#include <gtest/gtest.h>

#include <cstdio>

#include "coded_sim.h"
#include "lab.h"

namespace stoker {
namespace {

TEST(CodedSim, NoStoryLosesOrMixesAnything) {
  const uint64_t first = story_seed != 0 ? story_seed : 1;
  const uint64_t last = story_seed != 0 ? story_seed : 200 / kLess * soak_factor;
  SimCounts counts;
  for (uint64_t seed = first; seed <= last; ++seed) {
    const SimStory story = simulate_coded(seed, story_seed != 0);
    counts.add(story.counts);
    EXPECT_EQ(story.wrong, "") << "tell it again with --seed=" << seed;
  }
  std::printf("coded simulation, seeds %llu to %llu: %s\n", static_cast<unsigned long long>(first), static_cast<unsigned long long>(last), counts.text().c_str());
  if (story_seed != 0) return;
  for (const uint64_t count : {counts.batches, counts.crashes, counts.crashes_in_recovery, counts.lost, counts.returned, counts.old_copies, counts.failed, counts.flipped, counts.slowed}) EXPECT_GT(count, 10 / kLess);
}

}  // namespace
}  // namespace stoker
