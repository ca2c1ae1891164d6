#include "stoker/io/scheduler.h"

#include <gtest/gtest.h>

#include <deque>
#include <vector>

namespace stoker {
namespace {

constexpr std::array<uint8_t, kPriorities> kFloors = {0, 5, 10, 5, 2};

Op op(Priority priority, uint64_t deadline_ns = 0) {
  Op made;
  made.priority = priority;
  made.deadline_ns = deadline_ns;
  return made;
}

TEST(Scheduler, IsEmptyAtFirst) {
  Scheduler scheduler(kFloors);
  EXPECT_EQ(scheduler.pop(), nullptr);
  EXPECT_EQ(scheduler.size(), 0U);
}

TEST(Scheduler, KeepsTheOrderOfArrivalWithinAClass) {
  Scheduler scheduler(kFloors);
  std::vector<Op> ops(10, op(Priority::prefetch));
  for (Op& each : ops) scheduler.push(each);
  for (Op& each : ops) EXPECT_EQ(scheduler.pop(), &each);
}

TEST(Scheduler, EarlierDeadlinesGoFirstAndNoneIsLast) {
  Scheduler scheduler(kFloors);
  std::vector<Op> ops = {op(Priority::prefetch), op(Priority::prefetch, 30),
                         op(Priority::prefetch, 10), op(Priority::prefetch, 30),
                         op(Priority::prefetch, 20)};
  for (Op& each : ops) scheduler.push(each);
  for (const size_t expected : {2, 4, 1, 3, 0}) EXPECT_EQ(scheduler.pop(), &ops[expected]);
}

TEST(Scheduler, MoreUrgentClassesGoFirst) {
  Scheduler scheduler({});  // no floors
  std::vector<Op> ops = {op(Priority::scrub), op(Priority::write_back, 1), op(Priority::demand),
                         op(Priority::checkpoint), op(Priority::prefetch)};
  for (Op& each : ops) scheduler.push(each);
  for (const size_t expected : {2, 4, 1, 3, 0}) EXPECT_EQ(scheduler.pop(), &ops[expected]);
}

// Which share of 1,000 dispatches each class gets while all of them always wait.
std::array<int, kPriorities> shares(const std::array<uint8_t, kPriorities>& floors) {
  Scheduler scheduler(floors);
  std::deque<Op> ops;
  for (size_t c = 0; c < kPriorities; ++c) {
    for (int i = 0; i < 1000; ++i) scheduler.push(ops.emplace_back(op(static_cast<Priority>(c))));
  }
  std::array<int, kPriorities> got{};
  for (int i = 0; i < 1000; ++i) ++got[static_cast<size_t>(scheduler.pop()->priority)];
  EXPECT_EQ(scheduler.size(), 4000U);
  return got;
}

TEST(Scheduler, NoClassFallsBelowItsFloor) {
  const auto got = shares(kFloors);
  // the last one may still be owed
  for (size_t c = 1; c < kPriorities; ++c) EXPECT_NEAR(got[c], 10 * kFloors[c], 1);
  EXPECT_NEAR(got[0], 780, 4);
}

TEST(Scheduler, FloorsThatTakeAllAreSharesOfAll) {
  const auto got = shares({20, 20, 20, 20, 20});
  for (const int each : got) EXPECT_NEAR(each, 200, kPriorities - 1);
}

TEST(Scheduler, AClassThatDidNotWaitIsOwedNothing) {
  Scheduler scheduler({0, 50, 0, 0, 0});
  std::deque<Op> ops;
  for (int i = 0; i < 100; ++i) scheduler.push(ops.emplace_back(op(Priority::demand)));
  for (int i = 0; i < 50; ++i) EXPECT_EQ(scheduler.pop()->priority, Priority::demand);
  Op late = op(Priority::prefetch);
  scheduler.push(late);
  EXPECT_EQ(scheduler.pop()->priority, Priority::demand);  // half a dispatch owed so far
  EXPECT_EQ(scheduler.pop(), &late);
}

}  // namespace
}  // namespace stoker
