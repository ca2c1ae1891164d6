#include "stoker/testing/sim_engine.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "stoker/testing/engine_conformance.h"

namespace stoker {
namespace {

// All engines of a test share the disk; names are unique, so tests do not meet.
std::shared_ptr<SimDisk> shared_disk() {
  static const auto disk = std::make_shared<SimDisk>();
  return disk;
}

EngineUnderTest sim(const std::string& name, const SimFaults& faults, const SimDevice& device) {
  EngineUnderTest engine;
  engine.name = name;
  engine.real_files = false;
  engine.make = [faults, device](uint32_t depth) {
    shared_disk()->set_faults(faults);
    return SimEngine::make(shared_disk(), depth, device);
  };
  engine.small_disk = [] {
    static int disks = 0;
    auto folder = new std::string("small" + std::to_string(++disks));
    shared_disk()->limit(*folder, 1 * kMiB);
    return std::shared_ptr<std::string>(folder, [](std::string* gone) {
      shared_disk()->unlimit(*gone);
      delete gone;
    });
  };
  return engine;
}

SimFaults harmless_faults() {
  SimFaults faults;
  faults.short_transfer = 300'000;
  faults.interrupted = 200'000;
  return faults;
}

INSTANTIATE_TEST_SUITE_P(Sim, EngineConformance,
                         ::testing::Values(sim("sim", {}, {}),
                                           sim("sim_slow", {},
                                               {1'000'000'000, 500'000'000, 80'000, 50'000, 7}),
                                           sim("sim_short_and_interrupted", harmless_faults(), {})),
                         engine_name);

// One op at a time on a disk of its own.
class SimEngineTest : public ::testing::Test {
 protected:
  void start(const SimDevice& device = {}) {
    auto engine = SimEngine::make(disk_, 64, device);
    engine_.reset(static_cast<SimEngine*>(engine->release()));
    file_ = engine_->open({.path = "disk", .create = true, .reserve_bytes = 1 * kMiB})->id;
  }
  void SetUp() override {
    arena_ = std::move(*Arena::make(4 * kMiB, budget_));
    buffer_ = std::move(*arena_->take(1 * kMiB));
    start();
  }
  Result<size_t> run(Op::Kind kind, uint64_t offset = 0, size_t bytes = 0, uint8_t fill = 0) {
    Op op;
    op.kind = kind;
    op.file = file_;
    op.offset = offset;
    if (kind != Op::Kind::sync) op.bytes = buffer_.slice().sub(0, bytes);
    if (kind == Op::Kind::write) std::memset(buffer_.data(), fill, bytes);
    op.done = [](Op&) noexcept {};
    Op* ops[] = {&op};
    EXPECT_EQ(engine_->submit(ops), 1U);
    while (engine_->poll(0) == 0) {
    }
    return op.result;
  }
  uint8_t at(uint64_t offset) {
    std::byte value{};
    disk_->image("disk").read(offset, {&value, 1});
    return static_cast<uint8_t>(value);
  }

  Budget budget_{1 * kGiB};
  std::shared_ptr<SimDisk> disk_ = std::make_shared<SimDisk>(3);
  std::unique_ptr<Arena> arena_;
  Buffer buffer_;
  std::unique_ptr<SimEngine> engine_;
  FileId file_ = -1;
};

TEST_F(SimEngineTest, APowerCutKeepsWhatWasFlushedAndDealsWithTheRestBySeed) {
  bool survived = false;
  bool vanished = false;
  bool torn = false;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    disk_->put("disk", SimImage(1 * kMiB));
    ASSERT_TRUE(run(Op::Kind::write, 0, 8192, 1));
    ASSERT_TRUE(run(Op::Kind::sync));
    ASSERT_TRUE(run(Op::Kind::write, 4096, 8192, 2));
    disk_->cut_power(seed);
    EXPECT_FALSE(run(Op::Kind::read, 0, 4096)) << "no power";
    EXPECT_FALSE(run(Op::Kind::sync));
    disk_->restore_power();
    ASSERT_TRUE(run(Op::Kind::read, 0, 4096));
    EXPECT_EQ(at(0), 1);
    size_t fresh = 0;
    for (uint64_t sector = 4096; sector < 12288; sector += 512) {
      const uint8_t old = sector < 8192 ? 1 : 0;
      EXPECT_TRUE(at(sector) == 2 || at(sector) == old);
      EXPECT_EQ(at(sector), at(sector + 511)) << "sectors are whole";
      fresh += at(sector) == 2 ? 1U : 0U;
    }
    survived |= fresh == 16;
    vanished |= fresh == 0;
    torn |= fresh != 0 && fresh != 16;
  }
  EXPECT_TRUE(survived && vanished && torn);
}

TEST_F(SimEngineTest, APowerCutWhileADiskIsMadeLeavesNothingAnEmptyOneOrABlankOne) {
  using Way = std::pair<uint64_t, std::string>;
  std::set<Way> seen;
  for (uint64_t step = 0; step < 4; ++step) {
    for (uint64_t seed = 0; seed < 40; ++seed) {
      disk_->remove("new");
      disk_->cut_power_after(step, seed, "new");
      const auto made = engine_->open({.path = "new", .create = true, .reserve_bytes = 1 * kMiB});
      ASSERT_EQ(made.has_value(), step == 3);
      if (made) {
        ASSERT_TRUE(engine_->close(made->id));
      }
      EXPECT_TRUE(run(Op::Kind::read, 0, 4096)) << "other disks have their power";
      disk_->restore_power();
      const auto found = engine_->open({.path = "new"});
      seen.emplace(step, !found ? "nothing" : found->bytes == 0 ? "empty" : "whole");
      if (!found) continue;
      ASSERT_TRUE(found->bytes == 0 || found->bytes == 1 * kMiB);
      ASSERT_TRUE(engine_->close(found->id));
    }
  }
  const std::set<Way> expected = {{0, "nothing"}, {1, "nothing"}, {1, "empty"}, {2, "nothing"},
                                  {2, "empty"},   {2, "whole"},   {3, "whole"}};
  EXPECT_EQ(seen, expected);
}

TEST_F(SimEngineTest, AFailedOrLyingFlushMakesNothingDurable) {
  SimFaults faults;
  faults.flush_lies = 1'000'000;
  disk_->set_faults(faults);
  bool lost = false;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    disk_->put("disk", SimImage(1 * kMiB));
    ASSERT_TRUE(run(Op::Kind::write, 0, 4096, 1));
    ASSERT_TRUE(run(Op::Kind::sync));
    disk_->cut_power(seed);
    disk_->restore_power();
    lost |= at(0) == 0;
  }
  EXPECT_TRUE(lost);
  disk_->set_faults({});
  disk_->fail_nth(Op::Kind::sync, 2, EIO);
  EXPECT_TRUE(run(Op::Kind::sync));
  EXPECT_FALSE(run(Op::Kind::sync));
  EXPECT_TRUE(run(Op::Kind::sync));
}

TEST_F(SimEngineTest, FaultsComeAsOrdered) {
  disk_->fail_nth(Op::Kind::write, 1, ENOSPC, "disk");
  EXPECT_EQ(run(Op::Kind::write, 0, 4096, 1).error().code, Code::out_of_space);
  EXPECT_EQ(at(0), 0);
  SimFaults faults;
  faults.misdirected = 1'000'000;
  disk_->set_faults(faults);
  EXPECT_TRUE(run(Op::Kind::write, 64 * kKiB, 4096, 9));
  faults = {};
  faults.torn = 1'000'000;
  disk_->set_faults(faults);
  EXPECT_EQ(run(Op::Kind::write, 512 * kKiB, 64 * kKiB, 5).error().code, Code::io);
  size_t written = 0;
  for (uint64_t sector = 512 * kKiB; sector < 576 * kKiB; sector += 512)
    written += at(sector) == 5 ? 1U : 0U;
  EXPECT_GT(written, 0U);
  EXPECT_LT(written, 128U);
}

TEST_F(SimEngineTest, TheVirtualClockFollowsTheDeviceModel) {
  start({1'000'000'000, 500'000'000, 100'000, 0, 1});
  ASSERT_TRUE(run(Op::Kind::read, 0, 1 * kMiB));
  EXPECT_EQ(engine_->clock().now_ns(), 1'048'576U + 100'000U);
  const uint64_t before = engine_->clock().now_ns();
  ASSERT_TRUE(run(Op::Kind::write, 0, 1 * kMiB, 1));
  EXPECT_EQ(engine_->clock().now_ns() - before, 2 * 1'048'576U + 100'000U);
  // Deep queues hide the latency: 16 reads of 64 KiB take the time of their bytes and one latency.
  const uint64_t start_ns = engine_->clock().now_ns();
  std::array<Op, 16> ops;
  std::vector<Op*> all;
  for (size_t i = 0; i < ops.size(); ++i) {
    ops[i].file = file_;
    ops[i].offset = i * 64 * kKiB;
    ops[i].bytes = buffer_.slice().sub(i * 64 * kKiB, 64 * kKiB);
    ops[i].done = [](Op&) noexcept {};
    all.push_back(&ops[i]);
  }
  ASSERT_EQ(engine_->submit(all), 16U);
  for (size_t completed = 0; completed < 16;) completed += engine_->poll(0);
  EXPECT_EQ(engine_->clock().now_ns() - start_ns, 1'048'576U + 100'000U);
}

TEST_F(SimEngineTest, SeedsShuffleCompletions) {
  const auto order = [&](uint64_t seed) {
    start({0, 0, 0, 1000, seed});
    struct Ordered {
      Op op;
      std::vector<size_t>* done;
      size_t index;
    };
    std::vector<size_t> done;
    std::array<Ordered, 10> ops;
    std::vector<Op*> all;
    for (size_t i = 0; i < ops.size(); ++i) {
      ops[i].done = &done;
      ops[i].index = i;
      ops[i].op.file = file_;
      ops[i].op.bytes = buffer_.slice().sub(i * 4096, 4096);
      ops[i].op.context = &ops[i];
      ops[i].op.done = [](Op& op) noexcept {
        auto* self = static_cast<Ordered*>(op.context);
        self->done->push_back(self->index);
      };
      all.push_back(&ops[i].op);
    }
    EXPECT_EQ(engine_->submit(all), 10U);
    while (done.size() < 10) engine_->poll(0);
    return done;
  };
  EXPECT_EQ(order(5), order(5));
  EXPECT_NE(order(5), order(6));
}

}  // namespace
}  // namespace stoker
