#include "stoker/io/loop.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <thread>

#include "stoker/base/bytes.h"
#include "stoker/base/mutex.h"
#include "stoker/io/bounce.h"
#include "stoker/testing/held_engine.h"

namespace stoker {
namespace {

class LoopTest : public ::testing::Test {
 protected:
  struct Job {
    Op op;
    LoopTest* test = nullptr;
    std::function<void(Job&)> then;
  };

  void start(uint32_t engine_depth, LoopOptions options = {}, bool open = true) {
    disks_->open = open;
    auto loop = Loop::make(std::make_unique<HeldEngine>(engine_depth, disks_), options);
    ASSERT_TRUE(loop) << loop.error().message();
    loop_ = std::move(*loop);
  }

  Job& job(Op::Kind kind, uint64_t offset, std::byte* data, size_t bytes,
           Priority priority = Priority::demand) {
    Job& made = jobs_.emplace_back();
    made.test = this;
    made.op.kind = kind;
    made.op.file = 0;
    made.op.priority = priority;
    made.op.offset = offset;
    made.op.bytes = Slice{data, bytes};
    made.op.context = &made;
    made.op.done = [](Op& op) noexcept {
      Job& self = *static_cast<Job*>(op.context);
      if (self.then) self.then(self);
      LoopTest& test = *self.test;
      MutexLock lock(test.mutex_);
      ++test.finished_;
      test.changed_.notify_all();
    };
    return made;
  }
  Job& aligned_read(Priority priority, uint64_t deadline_ns = 0) {
    Job& made = job(Op::Kind::read, 0, page_, kIoAlign, priority);
    made.op.deadline_ns = deadline_ns;
    return made;
  }
  void wait_for(size_t finished) {
    MutexLock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(30), [&] {
      return finished_ >= finished;
    })) << finished_;
  }

  std::shared_ptr<HeldEngine::Disks> disks_ = std::make_shared<HeldEngine::Disks>();
  Mutex mutex_;
  CondVar changed_;
  size_t finished_ = 0;  // guarded by mutex_
  alignas(kIoAlign) std::byte page_[kIoAlign];
  std::deque<Job> jobs_;
  std::unique_ptr<Loop> loop_;  // goes first
};

TEST_F(LoopTest, RefusesNonsense) {
  const auto make = [&](LoopOptions options) {
    return Loop::make(std::make_unique<HeldEngine>(4, disks_), options);
  };
  EXPECT_FALSE(make({.depth = 0}));
  EXPECT_FALSE(make({.queue_max = 0}));
  EXPECT_FALSE(make({.floor_percent = {50, 20, 20, 10, 1}}));
  Budget none(1000);
  const auto refused = make({.budget = &none});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::over_budget);
}

TEST_F(LoopTest, DrawsItsBounceMemoryOnTheBudget) {
  Budget budget(2 * kMiB);
  start(4, {.budget = &budget});
  EXPECT_EQ(budget.used(), Bounce::kLanes * Bounce::kLaneBytes);
  loop_.reset();
  EXPECT_EQ(budget.used(), 0U);
}

TEST_F(LoopTest, MovesBytesAndCountsThemByClass) {
  start(8);
  std::memset(page_, 7, sizeof page_);
  ASSERT_TRUE(loop_->submit(job(Op::Kind::write, 8192, page_, kIoAlign, Priority::write_back).op));
  wait_for(1);
  EXPECT_EQ(*jobs_[0].op.result, kIoAlign);
  std::memset(page_, 0, sizeof page_);
  ASSERT_TRUE(loop_->submit(job(Op::Kind::read, 8192, page_, kIoAlign).op));
  ASSERT_TRUE(loop_->submit(job(Op::Kind::read, 64 * kMiB, page_, kIoAlign, Priority::scrub).op));
  wait_for(3);
  EXPECT_EQ(page_[100], std::byte{7});
  EXPECT_FALSE(jobs_[2].op.result);
  EXPECT_EQ(loop_->counters(Priority::write_back).bytes_written.get(), kIoAlign);
  EXPECT_EQ(loop_->counters(Priority::write_back).ops.get(), 1U);
  EXPECT_EQ(loop_->counters(Priority::demand).bytes_read.get(), kIoAlign);
  EXPECT_EQ(loop_->counters(Priority::demand).errors.get(), 0U);
  EXPECT_EQ(loop_->counters(Priority::scrub).errors.get(), 1U);
  EXPECT_EQ(loop_->counters(Priority::scrub).bytes_read.get(), 0U);
}

TEST_F(LoopTest, TracesTheWaitAndTheServiceOfEachOpOnlyWhileAsked) {
  Trace trace;
  start(4, {.trace = &trace});
  ASSERT_TRUE(loop_->submit(job(Op::Kind::read, 0, page_, kIoAlign).op));
  wait_for(1);
  trace.start(16);
  ASSERT_TRUE(loop_->submit(job(Op::Kind::write, 8192, page_, kIoAlign, Priority::write_back).op));
  wait_for(2);
  const auto spans = trace.stop().first;
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_STREQ(spans[0].track, "queue");
  EXPECT_STREQ(spans[1].track, "disk");
  EXPECT_EQ(spans[1].name, "write back write");
  EXPECT_EQ(spans[1].bytes, kIoAlign);
  EXPECT_EQ(spans[0].end_ns, spans[1].begin_ns);
  loop_.reset();  // before the trace
}

TEST_F(LoopTest, NeverExceedsItsDepthNorTheEngines) {
  start(4, {.depth = 64});
  std::vector<Op*> ops;
  for (int i = 0; i < 100; ++i) ops.push_back(&aligned_read(Priority::demand).op);
  ASSERT_TRUE(loop_->submit(ops));
  wait_for(100);
  EXPECT_EQ(disks_->held_peak, 4U);
  loop_.reset();
  disks_->held_peak = 0;
  start(64, {.depth = 3});
  ops.clear();
  for (int i = 0; i < 100; ++i) ops.push_back(&aligned_read(Priority::demand).op);
  ASSERT_TRUE(loop_->submit(ops));
  wait_for(200);
  EXPECT_EQ(disks_->held_peak, 3U);
}

// While one op occupies the engine others queue up; then they must come in order of class and
// deadline, with floors.
TEST_F(LoopTest, ChoosesByClassAndDeadlineWhatWaits) {
  start(1, {.depth = 1, .floor_percent = {0, 0, 0, 0, 0}}, false);
  ASSERT_TRUE(loop_->submit(aligned_read(Priority::scrub).op));
  disks_->wait_for_seen(1);
  std::vector<Op*> ops = {&aligned_read(Priority::scrub).op, &aligned_read(Priority::prefetch).op,
                          &aligned_read(Priority::prefetch, 50).op,
                          &aligned_read(Priority::demand).op,
                          &aligned_read(Priority::prefetch, 20).op};
  ASSERT_TRUE(loop_->submit(ops));
  disks_->allow_all();
  wait_for(6);
  const auto& seen = disks_->seen;
  ASSERT_EQ(seen.size(), 6U);
  EXPECT_EQ(seen[1].priority, Priority::demand);
  EXPECT_EQ(seen[2].deadline_ns, 20U);
  EXPECT_EQ(seen[3].deadline_ns, 50U);
  EXPECT_EQ(seen[4].priority, Priority::prefetch);
  EXPECT_EQ(seen[5].priority, Priority::scrub);
}

TEST_F(LoopTest, GivesEachClassItsFloor) {
  start(1, {.depth = 1, .floor_percent = {0, 0, 25, 0, 0}}, false);
  ASSERT_TRUE(loop_->submit(aligned_read(Priority::demand).op));
  disks_->wait_for_seen(1);
  std::vector<Op*> ops;
  for (int i = 0; i < 30; ++i) ops.push_back(&aligned_read(Priority::demand).op);
  for (int i = 0; i < 10; ++i) ops.push_back(&aligned_read(Priority::write_back).op);
  ASSERT_TRUE(loop_->submit(ops));
  disks_->allow_all();
  wait_for(41);
  size_t early = 0;
  for (size_t i = 1; i < 21; ++i) early += disks_->seen[i].priority == Priority::write_back ? 1 : 0;
  EXPECT_EQ(early, 5U);
}

TEST_F(LoopTest, BackgroundBytesAreBoundedSoThatADemandNeedNotWait) {
  start(16, {.depth = 16, .background_bytes = 2 * kIoAlign}, false);
  std::vector<Op*> ops;
  for (int i = 0; i < 6; ++i) ops.push_back(&aligned_read(Priority::prefetch).op);
  ops.push_back(&aligned_read(Priority::scrub).op);
  ASSERT_TRUE(loop_->submit(ops));
  disks_->wait_for_seen(2);
  ASSERT_TRUE(loop_->submit(aligned_read(Priority::demand).op));
  disks_->wait_for_seen(3);
  {
    MutexLock lock(disks_->mutex);
    EXPECT_EQ(disks_->seen.size(), 3U);
    EXPECT_EQ(disks_->seen[2].priority, Priority::demand);
  }
  disks_->allow_all();
  wait_for(8);
  EXPECT_EQ(disks_->held_peak, 3U);
}

TEST_F(LoopTest, AFullQueueIsBusyAndTakesNothing) {
  start(1, {.depth = 1, .queue_max = 4}, false);
  ASSERT_TRUE(loop_->submit(aligned_read(Priority::demand).op));
  disks_->wait_for_seen(1);
  std::vector<Op*> ops;
  for (int i = 0; i < 5; ++i) ops.push_back(&aligned_read(Priority::demand).op);
  const Status refused = loop_->submit(ops);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::busy);
  ASSERT_TRUE(loop_->submit(std::span(ops).first(4)));
  EXPECT_FALSE(loop_->submit(*ops[4]));
  disks_->allow_all();
  wait_for(5);
  ASSERT_TRUE(loop_->submit(*ops[4]));  // room again, and the refused op is untouched
  wait_for(6);
}

TEST_F(LoopTest, TheDestructorFinishesWhatWasSubmittedEvenFromDone) {
  start(2, {.depth = 2}, false);
  std::vector<Op*> ops;
  int chained = 0;
  for (int i = 0; i < 20; ++i) {
    Job& each = aligned_read(Priority::scrub);
    each.then = [&](Job& self) {
      if (chained++ < 10) {
        ASSERT_TRUE(loop_->submit(self.op));
      }
    };
    ops.push_back(&each.op);
  }
  ASSERT_TRUE(loop_->submit(ops));
  Loop* loop = loop_.get();
  std::thread destroyer([&] { delete loop; });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  disks_->allow_all();
  destroyer.join();
  EXPECT_EQ(finished_, 30U);
  static_cast<void>(loop_.release());
}

TEST_F(LoopTest, AnOpMayBeDestroyedInDone) {
  start(8);
  auto* op = new Op;
  op->bytes = Slice{page_, kIoAlign};
  std::atomic<bool> gone{false};
  op->context = &gone;
  op->done = [](Op& self) noexcept {
    auto* flag = static_cast<std::atomic<bool>*>(self.context);
    delete &self;
    *flag = true;
  };
  ASSERT_TRUE(loop_->submit(*op));
  while (!gone) std::this_thread::yield();
}

TEST_F(LoopTest, UnalignedMemoryGoesThroughTheBouncePathBitForBit) {
  start(16);
  const size_t bytes = 3 * Bounce::kLaneBytes + 8192;
  std::vector<std::byte> out(bytes + 64);
  std::vector<std::byte> in(bytes + 64);
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::byte>(i * 131 >> 3);
  for (const size_t shift : {size_t{1}, size_t{16}, size_t{63}}) {
    const size_t before = finished_;
    ASSERT_TRUE(loop_->submit(
        job(Op::Kind::write, 1 * kMiB, out.data() + shift, bytes, Priority::write_back).op));
    wait_for(before + 1);
    EXPECT_EQ(*jobs_.back().op.result, bytes);
    ASSERT_TRUE(loop_->submit(
        job(Op::Kind::read, 1 * kMiB, in.data() + shift, bytes, Priority::prefetch).op));
    wait_for(before + 2);
    EXPECT_EQ(std::memcmp(in.data() + shift, out.data() + shift, bytes), 0);
  }
  EXPECT_EQ(loop_->counters(Priority::write_back).bytes_written.get(), 3 * bytes);
  EXPECT_EQ(loop_->counters(Priority::write_back).ops.get(), 3U);  // not one a piece
}

TEST_F(LoopTest, ManyUnalignedOpsShareTheBouncePathWithAlignedOnes) {
  start(16);
  std::vector<std::byte> memory(64 * (64 * kKiB) + 1);
  std::vector<Op*> ops;
  for (size_t i = 0; i < 64; ++i) {
    std::byte* at = memory.data() + 1 + i * 64 * kKiB;
    std::memset(at, static_cast<int>(i), 64 * kKiB);
    ops.push_back(&job(Op::Kind::write, i * 64 * kKiB, at, 64 * kKiB).op);
    ops.push_back(&aligned_read(Priority::scrub).op);
  }
  ASSERT_TRUE(loop_->submit(ops));
  wait_for(128);
  for (size_t i = 0; i < 64; ++i)
    EXPECT_EQ(disks_->disk(0)[i * 64 * kKiB + 5], static_cast<std::byte>(i));
}

TEST_F(LoopTest, AnErrorOnTheBouncePathEndsTheOp) {
  start(16);
  std::vector<std::byte> memory(1 * kMiB + 1);
  ASSERT_TRUE(
      loop_->submit(job(Op::Kind::read, 16 * kMiB - 512 * kKiB, memory.data() + 1, 1 * kMiB).op));
  wait_for(1);
  EXPECT_FALSE(jobs_[0].op.result);
  // the lanes are free again
  ASSERT_TRUE(loop_->submit(job(Op::Kind::read, 0, memory.data() + 1, 1 * kMiB).op));
  wait_for(2);
  EXPECT_TRUE(jobs_[1].op.result);
}

TEST_F(LoopTest, ABatchWakesTheLoopOnce) {
  start(64);
  for (int round = 0; round < 5; ++round) {
    std::vector<Op*> ops;
    for (int i = 0; i < 32; ++i) ops.push_back(&aligned_read(Priority::demand).op);
    ASSERT_TRUE(loop_->submit(ops));
    wait_for(static_cast<size_t>(round + 1) * 32);
  }
  EXPECT_LE(disks_->wakes, 5U);
}

TEST_F(LoopTest, ManyThreadsSubmitAtOnce) {
  start(16, {.depth = 8});
  std::deque<std::deque<Op>> ops(4);
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  for (auto& mine : ops) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        Op& op = mine.emplace_back();
        op.bytes = Slice{page_, kIoAlign};
        op.kind = Op::Kind::read;
        op.priority = static_cast<Priority>(i % kPriorities);
        op.context = &done;
        op.done = [](Op& self) noexcept { ++*static_cast<std::atomic<int>*>(self.context); };
        EXPECT_TRUE(loop_->submit(op));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  loop_.reset();
  EXPECT_EQ(done, 8000);
}

// The same with the engines of this machine and a real file.
TEST(LoopOnDisk, MovesAlignedAndUnalignedMemory) {
  for (const char* name : {"auto", "posix"}) {
    auto loop = std::move(*Loop::make(std::move(*make_engine(name, 16))));
    const std::string path = ::testing::TempDir() + "loop-" + std::to_string(getpid());
    const auto file = loop->open({.path = path, .create = true, .reserve_bytes = 8 * kMiB});
    unlink(path.c_str());
    ASSERT_TRUE(file) << file.error().message();
    std::vector<std::byte> memory(4 * kMiB + 3);
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i * 7 >> 5);
    std::vector<std::byte> back(4 * kMiB + 3);
    std::atomic<int> done{0};
    const auto run = [&](Op::Kind kind, std::byte* data) {
      std::deque<Op> ops(4);
      done = 0;
      for (size_t i = 0; i < ops.size(); ++i) {
        ops[i].kind = kind;
        ops[i].file = file->id;
        ops[i].offset = i * kMiB;
        ops[i].bytes = Slice{data + i * kMiB, kMiB};
        ops[i].context = &done;
        ops[i].done = [](Op& self) noexcept { ++*static_cast<std::atomic<int>*>(self.context); };
        EXPECT_TRUE(loop->submit(ops[i]));
      }
      while (done < 4) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      for (const Op& op : ops) EXPECT_TRUE(op.result);
    };
    run(Op::Kind::write, memory.data() + 3);
    run(Op::Kind::read, back.data() + 1);
    EXPECT_EQ(std::memcmp(back.data() + 1, memory.data() + 3, 4 * kMiB), 0);
    EXPECT_EQ(loop->counters().written_bytes.get(), 4 * kMiB);
    EXPECT_EQ(loop->counters().read_bytes.get(), 4 * kMiB);
    ASSERT_TRUE(loop->close(file->id));
  }
}

class FullEngine final : public HeldEngine {
 public:
  FullEngine(const bool& full, size_t& adopted)
      : HeldEngine(4, std::make_shared<Disks>()), full_(full), adopted_(adopted) {}
  Status adopt(const Arena&) override {
    if (full_) return fail(Code::out_of_space, "no room for another arena");
    ++adopted_;
    return {};
  }

 private:
  const bool& full_;
  size_t& adopted_;
};

// Who hears that may end the arena: nobody may hand it on.
TEST_F(LoopTest, AnArenaThatAFollowerCannotAdoptIsForgotten) {
  bool full = true;
  size_t adopted = 0;
  const auto leader = std::move(*Loop::make(std::make_unique<HeldEngine>(4, disks_), {}));
  LoopOptions options;
  options.follows = leader.get();
  const auto make = [&] {
    return std::move(*Loop::make(std::make_unique<FullEngine>(full, adopted), options));
  };
  const auto follower = make();
  Budget budget(2 * kMiB);
  const auto arena = std::move(*Arena::make(kMiB, budget));
  EXPECT_FALSE(leader->adopt(*arena));
  full = false;
  const auto later = make();
  EXPECT_EQ(adopted, 0U);
  ASSERT_TRUE(leader->adopt(*arena));
  EXPECT_EQ(adopted, 2U);
  ASSERT_TRUE(leader->unadopt(*arena));
}

}  // namespace
}  // namespace stoker
