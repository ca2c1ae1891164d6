// The rates of what goes on in the background, over a clock that stands still until a test moves it. What may move in no time is a first step, however
// often there is a chance; with time so much more as the rate says. Bytes are those of the Loop's class of the background.
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <thread>

#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

constexpr uint64_t kRate = 8 << 20;                           // bytes a second
constexpr uint64_t kStep = 512 << 10;                         // that a step of repair moves at most, here
constexpr auto kWhile = std::chrono::milliseconds(300);       // of real time, in which all of it would be done

class Rated {
 public:
  explicit Rated(CodedWorldOptions options, uint32_t chunk_bytes = 64 << 10) : chunk_bytes_(chunk_bytes), world_(with(std::move(options), clock_)) {}
  void open(const std::vector<std::string>& replaced = {}) {
    store_.reset();
    StoreOptions options;
    options.create = replaced.empty();
    options.replace = replaced;
    options.capacity_bytes = uint64_t{64} * chunk_bytes_;
    options.chunk_bytes = chunk_bytes_;
    options.objects_max = 64;
    store_ = std::move(*world_.open_coded(options));
    moved_ = moved_in_all();
    began_ns_ = clock_.now_ns();
  }
  // A store of 12 stripes whose second disk is a new one.
  void open_with_a_new_disk() {
    open();
    content_ = put(*store_, "a", 12 * 4 * 64 * kKiB, 1);
    other_ = put(*store_, "other", 4096, 2);
    store_.reset();
    world_.disk().remove(world_.paths()[1]);
    open({world_.paths()[1]});
  }
  // Commits are served one by one, and after each there is a chance for one step of what goes on in the background.
  void use(int commits) {
    for (int i = 0; i < commits; ++i) update(*store_, "other", other_, 0, 4096, static_cast<uint64_t>(i));
  }
  void pass(std::chrono::nanoseconds time) { clock_.advance_to(clock_.now_ns() + static_cast<uint64_t>(time.count())); }
  uint64_t moved() { return moved_in_all() - moved_; }
  // By the rate, since it was opened.
  uint64_t allowed() { return kRate / 10 + static_cast<uint64_t>(static_cast<double>(clock_.now_ns() - began_ns_) / 1e9 * kRate); }
  // Time passes until it is done.
  void await(const std::function<bool()>& done) {
    for (int i = 0; !done(); ++i) {
      ASSERT_LT(i, 60'000) << "it does not end";
      pass(std::chrono::milliseconds(5));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  bool whole() { return read_all(*store_, "a") == content_; }
  CodedStore& store() { return *store_; }
  std::unique_ptr<CodedStore>& opened() { return store_; }
  CodedWorld& world() { return world_; }
  VirtualClock& clock() { return clock_; }
  Bytes& content() { return content_; }

 private:
  static CodedWorldOptions with(CodedWorldOptions options, VirtualClock& clock) {
    clock.advance_to(1'000'000'000);
    options.clock = &clock;
    return options;
  }
  uint64_t moved_in_all() {
    const ClassCounters& counters = world_.runtime().loop().counters(Priority::scrub);
    return counters.bytes_read.get() + counters.bytes_written.get();
  }
  const uint32_t chunk_bytes_;
  VirtualClock clock_;
  CodedWorld world_;
  std::unique_ptr<CodedStore> store_;
  Bytes content_, other_;
  uint64_t moved_ = 0, began_ns_ = 0;
};

TEST(CodedRate, RepairKeepsToItWhileOthersCommitAndToNoneWhenNobodyDoes) {
  CodedWorldOptions options = quiet(4, 2);
  options.busy_repair_rate = kRate;
  Rated run(options);
  run.open_with_a_new_disk();
  run.use(1);
  const auto done = run.store().repair();
  run.use(40);
  EXPECT_GT(run.moved(), 0U);
  EXPECT_LE(run.moved(), kStep) << "in no time";
  for (int i = 0; i < 10; ++i) {
    run.pass(std::chrono::milliseconds(20));
    run.use(5);
    EXPECT_LE(run.moved(), run.allowed() + kStep);
  }
  EXPECT_GE(run.moved() + kStep, kRate / 5) << "what 200 ms allow is used";
  EXPECT_FALSE(done.ready());
  run.pass(std::chrono::seconds(1));
  EXPECT_OK(done.wait()) << "and the clock stands still";
  EXPECT_TRUE(run.store().health().troubles.empty());
  EXPECT_TRUE(run.whole());
}

TEST(CodedRate, RepairKeepsToItWhileOthersOnlyRead) {
  CodedWorldOptions options = quiet(4, 2);
  options.busy_repair_rate = kRate;
  Rated run(options);
  run.open_with_a_new_disk();
  Bytes into(4096);
  ASSERT_OK(run.store().read("a", 0, slice_of(into), {}).wait());
  const auto done = run.store().repair();
  EXPECT_FALSE(done.wait_for(kWhile));
  EXPECT_LE(run.moved(), kStep);
  run.pass(std::chrono::seconds(1));
  EXPECT_OK(done.wait());
}

TEST(CodedRate, RepairKeepsToTheRateThatItWasGivenWhenNobodyUsesTheStoreToo) {
  constexpr uint64_t kAdmission = 1 << 20;  // the log and the table of the new disk, at once
  CodedWorldOptions options = quiet(4, 2);
  options.repair_rate = kRate;
  options.segment_bytes = 128 << 10;
  options.segments = 4;
  Rated run(options);
  run.open_with_a_new_disk();
  const auto done = run.store().repair();
  EXPECT_FALSE(done.wait_for(kWhile));
  EXPECT_LE(run.moved(), kStep);
  run.await([&] {
    EXPECT_LE(run.moved(), run.allowed() + kStep + kAdmission);
    return done.ready();
  });
  EXPECT_OK(done.wait());
  EXPECT_TRUE(run.whole());
}

// A large chunk is rebuilt piece by piece, as commits wait for a step; what is folded meanwhile into its stripe is on the new disk too.
TEST(CodedRate, AStepOfARepairIsAPieceOfALargeChunk) {
  CodedWorldOptions options = quiet(2, 1);
  options.repair_rate = 16 * kRate;
  for (const bool folded : {false, true}) {
    Rated run(options, 4 << 20);
    run.open();
    run.content() = put(run.store(), "a", 8 << 20, 1);
    run.opened().reset();
    run.world().disk().remove(run.world().paths()[1]);
    run.open({run.world().paths()[1]});
    const auto done = run.store().repair();
    EXPECT_FALSE(done.wait_for(kWhile));
    EXPECT_GT(run.moved(), 0U);
    EXPECT_LE(run.moved(), 5U << 20) << "of 16 MiB";
    if (folded) {
      update(run.store(), "a", run.content(), 0, 4096, 2);
      update(run.store(), "a", run.content(), (8 << 20) - 8192, 4096, 3);
      ASSERT_OK(run.store().fold_all().wait());
    }
    run.await([&] { return done.ready(); });
    EXPECT_OK(done.wait());
    EXPECT_TRUE(run.store().health().troubles.empty());
    run.opened().reset();
    for (const size_t lost : {0U, 2U}) {
      const SimImage image = run.world().disk().image(run.world().paths()[lost]);
      run.world().disk().remove(run.world().paths()[lost]);
      EXPECT_EQ(read_all(**run.world().open_small(true, 4 << 20), "a"), run.content()) << folded << lost;
      run.world().disk().put(run.world().paths()[lost], image);
    }
  }
}

// Asked for, it is as a repair; by itself it has a rate of its own.
TEST(CodedRate, ScrubAndPatrolKeepToTheirs) {
  constexpr uint64_t kPiece = 1280 << 10;  // of a log at most, or a chunk with what it is decoded from
  CodedWorldOptions options = quiet(4, 2);
  options.repair_rate = kRate;
  Rated asked(options);
  asked.open_with_a_new_disk();
  const auto scrubbed = std::make_shared<ScrubReport>();
  const auto done = asked.store().scrub(scrubbed);
  EXPECT_FALSE(done.wait_for(kWhile));
  EXPECT_LE(asked.moved(), kPiece);
  asked.opened().reset();  // ends it

  options.repair_rate = 0;
  options.background = true;
  options.scrub_rate = kRate;
  Rated alone(options);
  alone.open();
  put(alone.store(), "other", 4096, 2);
  Bytes bytes = pattern(4096, 1);
  const auto use = [&] { update(alone.store(), "other", bytes, 0, 4096, 3); };
  for (int i = 0; i < 40; ++i) use();
  EXPECT_GT(alone.moved(), 0U);
  EXPECT_LE(alone.moved(), kPiece);
  for (int i = 0; i < 40; ++i) {
    alone.pass(std::chrono::milliseconds(20));
    for (int j = 0; j < 2; ++j) use();
    EXPECT_LE(alone.moved(), alone.allowed() + kPiece);
  }
  EXPECT_GE(alone.moved() + kPiece, kRate / 2) << "what 800 ms allow is used, but for chances that did not come";
}

// Commits without a pause, by one who waits for each: the log is folded beside them, and none of them finds it full.
TEST(CodedRate, FoldsBesideSteadyCommitsKeepRoomInTheLog) {
  for (const bool scattered : {false, true}) {
    CodedWorldOptions options;  // with a background
    options.segment_bytes = 256 << 10;
    CodedWorld world(options);
    auto store = std::move(*world.open_small());
    Bytes content = put(*store, "a", 2'621'440, 1);
    std::mt19937_64 random(5);
    for (uint64_t i = 0; i < 1200; ++i) update(*store, "a", content, (scattered ? random() % 640 : i % 40) * 4096, 4096, i);
    const Health health = store->health();
    EXPECT_GT(health.folds, 5U);
    EXPECT_EQ(health.awaited_folds, 0U) << (scattered ? "scattered" : "hot");
    EXPECT_EQ(read_all(*store, "a"), content);
  }
}

// Beside commits: a first step, and more only with time.
TEST(CodedRate, FoldsBesideCommitsKeepToIt) {
  CodedWorldOptions options;
  options.segment_bytes = 256 << 10;
  options.busy_fold_rate = kRate;
  Rated run(options);
  run.open();
  run.content() = put(run.store(), "a", 2'621'440, 1);
  uint64_t next = 0;
  const auto use = [&](uint64_t commits) {
    for (uint64_t i = 0; i < commits; ++i, ++next) update(run.store(), "a", run.content(), next % 640 * 4096, 4096, next);
  };
  while (run.store().health().folds == 0) {
    ASSERT_LT(next, 1000U) << "the log is full by now";
    use(1);
  }
  const uint64_t first = run.store().health().folds;
  EXPECT_LE(first, 8U);
  use(30);
  EXPECT_EQ(run.store().health().folds, first);
  EXPECT_EQ(run.store().health().awaited_folds, 0U);
  for (int i = 0; i < 20 && run.store().health().folds == first; ++i) {  // an image of the table may come before it
    run.pass(std::chrono::seconds(1));
    use(1);
  }
  EXPECT_GT(run.store().health().folds, first);
  EXPECT_TRUE(run.whole());
}

// What nobody is going to rewrite is folded when nobody commits; but at the rate, as long as others are at work.
TEST(CodedRate, FoldsWhenNobodyCommitsKeepToItToo) {
  CodedWorldOptions options;
  options.busy_fold_rate = kRate;
  Rated run(options);
  run.open();
  constexpr size_t kStripe = 4 * 64 * kKiB;
  run.content() = put(run.store(), "a", 6 * kStripe, 1);
  {
    auto change = std::move(*run.store().begin());
    ASSERT_OK(change->expect("a", Class::read_only));
    ASSERT_OK(change->commit(Durability::durable).wait());
  }
  for (size_t i = 0; i < 6; ++i) update(run.store(), "a", run.content(), i * kStripe, 4096, 10 + i);
  std::this_thread::sleep_for(kWhile);  // it begins after 100 ms
  EXPECT_LE(run.store().health().folds, 1U) << "the clock stands still, so it was used just now";
  run.await([&] { return run.store().health().newer_blocks == 0; });
  EXPECT_EQ(run.store().health().folds, 6U);
  EXPECT_TRUE(run.whole());
}

class Drained : public ::testing::Test {
 protected:
  static CodedWorldOptions options(uint64_t fold_rate) {
    CodedWorldOptions options = quiet(4, 2);
    options.fold_rate = fold_rate;
    return options;
  }
  // 600 blocks in the logs, of 10 stripes: several steps.
  static void fill(Rated& run) {
    run.open();
    run.content() = put(run.store(), "a", 2'621'440, 1);
    for (size_t i = 0; i < 20; ++i) update(run.store(), "a", run.content(), i * 32 * 4096, 30 * 4096, 10 + i);
  }
};

TEST_F(Drained, InStepsAtTheRateOfFolds) {
  Rated run(options(4 * kRate));
  fill(run);
  const auto done = run.store().drain();
  EXPECT_FALSE(done.wait_for(kWhile));
  EXPECT_GT(run.store().health().newer_blocks, 300U);
  update(run.store(), "a", run.content(), 0, 4096, 77);  // does not wait for it
  run.await([&] { return done.ready(); });
  EXPECT_OK(done.wait());
  EXPECT_LE(run.store().health().newer_blocks, 1U) << "what came meanwhile may stay";
  EXPECT_TRUE(run.whole());
}

// The last thing that `stoker repair --rate` does is to fold what is in the log.
TEST_F(Drained, ByARepairAtTheRateOfTheRepair) {
  Rated run(options(0));
  fill(run);
  run.opened().reset();
  CodedOptions coded;
  coded.files = false;
  coded.clock = &run.clock();
  RepairOptions repair;
  repair.rate = 4 * kRate;
  auto repaired = std::async(std::launch::async, [&] { return repair_coded_store({4, 2, run.world().paths()}, run.world().runtime().runtime(), repair, coded); });
  EXPECT_EQ(repaired.wait_for(2 * kWhile), std::future_status::timeout);
  run.await([&] { return repaired.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
  const auto report = repaired.get();
  ASSERT_OK(report);
  EXPECT_TRUE(report->problems.empty());
  run.open();
  EXPECT_EQ(run.store().health().newer_blocks, 0U);
  EXPECT_TRUE(run.whole());
}

}  // namespace
}  // namespace stoker::coded
