// How long a commit waits for what goes on in the background: for one step of it at most. Counted
// on simulated disks, and never measured: transfers that start together take one latency, and the
// bytes of all are as many for each disk.
#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

// of a disk that is not a fast one
constexpr uint64_t kTransferUs = 200;
constexpr uint64_t kBytesAUs = 500;

constexpr uint64_t kStepUs = 5'000;      // a step beside commits
constexpr uint64_t kCommitUs = 100'000;  // a commit that finds the log full

struct Turn {
  uint64_t transfers = 0;  // one after the other
  uint64_t bytes = 0;      // of all disks
  uint64_t us(size_t disks) const { return transfers * kTransferUs + bytes / disks / kBytesAUs; }
};

// A 6+3 store, of which nothing moves by itself. Each time that the clock moves, and no sooner,
// what was asked for makes one step.
class CodedTurn : public ::testing::Test {
 protected:
  static constexpr size_t kDisks = 9;
  static constexpr uint32_t kChunk = 1 << 20;
  static constexpr size_t kStripe = 6 * kChunk;
  static constexpr size_t kStripes = 12;

  explicit CodedTurn(bool background = false) : world_(options(clock_, background)) {}
  void open(const std::vector<std::string>& replaced = {}) {
    store_.reset();
    StoreOptions made;
    made.create = replaced.empty();
    made.replace = replaced;
    made.capacity_bytes = kStripes * kStripe;
    made.chunk_bytes = kChunk;
    made.objects_max = 64;
    store_ = std::move(*world_.open_coded(made));
  }
  void fill() {
    open();
    content_ = put(*store_, "a", kStripes * kStripe, 1);
  }
  void lose_a_disk() {
    store_.reset();
    world_.disk().remove(world_.paths()[1]);
    open({world_.paths()[1]});
  }
  // One block, of any row and stripe.
  void update_once(uint64_t nth) {
    const uint64_t blocks = content_.size() / kBlock;
    update(*store_, "a", content_, nth * 7919 % blocks * kBlock, kBlock, nth);
  }
  Turn now() {
    Turn so_far{world_.waits(), 0};
    for (size_t i = 0; i < kPriorities; ++i) {
      const ClassCounters& counters = world_.runtime().loop().counters(static_cast<Priority>(i));
      so_far.bytes += counters.bytes_read.get() + counters.bytes_written.get();
    }
    return so_far;
  }
  Turn since(const Turn& before) {
    const Turn after = now();
    return {after.transfers - before.transfers, after.bytes - before.bytes};
  }
  // One step, of which `moved` tells that it is done.
  Turn step(const std::function<uint64_t()>& moved) {
    const uint64_t done = moved();
    const Turn before = now();
    clock_.advance_to(clock_.now_ns() + 100'000'000'000'000);
    for (int i = 0; moved() == done && i < 60'000; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_NE(moved(), done) << "no step";
    return since(before);
  }
  // A commit of so many writes of two blocks each, of any row and stripe.
  void update_many(uint64_t nth, size_t writes) {
    const uint64_t places = content_.size() / kBlock - 1;
    Bytes from = pattern(2 * kBlock, nth);
    auto change = std::move(*store_->begin());
    for (size_t i = 0; i < writes; ++i) {
      const uint64_t at = (nth * writes + i) * 7919 % places * kBlock;
      ASSERT_OK(change->write("a", at, slice_of(from)).wait());
      std::memcpy(content_.data() + at, from.data(), from.size());
    }
    ASSERT_OK(change->commit(Durability::durable).wait());
  }
  CodedStore& store() { return *store_; }
  CodedWorld& world() { return world_; }
  const Bytes& content() const { return content_; }

 private:
  static CodedWorldOptions options(VirtualClock& clock, bool background) {
    clock.advance_to(1'000'000'000);
    CodedWorldOptions options = quiet(6, 3);
    options.background = background;
    options.clock = &clock;
    options.latency_ns = 1'000'000;
    options.fold_rate = options.repair_rate = 1024;
    return options;
  }
  VirtualClock clock_;
  CodedWorld world_;
  std::unique_ptr<CodedStore> store_;
  Bytes content_;
};

TEST_F(CodedTurn, AStepOfAFoldIsShort) {
  fill();
  for (uint64_t i = 0; i < 300; ++i) update_once(i);
  const auto folds = [this] { return store().health().folds; };
  const Turn before = now();
  const auto done = store().drain();
  while (folds() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  Turn turn = since(before);
  size_t steps = 1;
  while (store().health().newer_blocks > kRowsAStep) {
    EXPECT_LE(turn.us(kDisks), kStepUs) << turn.transfers << " " << turn.bytes;
    turn = step(folds);
    ++steps;
  }
  EXPECT_GE(steps, 300 / kRowsAStep);
}

TEST_F(CodedTurn, AStepOfARepairIsShort) {
  fill();
  lose_a_disk();
  const auto rebuilt = [this] { return store().health().rebuilt_bytes; };
  const Turn before = now();
  const auto done = store().repair();
  while (rebuilt() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  Turn turn = since(before);
  for (size_t steps = 0; steps < 5; ++steps) {
    EXPECT_LE(turn.us(kDisks), kStepUs) << turn.transfers << " " << turn.bytes;
    turn = step(rebuilt);
  }
}

// Nothing folds by itself here, so a commit finds the log full now and then. It waits for a part of
// what is in it.
TEST_F(CodedTurn, ACommitThatFindsTheLogFullWaitsForWhatItNeeds) {
  fill();
  Turn longest;
  uint64_t waited = 0;
  for (uint64_t i = 0; i < 6'000; ++i) {
    const uint64_t folds = store().health().awaited_folds;
    const Turn before = now();
    ASSERT_NO_FATAL_FAILURE(update_once(i));
    const Turn turn = since(before);
    if (store().health().awaited_folds == folds) continue;
    ++waited;
    if (turn.us(kDisks) > longest.us(kDisks)) longest = turn;
  }
  EXPECT_GT(waited, 0U);
  EXPECT_LE(longest.us(kDisks), kCommitUs) << longest.transfers << " " << longest.bytes;
}

// The clock stands still, so the rate lets nothing go on but what each batch has to wait for.
class CodedTurnBeside : public CodedTurn {
 protected:
  CodedTurnBeside() : CodedTurn(true) {}
};

// Many commits, each of a few or of many blocks, by one who waits for each: what is folded beside
// them keeps room in the log, a step behind each commit.
TEST_F(CodedTurnBeside, NoCommitWaitsForMoreThanAStepOfAFold) {
  fill();
  Turn longest;
  uint64_t most = 0;
  for (uint64_t i = 0; i < 150; ++i) {
    const uint64_t folds = store().health().folds;
    const Turn before = now();
    ASSERT_NO_FATAL_FAILURE(update_many(i, i % 20 == 0 ? 32 : 16));
    const Turn turn = since(before);
    if (turn.us(kDisks) > longest.us(kDisks)) longest = turn;
    most = std::max(most, store().health().folds - folds);
  }
  EXPECT_GT(store().health().folds, 0U);
  EXPECT_EQ(store().health().awaited_folds, 0U);
  EXPECT_LE(most, 2 * kStripes) << "stripes of the step before it, and of its own";
  EXPECT_LE(longest.us(kDisks), 2 * kStepUs + kStepUs) << longest.transfers << " " << longest.bytes;
  EXPECT_EQ(read_all(store(), "a"), content());
}

}  // namespace
}  // namespace stoker::coded
