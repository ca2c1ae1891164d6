#include "stoker/store/s3/pace.h"

#include <gtest/gtest.h>

namespace stoker::s3 {
namespace {

constexpr uint64_t kSecond_ns = 1'000'000'000;

size_t window_of(const Pace& pace) {
  size_t count = 0;
  while (pace.admits(count)) ++count;
  return count;
}

// Answers, a second apart, of so many requests, each with its first byte after `wait_ns`.
void answer(Pace& pace, size_t count, uint64_t wait_ns, uint64_t& now_ns) {
  for (size_t i = 0; i < count; ++i) {
    now_ns += kSecond_ns;
    pace.waited(wait_ns);
    pace.well(now_ns);
  }
}

TEST(Pace, MoreAreInFlightAsLongAsAllGoesWell) {
  Pace pace;
  uint64_t now = kSecond_ns;
  const size_t first = window_of(pace);
  EXPECT_EQ(first, 16U);
  answer(pace, 18, kSecond_ns / 20, now);
  EXPECT_EQ(window_of(pace), first + 2) << "one more each time that all of them were answered";
  answer(pace, 10'000, kSecond_ns / 20, now);
  EXPECT_EQ(window_of(pace), 64U);
}

TEST(Pace, HalfAreInFlightAfterTheServerSaysSoOncePerStorm) {
  Pace pace;
  uint64_t now = kSecond_ns;
  for (int i = 0; i < 10; ++i) pace.refused(now += 1000);
  EXPECT_EQ(window_of(pace), 8U);
  for (int i = 0; i < 10; ++i) pace.refused(now += kSecond_ns);
  EXPECT_EQ(window_of(pace), 2U);
  EXPECT_TRUE(pace.admits(0));
}

TEST(Pace, NoMoreAreAddedWhereTheyWaitLongerThanBefore) {
  Pace pace;
  uint64_t now = kSecond_ns;
  answer(pace, 10, kSecond_ns / 1000, now);
  const size_t before = window_of(pace);
  for (int i = 0; i < 20; ++i) {
    pace.waited(kSecond_ns / 5);
    pace.well(now += 1000);
  }
  EXPECT_LE(window_of(pace), before) << "a cut, once in the time of an answer";
  EXPECT_GE(window_of(pace), before / 2);
  answer(pace, 20, kSecond_ns / 5, now);
  EXPECT_EQ(window_of(pace), 8U) << "few enough, though none failed, and enough for a quick server";
}

TEST(Pace, ASecondRequestIsForWhatIsSlowerThanUsualAndForOneInFifty) {
  Pace pace;
  for (int i = 0; i < 19; ++i) pace.waited(100);
  EXPECT_FALSE(pace.usual_ns()) << "too few are known";
  pace.waited(5000);
  EXPECT_EQ(pace.usual_ns(), 5000U);
  for (int i = 0; i < 20; ++i) pace.waited(100);
  EXPECT_EQ(pace.usual_ns(), 100U) << "one in forty is above it";
  for (int i = 0; i < 256; ++i) pace.waited(300);
  EXPECT_EQ(pace.usual_ns(), 300U) << "the last ones count";
  EXPECT_FALSE(pace.take_hedge());
  for (int i = 0; i < 50; ++i) pace.usual_ns();
  EXPECT_TRUE(pace.take_hedge());
  EXPECT_FALSE(pace.take_hedge());
  for (int i = 0; i < 10'000; ++i) pace.usual_ns();
  int hedges = 0;
  while (pace.take_hedge()) ++hedges;
  EXPECT_EQ(hedges, 8) << "what is saved up is bounded";
}

}  // namespace
}  // namespace stoker::s3
