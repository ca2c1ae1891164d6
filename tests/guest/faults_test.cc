// Drives that fail on purpose: sectors that cannot be read or written, and one that is too slow.
// QEMU is told what fails: tests/python/test_nvme.py.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/io/nvme/vfio_engine.h"
#include "target.h"

namespace stoker {
namespace {

class Faults : public ::testing::Test {
 protected:
  void open(std::unique_ptr<Engine> engine) {
    engine_ = std::move(engine);
    arena_ = std::move(*Arena::make(4 * kMiB, budget_));
    ASSERT_TRUE(engine_->adopt(*arena_));
    const auto file = engine_->open({.path = target()});
    ASSERT_TRUE(file) << file.error().message();
    file_ = file->id;
    memory_ = std::move(*arena_->take(2 * kMiB));
  }
  Result<size_t> run(Op::Kind kind, uint64_t offset, size_t bytes) {
    return run_op(*engine_, kind, file_, offset, memory_.slice().sub(0, bytes));
  }
  void TearDown() override {
    memory_ = {};
    engine_.reset();
  }

  Budget budget_{64 * kMiB};
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Engine> engine_;
  Buffer memory_;
  FileId file_ = -1;
};

// Of this drive the sector at 1 MiB cannot be read, and that at 2 MiB cannot be written.
TEST_F(Faults, BadSectorsAreNamedAndTheOthersWork) {
  open(std::move(*make_engine_of_target(8)));
  const auto bad = run(Op::Kind::read, 1 * kMiB, 4096);
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.error().code, Code::io);
  EXPECT_NE(bad.error().what.find("media error"), std::string::npos) << bad.error().what;
  EXPECT_NE(bad.error().what.find("at 1048576 of"), std::string::npos) << bad.error().what;
  EXPECT_FALSE(run(Op::Kind::read, 0, 2 * kMiB)) << "one of its commands meets the sector";
  EXPECT_TRUE(run(Op::Kind::read, 1 * kMiB + 4096, 1 * kMiB - 4096));
  EXPECT_TRUE(run(Op::Kind::write, 1 * kMiB, 4096)) << "only reads fail there";
  const auto worn = run(Op::Kind::write, 2 * kMiB, 4096);
  ASSERT_FALSE(worn);
  EXPECT_NE(worn.error().what.find("could not write"), std::string::npos) << worn.error().what;
  EXPECT_EQ(engine_->counters().reads.get(), 1U);
}

// What a drive with two transfers a second does to reads, and what our driver does then.
class Slow : public Faults {
 protected:
  std::deque<Op> read(size_t count) {
    std::deque<Op> ops(count);
    std::vector<Op*> all;
    for (size_t i = 0; i < ops.size(); ++i) {
      ops[i].file = file_;
      ops[i].offset = i * 4096;
      ops[i].bytes = memory_.slice().sub(i * 4096, 4096);
      ops[i].done = [](Op&) noexcept {};
      all.push_back(&ops[i]);
    }
    EXPECT_EQ(engine_->submit(all), all.size());
    for (size_t done = 0; done < all.size();) done += engine_->poll(1'000'000'000);
    return ops;
  }
  const nvme::VfioCounters& counters() const {
    return dynamic_cast<const nvme::VfioEngine&>(*engine_).vfio_counters();
  }
};

TEST_F(Slow, ADriveThatIsSlowIsWaitedFor) {
  open(std::move(*make_engine_of_target(8)));
  for (const Op& op : read(5)) EXPECT_TRUE(op.result) << op.result.error().message();
  if (engine_->traits().name != "vfio") return;
  EXPECT_EQ(counters().aborts.get() + counters().resets.get(), 0U);
}

// QEMU gives up no transfer that is under way, and a reset does all that is there at once, on
// credit: of three reads one meets a time-out, and none starves.
TEST_F(Slow, ADriveThatAnswersTooLateIsResetAndServesAllTheSame) {
  if (!nvme::is_pci_target(target())) GTEST_SKIP() << "the kernel's driver has its own time-outs";
  nvme::VfioOptions options;
  options.command_ns = 300'000'000;
  options.resets_max = 50;
  open(std::move(*nvme::VfioEngine::make(8, options)));
  for (size_t at = 0; at < 3 * 4096; ++at) memory_.data()[at] = std::byte{0x5A};
  for (const Op& op : read(3)) EXPECT_TRUE(op.result) << op.result.error().message();
  for (size_t at = 0; at < 3 * 4096; ++at) ASSERT_EQ(memory_.data()[at], std::byte{0});
  EXPECT_GT(counters().aborts.get(), 0U);
  EXPECT_GT(counters().resets.get(), 0U);
}

}  // namespace
}  // namespace stoker
