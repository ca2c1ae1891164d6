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

TEST(Sequence, WindowsGiveEachSampleOnceAnEpochAndAnyRangeTheSame) {
  const Sequence order = Sequence::windowed({1000, 16, 100, 4, 8}, 7);
  EXPECT_EQ(order.count(), 1000);
  const auto whole = order.picks(0, 2000);
  for (size_t epoch = 0; epoch < 2; ++epoch) {
    std::vector<bool> seen(1000);
    for (size_t i = 0; i < 1000; ++i) seen[whole[epoch * 1000 + i].sample] = true;
    EXPECT_EQ(std::count(seen.begin(), seen.end(), true), 1000);
  }
  const auto part = order.picks(990, 1010);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + 990));
  EXPECT_FALSE(std::equal(whole.begin(), whole.begin() + 1000, whole.begin() + 1000));
}

TEST(Sequence, NeighboursHoldTheirPicksAndTheNextWindowIsTold) {
  const Sequence order = Sequence::windowed({1000, 16, 100, 1, 1}, 7);
  const Reads begin = order.reads(0, 8), end = order.reads(92, 100);
  for (const Reads& reads : {begin, end, Sequence::in_order(1000).reads(990, 1010)}) {
    ASSERT_EQ(reads.of_picks.size(), reads.picks.size());
    for (size_t i = 0; i < reads.picks.size(); ++i) {
      EXPECT_GE(reads.picks[i].sample, reads.of_picks[i].sample);
      EXPECT_LT(reads.picks[i].sample, reads.of_picks[i].sample + reads.of_picks[i].count);
    }
  }
  EXPECT_EQ(begin.soon.size(), 0);
  EXPECT_GE(end.soon.size(), 6);  // nearly all of the 7 or 8
  EXPECT_EQ(end.soon.front().turn, end.of_picks.front().turn + 1);
  EXPECT_TRUE(order.reads(992, 1000).soon.empty());  // the epoch ends
  EXPECT_TRUE(Sequence::shuffled(1000, 7).reads(0, 8).of_picks.empty());
}

}  // namespace
}  // namespace stoker::data
