// A disk that stops answering: its callers get an error, what the kernel may still touch stays
// untouched, the others go on.
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>

#include "stoker/base/bytes.h"
#include "stoker/base/mutex.h"
#include "stoker/io/bounce.h"
#include "stoker/io/loop.h"
#include "stoker/memory/lost.h"
#include "stoker/testing/held_engine.h"

namespace stoker {
namespace {

class StallTest : public ::testing::Test {
 protected:
  struct Job {
    Op op;
    StallTest* test = nullptr;
    bool done = false;
  };

  StallTest() {
    arena_ = std::move(*Arena::make(4 * kMiB, budget_));
    start({.depth = 8, .stall_warn_ns = 20'000'000, .stall_error_ns = 60'000'000});
  }
  ~StallTest() override {
    EXPECT_TRUE(loop_->unadopt(*arena_));
    loop_.reset();
  }
  void start(const LoopOptions& options, const Clock& clock = Clock::real()) {
    loop_ = std::move(*Loop::make(std::make_unique<HeldEngine>(32, disks_), options, clock));
    EXPECT_TRUE(loop_->adopt(*arena_));
    dead_ = loop_->open({.path = "/dead"})->id;
    live_ = loop_->open({.path = "/live"})->id;
    disks_->stick(dead_);
  }

  Job& submit(Op::Kind kind, FileId file, Slice bytes) {
    Job& job = jobs_.emplace_back();
    job.test = this;
    job.op.kind = kind;
    job.op.file = file;
    job.op.bytes = bytes;
    job.op.context = &job;
    job.op.done = [](Op& op) noexcept {
      Job& self = *static_cast<Job*>(op.context);
      MutexLock lock(self.test->mutex_);
      self.done = true;
      self.test->changed_.notify_all();
    };
    EXPECT_TRUE(loop_->submit(job.op));
    return job;
  }
  bool done(const Job& job, std::chrono::milliseconds within = std::chrono::seconds(30)) {
    MutexLock lock(mutex_);
    return changed_.wait_for(lock, within, [&] { return job.done; });
  }
  void expect_given_up(const Job& job) {
    ASSERT_TRUE(done(job));
    ASSERT_FALSE(job.op.result);
    EXPECT_EQ(job.op.result.error().code, Code::io);
    EXPECT_EQ(job.op.result.error().sys_errno, ETIMEDOUT);
    EXPECT_NE(job.op.result.error().what.find("'/dead'"), std::string::npos)
        << job.op.result.error().what;
  }

  Budget budget_{64 * kMiB};
  std::shared_ptr<HeldEngine::Disks> disks_ = std::make_shared<HeldEngine::Disks>();
  std::unique_ptr<Arena> arena_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Job> jobs_;
  FileId dead_ = -1, live_ = -1;
  VirtualClock clock_;
  std::unique_ptr<Loop> loop_;
};

TEST_F(StallTest, IsGivenUpWithAnErrorThatNamesItAndTheOthersGoOn) {
  Buffer buffer = *arena_->take(256 * kKiB);
  std::vector<Job*> jobs;
  for (size_t i = 0; i < 20; ++i)
    jobs.push_back(&submit(i % 2 == 0 ? Op::Kind::read : Op::Kind::write, dead_,
                           buffer.slice().sub(i * kIoAlign, kIoAlign)));
  jobs.push_back(&submit(Op::Kind::sync, dead_, {}));
  for (const Job* job : jobs) expect_given_up(*job);
  // at once: nothing more is asked of it
  expect_given_up(submit(Op::Kind::read, dead_, buffer.slice()));
  // the depth; what waited was never handed over
  EXPECT_EQ(disks_->held.size(), 8U);
  // Its transfers take no place from the others'.
  for (size_t i = 0; i < 30; ++i) {
    const Job& job = submit(Op::Kind::write, live_, buffer.slice());
    ASSERT_TRUE(done(job));
    EXPECT_TRUE(job.op.result);
  }
}

TEST_F(StallTest, KeepsBackTheMemoryAndTheFileThatTheKernelMayStillTouch) {
  std::byte* at = nullptr;
  {
    Buffer buffer = *arena_->take(1 * kMiB);
    at = buffer.data();
    expect_given_up(submit(Op::Kind::read, dead_, buffer.slice().sub(64 * kKiB, kIoAlign)));
  }
  EXPECT_EQ(arena_->largest_free(), 3 * kMiB);  // the whole Buffer: nobody gets it again
  Buffer rest = *arena_->take(3 * kMiB);
  EXPECT_EQ(rest.data(), at + 1 * kMiB);
  const Status closed = loop_->close(dead_);
  ASSERT_FALSE(closed);
  EXPECT_EQ(closed.error().code, Code::busy);
  EXPECT_EQ(disks_->closed, 0U);

  disks_->let_go();
  const Job& other = submit(Op::Kind::read, live_, rest.slice());
  ASSERT_TRUE(done(other));
  while (!loop_->close(dead_)) std::this_thread::yield();  // once the late ones have landed
  EXPECT_EQ(disks_->closed, 1U);
  EXPECT_TRUE(loop_->close(live_));
}

TEST_F(StallTest, ABouncedReadLeavesItsLaneToTheDiskAndTheOthersGetAnother) {
  std::vector<std::byte> mine(2 * Bounce::kLaneBytes + 1);
  disks_->bytes[dead_].assign(4 * kMiB, std::byte{7});
  disks_->bytes[live_].assign(4 * kMiB, std::byte{9});
  for (size_t i = 0; i < 2 * Bounce::kLanes; ++i)
    expect_given_up(submit(Op::Kind::read, dead_, {mine.data() + 1, Bounce::kLaneBytes}));
  EXPECT_EQ(mine, std::vector<std::byte>(mine.size()));
  disks_->let_go();  // the late ones write to lanes that nobody uses any longer
  for (size_t i = 0; i < 10; ++i) {
    const Job& job = submit(Op::Kind::read, live_, {mine.data() + 1, 2 * Bounce::kLaneBytes});
    ASSERT_TRUE(done(job));
    EXPECT_EQ(std::count(mine.begin() + 1, mine.end(), std::byte{9}),
              static_cast<std::ptrdiff_t>(2 * Bounce::kLaneBytes));
  }
}

TEST_F(StallTest, WhatIsOnMemoryThatCannotBeKeptBackIsWaitedForAndNothingElseIs) {
  alignas(kIoAlign) std::byte page[kIoAlign];
  const Buffer buffer = *arena_->take(kIoAlign);
  for (const Op::Kind kind : {Op::Kind::read, Op::Kind::write}) {
    Job& late = submit(kind, dead_, {page, kIoAlign});
    expect_given_up(submit(Op::Kind::read, dead_, buffer.slice()));
    // the file is: nothing more goes there
    expect_given_up(submit(Op::Kind::read, dead_, {page, kIoAlign}));
    EXPECT_FALSE(done(late, std::chrono::milliseconds(0)));
    disks_->let_go();
    ASSERT_TRUE(done(late));
    EXPECT_TRUE(late.op.result);
    while (!loop_->close(dead_)) std::this_thread::yield();  // once the other has landed
    dead_ = loop_->open({.path = "/dead"})->id;
    disks_->stick(dead_);
  }
}

TEST_F(StallTest, HeapMemoryWhoseOwnerKeepsItBackIsGivenUp) {
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kIoAlign, kIoAlign));
  EXPECT_FALSE(is_lost(memory, kIoAlign));
  expect_given_up(submit(Op::Kind::read, dead_, {memory, kIoAlign, kLosableHeap}));
  EXPECT_TRUE(is_lost(memory + 1, 1));
  EXPECT_FALSE(is_lost(memory + kIoAlign, 1));
  disks_->let_go();  // writes to it: nobody else may have it
}

TEST_F(StallTest, ADiskThatIsSlowButAnswersIsNotGivenUp) {
  loop_.reset();
  start({.depth = 8, .stall_warn_ns = 20'000'000, .stall_error_ns = 60'000'000}, clock_);
  Buffer buffer = *arena_->take(64 * kKiB);
  Job& oldest = submit(Op::Kind::read, dead_, buffer.slice().sub(0, kIoAlign));
  for (size_t i = 0; i < 12; ++i) {  // another one comes back every 15 ms; the limit is 60
    const Job& job = submit(Op::Kind::read, dead_, buffer.slice().sub(kIoAlign, kIoAlign));
    disks_->wait_for_seen(i + 2);
    clock_.advance_to(clock_.now_ns() + 15'000'000);
    disks_->let_one_go(job.op);
    ASSERT_TRUE(done(job));
    EXPECT_TRUE(job.op.result);
  }
  EXPECT_FALSE(done(oldest, std::chrono::milliseconds(0)));
  disks_->let_go();
  ASSERT_TRUE(done(oldest));
  EXPECT_TRUE(oldest.op.result);
}

TEST_F(StallTest, ManyUnalignedOpsOfADeadDiskAreRefusedTogether) {
  std::vector<std::byte> mine(kIoAlign + 1);
  std::vector<Job*> jobs;
  for (size_t i = 0; i < 3 * Bounce::kLanes; ++i)
    jobs.push_back(&submit(Op::Kind::read, dead_, {mine.data() + 1, kIoAlign}));
  for (const Job* job : jobs) expect_given_up(*job);
  EXPECT_EQ(disks_->held.size(), Bounce::kLanes);  // the others were never handed over
}

TEST_F(StallTest, WhenOrphansFillTheEngineNothingHangs) {
  Buffer buffer = *arena_->take(64 * kKiB);
  for (int file = 0; file < 4; ++file) {  // 8 each, of an engine that takes 32
    std::vector<Job*> jobs;
    for (size_t i = 0; i < 8; ++i)
      jobs.push_back(&submit(Op::Kind::read, dead_, buffer.slice().sub(0, kIoAlign)));
    for (const Job* job : jobs) expect_given_up(*job);
    dead_ = loop_->open({.path = "/dead"})->id;
    disks_->stick(dead_);
  }
  const Job& job = submit(Op::Kind::read, live_, buffer.slice());
  ASSERT_TRUE(done(job));
  ASSERT_FALSE(job.op.result);
  EXPECT_EQ(job.op.result.error().sys_errno, ETIMEDOUT);
}

TEST_F(StallTest, AnswersInTimeAreNoError) {
  loop_.reset();
  start({.depth = 8, .stall_warn_ns = 10'000'000, .stall_error_ns = 3'600'000'000'000});
  Buffer buffer = *arena_->take(kIoAlign);
  Job& read = submit(Op::Kind::read, dead_, buffer.slice());
  EXPECT_FALSE(done(read, std::chrono::milliseconds(50)));
  disks_->let_go();
  ASSERT_TRUE(done(read));
  EXPECT_TRUE(read.op.result);
  EXPECT_TRUE(loop_->close(dead_));
}

TEST_F(StallTest, TheLoopEndsThoughItsDiskDoesNot) {
  Buffer buffer = *arena_->take(kIoAlign);
  expect_given_up(submit(Op::Kind::write, dead_, buffer.slice()));
  loop_.reset();
  EXPECT_EQ(disks_->held.size(), 1U);  // still with the engine, which stays
  disks_ = std::make_shared<HeldEngine::Disks>();
  start({.depth = 8});
}

TEST_F(StallTest, RefusesToGiveUpBeforeItWarns) {
  EXPECT_FALSE(Loop::make(std::make_unique<HeldEngine>(4, disks_),
                          {.stall_warn_ns = 2, .stall_error_ns = 1}));
  EXPECT_FALSE(Loop::make(std::make_unique<HeldEngine>(4, disks_), {.stall_warn_ns = 0}));
}

}  // namespace
}  // namespace stoker
