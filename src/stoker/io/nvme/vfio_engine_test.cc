// Our driver and its engine over a drive in this process: the suite of all engines, and a drive
// that is silent, slow, broken or removed.
#include "stoker/io/nvme/vfio_engine.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "stoker/io/load.h"
#include "stoker/testing/engine_conformance.h"
#include "stoker/testing/fake_nvme.h"
#include "stoker/testing/namespace_files.h"

namespace stoker {
namespace {

constexpr const char* kTarget = "nvme:0000:00:04.0";

nvme::VfioOptions options_of(FakeNvme& drive) {
  nvme::VfioOptions options;
  options.make_bus = [&drive]() -> Result<std::shared_ptr<nvme::Bus>> { return drive.bus(); };
  return options;
}

// The drive ends after its engine.
struct Holding : public Engine {
  Holding(std::unique_ptr<FakeNvme> a, std::unique_ptr<Engine> b)
      : drive(std::move(a)), engine(std::move(b)) {}
  EngineTraits traits() const override { return engine->traits(); }
  Result<FileInfo> open(const OpenFile& file) override { return engine->open(file); }
  Status close(FileId file) override { return engine->close(file); }
  Status adopt(const Arena& arena) override { return engine->adopt(arena); }
  Status unadopt(const Arena& arena) override { return engine->unadopt(arena); }
  size_t submit(std::span<Op* const> ops) override { return engine->submit(ops); }
  size_t poll(uint64_t wait_ns) override {
    const size_t completed = engine->poll(wait_ns);
    const auto copy = [](Counter& mine, const Counter& theirs) {
      mine.add(theirs.get() - mine.get());
    };
    const IoCounters& theirs = engine->counters();
    copy(counters_.reads, theirs.reads);
    copy(counters_.read_bytes, theirs.read_bytes);
    copy(counters_.writes, theirs.writes);
    copy(counters_.written_bytes, theirs.written_bytes);
    copy(counters_.syncs, theirs.syncs);
    copy(counters_.submissions, theirs.submissions);
    copy(counters_.retries, theirs.retries);
    copy(counters_.short_transfers, theirs.short_transfers);
    return completed;
  }
  void wake() override { engine->wake(); }
  std::unique_ptr<FakeNvme> drive;
  std::unique_ptr<Engine> engine;
};

EngineUnderTest on_fake(uint32_t block_bytes) {
  return {.name = "blocks" + std::to_string(block_bytes),
          .make = [block_bytes](uint32_t depth) -> Result<std::unique_ptr<Engine>> {
            auto drive = std::make_unique<FakeNvme>(64 * kMiB, block_bytes);
            STOKER_ASSIGN(auto vfio, nvme::VfioEngine::make(depth, options_of(*drive)));
            STOKER_ASSIGN(auto files, NamespaceFiles::make(std::move(vfio), kTarget));
            return std::unique_ptr<Engine>(
                std::make_unique<Holding>(std::move(drive), std::move(files)));
          },
          .real_files = false};
}

INSTANTIATE_TEST_SUITE_P(OwnDriver, EngineConformance,
                         ::testing::Values(on_fake(512), on_fake(4096)), engine_name);

class OwnDriver : public ::testing::Test {
 protected:
  static constexpr uint64_t kSoon = 50'000'000, kNever = 3'600'000'000'000;

  void open(uint64_t command_ns = kSoon, uint32_t depth = 8) {
    nvme::VfioOptions options = options_of(drive_);
    options.command_ns = command_ns;
    engine_ = std::move(*nvme::VfioEngine::make(depth, options));
    const auto file = engine_->open({.path = kTarget});
    ASSERT_TRUE(file) << file.error().message();
    file_ = file->id;
    arena_ = std::move(*Arena::make(4 * kMiB, budget_));
    ASSERT_TRUE(engine_->adopt(*arena_));
    memory_ = std::move(*arena_->take(1 * kMiB));
    for (size_t at = 0; at < memory_.size(); ++at)
      memory_.data()[at] = static_cast<std::byte>(at * 31 / 7);
    resets_ = drive_.resets;
  }
  // `count` transfers of 16 KiB, each at its own place.
  void submit(Op::Kind kind, size_t count) {
    ops_ = std::deque<Op>(count);
    std::vector<Op*> all;
    for (Op& op : ops_) {
      op.kind = kind;
      op.file = file_;
      op.offset = all.size() * 16 * kKiB;
      op.bytes = memory_.slice().sub(op.offset, 16 * kKiB);
      op.done = [](Op&) noexcept {};
      all.push_back(&op);
    }
    ASSERT_EQ(engine_->submit(all), count);
  }
  // False: one hangs. No time is short enough to fail on a busy machine.
  bool finish(uint64_t wait_ns = 1'000'000'000) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    for (size_t done = 0; done < ops_.size();) {
      done += engine_->poll(wait_ns);
      if (std::chrono::steady_clock::now() > end) return false;
    }
    return true;
  }
  void expect_written() {
    for (const Op& op : ops_) EXPECT_TRUE(op.result) << op.result.error().message();
    EXPECT_EQ(std::memcmp(drive_.disk(), memory_.data(), ops_.size() * 16 * kKiB), 0);
  }
  void expect_failed(int error, const std::string& part) {
    for (const Op& op : ops_) {
      ASSERT_FALSE(op.result);
      EXPECT_EQ(op.result.error().sys_errno, error) << op.result.error().message();
      EXPECT_NE(op.result.error().what.find(part), std::string::npos) << op.result.error().what;
    }
  }
  void TearDown() override {
    memory_ = {};
    if (engine_) {
      ASSERT_TRUE(engine_->unadopt(*arena_));
    }
    engine_.reset();
    EXPECT_EQ(drive_.mapped_bytes, 0U);
  }

  FakeNvme drive_{4 * kMiB};
  Budget budget_{64 * kMiB};
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<nvme::VfioEngine> engine_;
  Buffer memory_;
  FileId file_ = -1;
  std::deque<Op> ops_;
  uint32_t resets_ = 0;  // that open() made
};

TEST_F(OwnDriver, ACommandWithoutAnAnswerIsAbortedAndSentAgain) {
  open();
  drive_.silent = 1;
  submit(Op::Kind::write, 4);
  ASSERT_TRUE(finish());
  expect_written();
  EXPECT_EQ(drive_.aborted, 1U);
  EXPECT_EQ(drive_.resets, resets_);
  EXPECT_EQ(engine_->vfio_counters().aborts.get(), 1U) << "asked for once, counted once";
  EXPECT_EQ(engine_->counters().retries.get(), 1U);
}

TEST_F(OwnDriver, TimeRunsWhileNobodyWaits) {
  open();
  drive_.silent = 1;
  submit(Op::Kind::write, 1);
  ASSERT_TRUE(finish(0)) << "a busy Loop polls without waiting";
  expect_written();
}

TEST_F(OwnDriver, ACommandThatIsAbortedAgainAndAgainEndsWithThatError) {
  open();
  drive_.silent = 3;
  submit(Op::Kind::write, 1);
  ASSERT_TRUE(finish());
  expect_failed(ECANCELED, "aborted");
  EXPECT_EQ(drive_.aborted, 3U);
  submit(Op::Kind::write, 4);
  ASSERT_TRUE(finish());
  expect_written();
}

TEST_F(OwnDriver, AControllerThatStopsAnsweringIsResetAndGetsItsCommandsAgain) {
  open();
  drive_.silent = 8;
  drive_.aborts = false;
  submit(Op::Kind::write, 8);
  ASSERT_TRUE(finish());
  expect_written();
  EXPECT_EQ(drive_.resets, resets_ + 1);
  EXPECT_EQ(engine_->vfio_counters().resets.get(), 1U);
  submit(Op::Kind::read, 8);
  ASSERT_TRUE(finish());
}

TEST_F(OwnDriver, AControllerThatStaysSilentIsGivenUpAndReachesNoMemory) {
  open();
  drive_.silent_for_ever = true;
  drive_.aborts = false;
  submit(Op::Kind::write, 4);
  ASSERT_TRUE(finish());
  expect_failed(ETIMEDOUT, "it has not answered");
  EXPECT_EQ(drive_.resets, resets_ + 2);
  EXPECT_EQ(drive_.held(), 0U);
  submit(Op::Kind::write, 1);
  ASSERT_TRUE(finish());
  expect_failed(ETIMEDOUT, "the drive was given up");
  const uint32_t written = drive_.register_writes;
  TearDown();
  EXPECT_EQ(drive_.register_writes, written) << "nothing is left to say goodbye to";
}

TEST_F(OwnDriver, ADriveThatIsRemovedIsNoticedLongBeforeTheTimeIsOver) {
  open(kNever);
  drive_.silent_for_ever = true;
  submit(Op::Kind::read, 4);
  drive_.removed = true;
  ASSERT_TRUE(finish());
  expect_failed(ENODEV, "it was removed");
}

TEST_F(OwnDriver, AFatalStatusIsMetWithAReset) {
  open(kNever);
  drive_.silent = 4;
  submit(Op::Kind::write, 4);
  drive_.fatal = true;
  ASSERT_TRUE(finish());
  expect_written();
  EXPECT_EQ(drive_.resets, resets_ + 1);
}

TEST_F(OwnDriver, AnAnswerToNothingIsMetWithAReset) {
  open(kNever);
  drive_.answers_strangers = true;
  submit(Op::Kind::write, 4);
  ASSERT_TRUE(finish());
  expect_written();
  EXPECT_EQ(drive_.resets, resets_ + 1);
}

TEST_F(OwnDriver, AQueueSmallerThanTheDepthMakesOpsWait) {
  drive_.entries_max = 4;
  open(kSoon, 32);
  submit(Op::Kind::write, 32);
  ASSERT_TRUE(finish());
  expect_written();
}

TEST_F(OwnDriver, ABusyEngineMakesNoSystemCallAndACommandADoorbell) {
  open();
  submit(Op::Kind::write, 8);
  ASSERT_TRUE(finish());
  const uint64_t calls = engine_->vfio_counters().system_calls.get();
  const uint64_t submissions = engine_->counters().submissions.get();
  const uint32_t commands = drive_.commands;
  for (int round = 0; round < 100; ++round) {
    submit(Op::Kind::read, 8);
    ASSERT_TRUE(finish());
  }
  EXPECT_EQ(engine_->vfio_counters().system_calls.get(), calls);
  EXPECT_EQ(engine_->counters().submissions.get() - submissions, 100U) << "one a batch";
  EXPECT_EQ(drive_.commands - commands, 800U);
  EXPECT_EQ(engine_->vfio_counters().mapped_ops.get(), 0U);
}

TEST_F(OwnDriver, AnswersInterruptOnlyWhereTheyComeLate) {
  open();
  for (int round = 0; round < 100; ++round) {
    submit(Op::Kind::write, 8);
    ASSERT_TRUE(finish());
  }
  expect_written();
  EXPECT_EQ(drive_.interrupts, 0U);
  EXPECT_EQ(engine_->vfio_counters().loud_ops.get(), 0U);
  drive_.silent = 1;  // until it is aborted
  submit(Op::Kind::write, 1);
  ASSERT_TRUE(finish());
  EXPECT_EQ(engine_->vfio_counters().wasted_polls.get(), 1U) << "one wait, one spin";
  submit(Op::Kind::write, 8);
  ASSERT_TRUE(finish());
  expect_written();
  EXPECT_EQ(engine_->vfio_counters().loud_ops.get(), drive_.interrupts);
  EXPECT_GE(drive_.interrupts, 8U);
  for (int round = 0; round < 100; ++round) {
    submit(Op::Kind::read, 1);
    ASSERT_TRUE(finish());
  }
  const uint32_t before = drive_.interrupts;
  EXPECT_LT(before, 100U);
  submit(Op::Kind::read, 8);
  ASSERT_TRUE(finish());
  EXPECT_EQ(drive_.interrupts, before) << "they come soon again";
}

TEST_F(OwnDriver, AControllerWithOnePairOfQueuesIsDrivenByIt) {
  drive_.pairs_max = 1;
  open();
  submit(Op::Kind::write, 8);
  ASSERT_TRUE(finish());
  expect_written();
  EXPECT_EQ(drive_.interrupts, 8U);
}

TEST_F(OwnDriver, ADriveThatLooksAtDoorbellsInMemoryIsNotKnockedAt) {
  drive_.offers_shadows = true;
  open(kSoon, 256);  // where the queue begins anew, it is knocked at all the same
  submit(Op::Kind::write, 8);
  ASSERT_TRUE(finish());
  expect_written();
  drive_.looks = true;
  submit(Op::Kind::read, 1);
  ASSERT_TRUE(finish()) << "it does not look yet, so it is knocked at";
  const uint32_t doorbells = drive_.doorbells;
  for (int round = 0; round < 50; ++round) {
    submit(Op::Kind::read, 8);
    drive_.look();
    ASSERT_TRUE(finish());
  }
  EXPECT_LT(drive_.doorbells - doorbells, 5U);
  drive_.looks = false;
  drive_.silent = 8;
  drive_.aborts = false;
  submit(Op::Kind::write, 8);
  drive_.look();
  ASSERT_TRUE(finish());
  expect_written();
  EXPECT_EQ(drive_.resets, resets_ + 1) << "a reset drive is told of them again";
}

TEST_F(OwnDriver, MemoryOfNoArenaIsMappedForTheOneTransfer) {
  open();
  const uint64_t mapped = drive_.mapped_bytes;
  const auto other = std::move(*Arena::make(4 * kMiB, budget_));
  memory_ = std::move(*other->take(64 * kKiB));
  drive_.silent = 1;
  submit(Op::Kind::read, 4);
  ASSERT_TRUE(finish());
  EXPECT_EQ(engine_->vfio_counters().mapped_ops.get(), 5U) << "the aborted one again";
  EXPECT_EQ(drive_.mapped_bytes, mapped);
  memory_ = {};
}

TEST_F(OwnDriver, TheControllerIsToldThatItsUserLeaves) {
  open();
  memory_ = {};
  ASSERT_TRUE(engine_->unadopt(*arena_));
  engine_.reset();
  EXPECT_EQ(drive_.farewells, 1U);
}

// Two drives on one bus.
class TwoDrives final : public nvme::Bus {
 public:
  TwoDrives(FakeNvme& first, FakeNvme& second) : first_(first.bus()), second_(second.bus()) {}
  Result<std::unique_ptr<nvme::Device>> open(const std::string& address) override {
    return (address == "0000:00:05.0" ? second_ : first_)->open("0000:00:04.0");
  }
  Result<uint64_t> map(const void* data, uint64_t bytes) override {
    STOKER_TRY(first_->map(data, bytes));
    return second_->map(data, bytes);
  }
  void unmap(uint64_t at, uint64_t bytes) override {
    first_->unmap(at, bytes);
    second_->unmap(at, bytes);
  }

 private:
  const std::shared_ptr<nvme::Bus> first_, second_;
};

TEST_F(OwnDriver, AnArenaIsMappedOnceForAllEnginesOfAProcess) {
  FakeNvme other(64 * kMiB);
  const std::shared_ptr<nvme::Bus> bus = std::make_shared<TwoDrives>(drive_, other);
  nvme::VfioOptions options;
  options.make_bus = [&bus]() -> Result<std::shared_ptr<nvme::Bus>> { return bus; };
  Budget budget(2 * kMiB);
  const auto arena = std::move(*Arena::make(kMiB, budget));
  const Buffer buffer = std::move(*arena->take(64 * kKiB));
  const Load load{Load::Kind::write, 16 * kKiB, 4, kMiB};
  std::vector<std::unique_ptr<Loop>> loops;
  std::vector<const nvme::VfioCounters*> counters;
  std::vector<FileId> files;
  for (const char* target : {"nvme:0000:00:04.0", "nvme:0000:00:05.0"}) {
    auto engine = std::move(*nvme::VfioEngine::make(8, options));
    counters.push_back(&engine->vfio_counters());
    loops.push_back(std::move(*Loop::make(std::move(engine))));
    const auto file = loops.back()->open({.path = target});
    ASSERT_TRUE(file) << file.error().message();
    files.push_back(file->id);
    ASSERT_TRUE(loops.back()->adopt(*arena));
    // another namespace or range of the drive
    ASSERT_TRUE(loops.back()->open({.path = std::string(target) + "@1MiB+1MiB"}));
  }
  EXPECT_EQ(bus->arenas_mapped().get(), 1U);
  const uint64_t mapped = other.mapped_bytes;
  for (size_t i = 0; i < 2; ++i) {
    ASSERT_TRUE(run_load(*loops[i], files[i], buffer.slice(), load));
    EXPECT_EQ(counters[i]->mapped_ops.get(), 0U) << "memory was mapped for single transfers";
  }
  ASSERT_TRUE(loops[0]->unadopt(*arena));
  EXPECT_EQ(other.mapped_bytes, mapped) << "the other engine still uses it";
  ASSERT_TRUE(run_load(*loops[1], files[1], buffer.slice(), load));
  loops[1].reset();  // gives back what it did not before
  loops.clear();
  EXPECT_EQ(other.mapped_bytes, 0U);
  EXPECT_EQ(bus->arenas_mapped().get(), 1U);
}

// A store on such a drive has a Loop of its own; its callers' memory is adopted by the process's.
TEST_F(OwnDriver, ALoopThatFollowsAnotherKnowsItsArenas) {
  auto leader = std::move(*Loop::make(std::move(*make_engine("posix", 4))));
  Budget budget(4 * kMiB);
  const auto before = std::move(*Arena::make(kMiB, budget));
  const auto later = std::move(*Arena::make(kMiB, budget));
  ASSERT_TRUE(leader->adopt(*before));
  auto vfio = std::move(*nvme::VfioEngine::make(8, options_of(drive_)));
  const nvme::VfioCounters& counters = vfio->vfio_counters();
  LoopOptions options;
  options.follows = leader.get();
  auto loop = std::move(*Loop::make(std::move(vfio), options));
  const auto file = loop->open({.path = kTarget});
  ASSERT_TRUE(file) << file.error().message();
  ASSERT_TRUE(leader->adopt(*later));
  const uint64_t mapped = drive_.mapped_bytes;
  for (Arena* arena : {before.get(), later.get()}) {
    const Buffer buffer = std::move(*arena->take(64 * kKiB));
    const Load load{Load::Kind::write, 16 * kKiB, 4, kMiB};
    ASSERT_TRUE(run_load(*loop, file->id, buffer.slice(), load));
  }
  EXPECT_EQ(counters.mapped_ops.get(), 0U) << "memory was mapped for single transfers";
  ASSERT_TRUE(leader->unadopt(*before));
  EXPECT_EQ(drive_.mapped_bytes, mapped - 2 * kMiB);
  loop.reset();
  ASSERT_TRUE(leader->unadopt(*later)) << "nobody follows any more";
}

}  // namespace
}  // namespace stoker
