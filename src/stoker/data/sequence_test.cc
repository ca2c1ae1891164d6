#include "stoker/data/sequence.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

namespace stoker::data {
namespace {

TEST(Sequence, InOrderGoesRoundAndRound) {
  const auto all = Sequence::in_order(3).picks(2, 7);
  EXPECT_EQ(all, (std::vector<Pick>{{0, 2}, {0, 0}, {0, 1}, {0, 2}, {0, 0}}));
  EXPECT_EQ(Sequence::in_order(3).count(), 3);
}

TEST(Sequence, ShuffledGivesEachSampleOnceAnEpochAndAnyRangeTheSame) {
  const Sequence order = Sequence::shuffled(1000, 7);
  const auto whole = order.picks(0, 3000);
  for (size_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<uint64_t> seen;
    for (size_t i = 0; i < 1000; ++i) seen.push_back(whole[epoch * 1000 + i].sample);
    std::sort(seen.begin(), seen.end());
    for (size_t i = 0; i < 1000; ++i) EXPECT_EQ(seen[i], i);
  }
  EXPECT_FALSE(std::equal(whole.begin(), whole.begin() + 1000, whole.begin() + 1000));
  const auto part = order.picks(990, 1010);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + 990));
}

TEST(Sequence, MixedHasExactSharesAndNoEpochs) {
  const Sequence order = Sequence::mixed({100, 1000}, {1, 3}, 2).value();
  EXPECT_FALSE(order.count());
  std::array<size_t, 2> drawn{};
  for (const Pick& pick : order.picks(0, Mixture::kCycle)) {
    ++drawn[pick.source];
    EXPECT_LT(pick.sample, pick.source == 0 ? 100 : 1000);
  }
  EXPECT_EQ(drawn[0], Mixture::kCycle / 4);
  const auto whole = order.picks(0, 500), part = order.picks(123, 321);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + 123));
  EXPECT_EQ(Sequence::mixed({1, 2}, {1}, 0).error().code, Code::invalid_argument);
}

}  // namespace
}  // namespace stoker::data
