#include "stoker/base/order.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

namespace stoker {
namespace {

std::vector<uint64_t> first(const Permutation& order, uint64_t positions) {
  std::vector<uint64_t> samples;
  for (uint64_t i = 0; i < positions; ++i) samples.push_back(order.sample(i));
  return samples;
}

// A saved data position means the same order for ever.
TEST(Order, TheBitsOfAPermutationNeverChange) {
  EXPECT_EQ(first({1, 0, 0}, 1), (std::vector<uint64_t>{0}));
  EXPECT_EQ(first({10, 1, 0}, 10), (std::vector<uint64_t>{2, 0, 8, 1, 7, 4, 9, 5, 6, 3}));
  EXPECT_EQ(first({1000, 7, 3}, 5), (std::vector<uint64_t>{442, 461, 849, 683, 92}));
  const Permutation large((uint64_t{1} << 40) + 3, ~uint64_t{0}, uint64_t{1} << 33);
  EXPECT_EQ(first(large, 3), (std::vector<uint64_t>{894269028508, 1022093885864, 655928562910}));
}

TEST(Order, APermutationIsOneToOneAndHasAnInverse) {
  for (const uint64_t count : {1, 2, 3, 4, 5, 16, 17, 255, 1000, 4097}) {
    for (const uint64_t epoch : {0, 1, 2}) {
      const Permutation order(count, 42, epoch);
      std::set<uint64_t> seen;
      for (uint64_t i = 0; i < count; ++i) {
        const uint64_t sample = order.sample(i);
        ASSERT_LT(sample, count);
        ASSERT_EQ(order.position(sample), i);
        seen.insert(sample);
      }
      ASSERT_EQ(seen.size(), count);
    }
  }
}

TEST(Order, LargeCountsHaveAnInverse) {
  for (const uint64_t count : {uint64_t{1} << 32, (uint64_t{1} << 62) + 1, uint64_t{1} << 63}) {
    const Permutation order(count, 5, 6);
    for (const uint64_t i : {uint64_t{0}, count / 3, count - 1}) {
      ASSERT_LT(order.sample(i), count);
      ASSERT_EQ(order.position(order.sample(i)), i);
    }
  }
}

TEST(Order, SeedsAndEpochsAreUnrelated) {
  EXPECT_NE(first({1000, 1, 2}, 10), first({1000, 2, 1}, 10));
  EXPECT_NE(first({1000, 1, 2}, 10), first({1000, 1, 3}, 10));
}

// 20,000 orders of 5 samples: each sample stands at each position 4,000 times, give or take 5
// sigma.
TEST(Order, EverySampleStandsAtEveryPositionAlikeOften) {
  std::array<std::array<int, 5>, 5> seen{};
  for (uint64_t epoch = 0; epoch < 20'000; ++epoch) {
    const Permutation order(5, 9, epoch);
    for (uint64_t i = 0; i < 5; ++i) ++seen[i][order.sample(i)];
  }
  for (const auto& position : seen) {
    for (const int times : position) EXPECT_NEAR(times, 4'000, 283);
  }
}

constexpr auto kShapes = std::to_array<WindowShape>({{1, 1, 1, 1, 1},
                                                     {10, 3, 4, 1, 1},
                                                     {100, 7, 20, 2, 6},
                                                     {1000, 16, 128, 4, 8},
                                                     {1000, 16, 128, 4, 1000},
                                                     {999, 2000, 5000, 8, 24},
                                                     {5, 2, 2, 1, 8},
                                                     {4097, 64, 500, 16, 32}});

std::vector<uint64_t> all_of(const WindowOrder& order) {
  std::vector<uint64_t> samples;
  for (uint64_t i = 0; i < order.count(); ++i) samples.push_back(order.sample(i));
  return samples;
}

TEST(Order, TheBitsOfAWindowOrderNeverChange) {
  EXPECT_EQ(all_of({{10, 3, 4, 1, 1}, 1, 0}),
            (std::vector<uint64_t>{5, 4, 3, 6, 7, 1, 8, 0, 2, 9}));
  EXPECT_EQ(all_of({{11, 2, 4, 2, 4}, 7, 3}),
            (std::vector<uint64_t>{4, 8, 10, 3, 9, 5, 6, 2, 7, 1, 0}));
}

TEST(Order, AWindowOrderIsOneToOneAndHasAnInverse) {
  for (const WindowShape& shape : kShapes) {
    for (const uint64_t epoch : {0, 1, 2}) {
      const WindowOrder order(shape, 42, epoch);
      std::set<uint64_t> seen;
      for (uint64_t i = 0; i < shape.count; ++i) {
        const uint64_t sample = order.sample(i);
        ASSERT_LT(sample, shape.count);
        ASSERT_EQ(order.position(sample), i) << shape.count;
        seen.insert(sample);
      }
      ASSERT_EQ(seen.size(), shape.count);
    }
  }
  const WindowOrder large({uint64_t{1} << 62, 1 << 20, 1 << 30, 64, 1 << 10}, 5, 6);
  for (const uint64_t i : {uint64_t{0}, large.count() / 3, large.count() - 1})
    ASSERT_EQ(large.position(large.sample(i)), i);
}

// Each sample is in one stretch, which its position names; a window has all of its stretches.
TEST(Order, StretchesCoverAnEpochOnceWindowByWindow) {
  for (const WindowShape& shape : kShapes) {
    const WindowOrder order(shape, 3, 1);
    std::map<std::pair<uint64_t, uint64_t>, std::set<uint64_t>> of_window;  // first samples
    for (uint64_t i = 0; i < shape.count; ++i) {
      const Stretch in = order.stretch(i);
      const uint64_t sample = order.sample(i);
      ASSERT_GE(sample, in.sample);
      ASSERT_LT(sample, in.sample + in.count);
      ASSERT_LE(in.count, shape.run);
      ASSERT_LT(order.passed(i), WindowOrder::kWhole);
      of_window[{in.lane, in.window}].insert(in.sample);
    }
    uint64_t samples = 0;
    for (const auto& [where, firsts] : of_window) {
      std::set<uint64_t> listed;
      for (const Stretch& each : order.stretches(where.first, where.second)) {
        listed.insert(each.sample);
        samples += each.count;
      }
      ASSERT_EQ(listed, firsts);
    }
    ASSERT_EQ(samples, shape.count);
  }
  EXPECT_TRUE(WindowOrder({100, 7, 20, 2, 6}, 0, 0).stretches(0, 3).empty());
  EXPECT_TRUE(WindowOrder({100, 7, 20, 2, 6}, 0, 0).stretches(9, 0).empty());
}

// Who takes a quarter of each batch reads a quarter of the bytes, not all of them.
TEST(Order, PlacesOfABatchHaveLanesOfTheirOwn) {
  const WindowShape shape{4096, 16, 256, 4, 8};
  const WindowOrder order(shape, 9, 0);
  std::set<uint64_t> mine, others;
  for (uint64_t i = 0; i < shape.count; ++i)
    (i % 8 < 2 ? mine : others).insert(order.stretch(i).lane);
  EXPECT_EQ(mine, std::set<uint64_t>{0});
  EXPECT_EQ(others, (std::set<uint64_t>{1, 2, 3}));
}

// 20,000 orders of 12 samples: each sample stands at each position 1,667 times, give or take 5
// sigma.
TEST(Order, EverySampleOfAWindowOrderStandsAtEveryPositionAlikeOften) {
  constexpr uint64_t kOrders = 20'000, kCount = 12;
  std::array<std::array<uint64_t, kCount>, kCount> times{};
  for (uint64_t epoch = 0; epoch < kOrders; ++epoch) {
    const auto samples = all_of({{kCount, 2, 4, 2, 4}, 1, epoch});
    for (uint64_t i = 0; i < kCount; ++i) ++times.at(i).at(samples.at(i));
  }
  for (const auto& each : times) {
    for (const uint64_t many : each) EXPECT_NEAR(static_cast<double>(many), 1666.7, 5 * 39.1);
  }
}

TEST(Order, AMixtureHasExactSharesInEveryCycle) {
  const std::vector<double> weights{0.7, 0.2, 0.1};
  const Mixture mixture = Mixture::make(weights, 3).value();
  EXPECT_EQ(std::vector<uint32_t>(mixture.counts().begin(), mixture.counts().end()),
            (std::vector<uint32_t>{45'875, 13'107, 6'554}));
  for (const uint64_t cycle : {uint64_t{0}, uint64_t{1}, uint64_t{1000}}) {
    std::map<uint32_t, std::set<uint64_t>> drawn;
    for (uint64_t i = 0; i < Mixture::kCycle; ++i) {
      const uint64_t position = cycle * Mixture::kCycle + i;
      const Draw draw = mixture.draw(position);
      ASSERT_EQ(mixture.position(draw), position);
      drawn[draw.source].insert(draw.number);
    }
    for (uint32_t source = 0; source < weights.size(); ++source) {
      // no draw twice, none left out
      ASSERT_EQ(drawn[source].size(), mixture.counts()[source]);
      ASSERT_EQ(*drawn[source].begin(), cycle * mixture.counts()[source]);
      ASSERT_EQ(*drawn[source].rbegin(), (cycle + 1) * mixture.counts()[source] - 1);
    }
  }
}

TEST(Order, SharesAddUpAndNoneIsZero) {
  const std::vector<std::vector<double>> cases{
      {1},
      {1, 1, 1},
      {1e-300, 1e300},
      {1e-9, 1, 1e-9},
      std::vector<double>(65'536, 2.5),
      std::vector<double>(65'535, 1),
      {std::numeric_limits<double>::max(), std::numeric_limits<double>::max()},
      {std::numeric_limits<double>::denorm_min()}};
  for (const auto& weights : cases) {
    const Mixture mixture = Mixture::make(weights, 0).value();
    uint64_t sum = 0;
    for (const uint32_t count : mixture.counts()) {
      ASSERT_GE(count, 1);
      sum += count;
    }
    ASSERT_EQ(sum, Mixture::kCycle);
  }
}

TEST(Order, WrongWeightsAreNamed) {
  for (const double wrong : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
    const std::vector<double> weights{1, wrong};
    const auto made = Mixture::make(weights, 0);
    ASSERT_FALSE(made.has_value());
    EXPECT_EQ(made.error().code, Code::invalid_argument);
    EXPECT_NE(made.error().what.find("source 1"), std::string::npos) << made.error().what;
  }
  EXPECT_FALSE(Mixture::make({}, 0).has_value());
  EXPECT_FALSE(Mixture::make(std::vector<double>(65'537, 1), 0).has_value());
}

}  // namespace
}  // namespace stoker
