#include "stoker/data/pipeline_threads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <memory>

namespace stoker::data {
namespace {

// Tasks that stay until they are let go, and tell how many of them run at once.
class Crowd {
 public:
  std::function<void()> task() {
    return [this] {
      MutexLock lock(mutex_);
      ++running_;
      most_ = std::max(most_, running_);
      changed_.notify_all();
      changed_.wait(lock, [this]() REQUIRES(mutex_) { return open_ > 0; });
      --open_;
      --running_;
      ++done_;
      changed_.notify_all();
    };
  }
  void wait_running(size_t count) {
    MutexLock lock(mutex_);
    changed_.wait(lock, [this, count]() REQUIRES(mutex_) { return running_ == count; });
  }
  void wait_done(size_t count) {
    MutexLock lock(mutex_);
    changed_.wait(lock, [this, count]() REQUIRES(mutex_) { return done_ == count; });
  }
  void let_go(size_t count) {
    MutexLock lock(mutex_);
    open_ += count;
    changed_.notify_all();
  }
  size_t most() {
    MutexLock lock(mutex_);
    return most_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  size_t running_ GUARDED_BY(mutex_) = 0, most_ GUARDED_BY(mutex_) = 0;
  size_t open_ GUARDED_BY(mutex_) = 0, done_ GUARDED_BY(mutex_) = 0;
};

TEST(PipelineThreads, AsManyTasksRunAtOnceAsAreAllowed) {
  Crowd crowd;
  PipelineThreads threads(1, 3);
  for (int i = 0; i < 9; ++i) threads.run(crowd.task());
  crowd.wait_running(1);
  threads.use(3);
  crowd.wait_running(3);
  threads.use(1);  // those that run go on
  crowd.let_go(2);
  crowd.wait_done(2);
  crowd.wait_running(1);
  crowd.let_go(7);
  crowd.wait_done(9);
  EXPECT_EQ(crowd.most(), 3U);
}

TEST(PipelineThreads, TheNumberStaysBetweenOneAndTheMost) {
  PipelineThreads threads(2, 3);
  EXPECT_EQ(threads.threads(), 2U);
  threads.use(7);
  EXPECT_EQ(threads.threads(), 3U);
  threads.use(0);
  EXPECT_EQ(threads.threads(), 1U);
  EXPECT_EQ(threads.most(), 3U);
}

TEST(PipelineThreads, TellsHowLongTheyWorked) {
  Crowd crowd;
  PipelineThreads threads(1, 1);
  EXPECT_EQ(threads.busy_ns(), 0U);
  threads.run(crowd.task());
  crowd.wait_running(1);
  const uint64_t begun = threads.busy_ns();
  while (threads.busy_ns() == begun) {  // a task that runs counts
  }
  crowd.let_go(1);
  crowd.wait_done(1);
  std::promise<void> next;
  threads.run([&next] { next.set_value(); });  // the task before is booked when this one begins
  next.get_future().wait();
  EXPECT_GT(threads.busy_ns(), begun);
}

TEST(PipelineTasks, TheirEndWaitsForThemOnly) {
  Crowd others;
  const auto threads = std::make_shared<PipelineThreads>(2, 2);
  threads->run(others.task());
  others.wait_running(1);
  std::atomic<int> ran = 0;
  {
    PipelineTasks tasks(threads);
    for (int i = 0; i < 50; ++i) tasks.run([&ran] { ++ran; });
  }
  EXPECT_EQ(ran, 50);
  others.let_go(1);
}

TEST(PipelineTasks, WhatATaskHoldsIsGoneBeforeTheEnd) {
  const auto threads = std::make_shared<PipelineThreads>(1, 1);
  const auto held = std::make_shared<int>(1);
  {
    PipelineTasks tasks(threads);
    tasks.run([held] {});
  }
  EXPECT_EQ(held.use_count(), 1);
}

}  // namespace
}  // namespace stoker::data
