// The rates of what goes on in the background, over a clock that stands still until a test moves
// it. What may move in no time is a first step, however often there is a chance; with time so much
// more as the rate says. Bytes are those that the Loop moved, and not those that were booked.
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <thread>

#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

constexpr uint64_t kRate = 8 << 20;  // bytes a second
// that a step of repair moves at most, here
constexpr uint64_t kStep = 512 << 10;
// that one of a fold does, of four stripes
constexpr uint64_t kFoldStep = 4 << 20;
// of real time, in which all of it would be done
constexpr auto kWhile = std::chrono::milliseconds(300);

class Rated {
 public:
  explicit Rated(CodedWorldOptions options, uint32_t chunk_bytes = 64 << 10, uint32_t stripes = 16)
      : chunk_bytes_(chunk_bytes), stripes_(stripes), world_(with(std::move(options), clock_)) {}
  void open(const std::vector<std::string>& replaced = {}) {
    store_.reset();
    StoreOptions options;
    options.create = replaced.empty();
    options.replace = replaced;
    options.capacity_bytes = uint64_t{4} * stripes_ * chunk_bytes_;
    options.chunk_bytes = chunk_bytes_;
    options.objects_max = 64;
    store_ = std::move(*world_.open_coded(options));
    count_from_here();
  }
  void count_from_here() {
    before_ = so_far();
    began_ns_ = clock_.now_ns();
  }
  // A store with an object of so many stripes, whose second disk is a new one.
  void open_with_a_new_disk(size_t stripes = 12) {
    open();
    content_ = put(*store_, "a", stripes * 4 * 64 * kKiB, 1);
    other_ = put(*store_, "other", 4096, 2);
    store_.reset();
    world_.disk().remove(world_.paths()[1]);
    open({world_.paths()[1]});
  }
  // Commits are served one by one, and after each there is a chance for one step of what goes on in
  // the background.
  void use(int commits) {
    if (other_.empty()) other_ = put(*store_, "other", 4096, 2);
    for (int i = 0; i < commits; ++i)
      update(*store_, "other", other_, 0, 4096, static_cast<uint64_t>(i));
    commits_ += static_cast<uint64_t>(commits);
  }
  void pass(std::chrono::nanoseconds time) {
    clock_.advance_to(clock_.now_ns() + static_cast<uint64_t>(time.count()));
  }
  // Without what is not of the background: the log's frames, also of folds, and images of the
  // table.
  uint64_t moved() { return so_far().background - before_.background; }
  // Without the frames of use(), of two blocks each, in the logs of a data chunk and of its two
  // parities.
  uint64_t moved_by_all() {
    return so_far().all - before_.all - (commits_ - before_.commits) * 3 * 8192;
  }
  // By the rate, since it was opened.
  uint64_t allowed() {
    return kRate / 10 +
           static_cast<uint64_t>(static_cast<double>(clock_.now_ns() - began_ns_) / 1e9 * kRate);
  }
  // Time passes, a twentieth of a second after the other, with chances for some steps behind each;
  // a step moves so much at most. Never is more moved than that and what the rate allows; nor is it
  // less, in the end.
  void keeps_to(uint64_t rate, std::chrono::seconds time, uint64_t step, uint64_t (Rated::*moves)(),
                const std::function<void()>& chances) {
    uint64_t allowed = 0;
    for (std::chrono::milliseconds passed{0}; passed < time;
         passed += std::chrono::milliseconds(50)) {
      pass(std::chrono::milliseconds(50));
      chances();
      allowed = static_cast<uint64_t>(static_cast<double>(clock_.now_ns() - began_ns_) / 1e9 *
                                      static_cast<double>(rate));
      ASSERT_LE((this->*moves)(), allowed + step) << "after " << passed.count() + 50 << " ms";
    }
    EXPECT_GE((this->*moves)() + step, allowed) << "what is allowed is used";
  }
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
  struct Moved {
    uint64_t background, all, commits;
  };
  Moved so_far() {
    Moved moved{0, 0, commits_};
    for (size_t i = 0; i < kPriorities; ++i) {
      const ClassCounters& counters = world_.runtime().loop().counters(static_cast<Priority>(i));
      const uint64_t bytes = counters.bytes_read.get() + counters.bytes_written.get();
      moved.all += bytes;
      if (static_cast<Priority>(i) == Priority::scrub) moved.background = bytes;
    }
    return moved;
  }
  const uint32_t chunk_bytes_, stripes_;
  VirtualClock clock_;
  CodedWorld world_;
  std::unique_ptr<CodedStore> store_;
  Bytes content_, other_;
  Moved before_{};
  uint64_t began_ns_ = 0, commits_ = 0;
};

// Where it would wait for ever it fails.
void ends(const Future<void>& done) {
  ASSERT_TRUE(done.wait_for(std::chrono::minutes(1))) << "it does not end";
  EXPECT_OK(done.wait());
}

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
  ends(done);  // and the clock stands still
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
  ends(done);
}

// To the byte: what is told behind the code in a composition, asked for or by itself. A step is a
// chunk here, which takes what four others hold of it.
TEST(CodedRate, RepairMovesWhatItsRateAllowsBesideCommits) {
  for (const bool asked : {true, false}) {
    CodedWorldOptions options = quiet(4, 2);
    options.background = !asked;
    options.repair_rate = asked ? 0 : kRate;  // it begins before anybody uses the store
    options.rates = "fold=1 repair=8MiB";
    Rated run(options, 64 << 10, 64);
    run.open_with_a_new_disk(48);
    run.use(1);
    run.count_from_here();
    if (asked) static_cast<void>(run.store().repair());
    run.keeps_to(kRate, std::chrono::seconds(2), kStep, &Rated::moved, [&] { run.use(3); });
    EXPECT_FALSE(run.store().health().troubles.empty()) << "it was at work all the time";
  }
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

// A large chunk is rebuilt piece by piece, as commits wait for a step; what is folded meanwhile
// into its stripe is on the new disk too.
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
      EXPECT_EQ(read_all(**run.world().open_small(true, 4 << 20), "a"), run.content())
          << folded << lost;
      run.world().disk().put(run.world().paths()[lost], image);
    }
  }
}

// Asked for, it is as a repair; by itself it has a rate of its own.
TEST(CodedRate, ScrubAndPatrolKeepToTheirs) {
  // of a log at most, or a chunk with what it is decoded from
  constexpr uint64_t kPiece = 1280 << 10;
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
  alone.use(40);
  EXPECT_GT(alone.moved(), 0U);
  EXPECT_LE(alone.moved(), kPiece);
}

// To the byte. A fold of nothing is a chance for a step that moves nothing else of the background,
// and leaves nothing in the logs.
TEST(CodedRate, PatrolMovesWhatItsRateAllows) {
  CodedWorldOptions options;
  options.rates = "scrub=8MiB repair=0";
  options.segment_bytes = 128 << 10;
  options.segments = 4;
  Rated run(options, 64 << 10, 64);
  run.open();
  run.content() = put(run.store(), "a", 48 * 4 * 64 * kKiB, 1);
  run.keeps_to(kRate, std::chrono::seconds(2), 256 << 10, &Rated::moved, [&] {
    for (int i = 0; i < 8; ++i) ASSERT_OK(run.store().fold_all().wait());
  });
}

// While others use the store, what looks by itself keeps to the rate of repairs as well.
TEST(CodedRate, PatrolKeepsToTheRateOfRepairsTooBesideCommits) {
  CodedWorldOptions options;
  options.rates = "scrub=1GiB repair=8MiB";
  Rated run(options);
  run.open();
  run.use(1);
  run.count_from_here();
  run.keeps_to(kRate, std::chrono::seconds(2), 2 << 20, &Rated::moved, [&] { run.use(3); });
}

// Commits without a pause, by one who waits for each: the log is folded beside them, and none of
// them finds it full.
TEST(CodedRate, FoldsBesideSteadyCommitsKeepRoomInTheLog) {
  for (const bool scattered : {false, true}) {
    CodedWorldOptions options;  // with a background
    options.segment_bytes = 256 << 10;
    CodedWorld world(options);
    auto store = std::move(*world.open_small());
    Bytes content = put(*store, "a", 2'621'440, 1);
    std::mt19937_64 random(5);
    for (uint64_t i = 0; i < 1200; ++i)
      update(*store, "a", content, (scattered ? random() % 640 : i % 40) * 4096, 4096, i);
    const Health health = store->health();
    EXPECT_GT(health.folds, 5U);
    EXPECT_EQ(health.awaited_folds, 0U) << (scattered ? "scattered" : "hot");
    EXPECT_EQ(read_all(*store, "a"), content);
  }
}

// However low the rate: before a log is full each batch waits for a step, so that hardly one has to
// wait for all of them.
TEST(CodedRate, CommitsWithoutEndHardlyFindTheLogFull) {
  CodedWorldOptions options;  // with a background
  options.segment_bytes = 256 << 10;
  options.busy_fold_rate = 1;
  CodedWorld world(options);
  auto store = std::move(*world.open_small());
  Bytes content = put(*store, "a", 2'621'440, 1);
  std::mt19937_64 random(5);
  for (uint64_t i = 0; i < 1500; ++i) update(*store, "a", content, random() % 640 * 4096, 4096, i);
  const Health health = store->health();
  EXPECT_GT(health.folds, 50U);
  EXPECT_LT(10 * health.awaited_folds, health.folds);
  EXPECT_EQ(read_all(*store, "a"), content);
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
    for (uint64_t i = 0; i < commits; ++i, ++next)
      update(run.store(), "a", run.content(), next % 640 * 4096, 4096, next);
  };
  while (run.store().health().folds == 0) {
    ASSERT_LT(next, 1000U) << "the log is full by now";
    use(1);
  }
  const uint64_t first = run.store().health().folds;
  EXPECT_LE(first, 8U);
  use(10);
  EXPECT_EQ(run.store().health().folds, first);
  EXPECT_EQ(run.store().health().awaited_folds, 0U);
  // an image of the table may come before it
  for (int i = 0; i < 20 && run.store().health().folds == first; ++i) {
    run.pass(std::chrono::seconds(1));
    use(1);
  }
  EXPECT_GT(run.store().health().folds, first);
  EXPECT_TRUE(run.whole());
}

// What nobody is going to rewrite is folded when nobody commits; but at the rate, as long as others
// are at work.
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
  // 60 blocks of each stripe in the logs: several steps.
  static void fill(Rated& run, size_t stripes = 10) {
    run.open();
    run.content() = put(run.store(), "a", stripes * 64 * 4096, 1);
    for (size_t i = 0; i < 2 * stripes; ++i)
      update(run.store(), "a", run.content(), i * 32 * 4096, 30 * 4096, 10 + i);
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

// To the byte: what is told behind the code in a composition.
TEST_F(Drained, MovesWhatTheRateOfFoldsAllowsBesideCommits) {
  CodedWorldOptions told = options(0);
  told.rates = "repair=1 fold=8MiB";
  Rated run(told, 64 << 10, 32);
  fill(run, 24);
  run.use(1);
  run.count_from_here();
  const auto done = run.store().drain();
  run.keeps_to(kRate, std::chrono::seconds(1), kFoldStep, &Rated::moved_by_all,
               [&] { run.use(3); });
  EXPECT_FALSE(done.ready());
}

// As `stoker repair --rate` does it, of a store that nobody else has open.
Result<RepairReport> repaired(Rated& run) {
  auto done = std::async(std::launch::async, [&run] {
    CodedOptions coded;
    coded.files = false;
    coded.clock = &run.clock();
    RepairOptions repair;
    repair.rate = 4 * kRate;
    return repair_coded_store({4, 2, run.world().paths()}, run.world().runtime().runtime(), repair,
                              coded);
  });
  EXPECT_EQ(done.wait_for(2 * kWhile), std::future_status::timeout);
  run.await([&] { return done.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
  return done.get();
}

TEST(CodedRate, ARepairOfAClosedStoreKeepsToItsRate) {
  Rated run(quiet(4, 2));
  run.open_with_a_new_disk();
  run.opened().reset();
  const auto report = repaired(run);
  ASSERT_OK(report);
  EXPECT_TRUE(report->problems.empty());
  EXPECT_GE(report->rebuilt_bytes, 12 * 64 * kKiB);
}

// The last thing that `stoker repair --rate` does is to fold what is in the log.
TEST_F(Drained, ByARepairAtTheRateOfTheRepair) {
  Rated run(options(0));
  fill(run);
  run.opened().reset();
  const auto report = repaired(run);
  ASSERT_OK(report);
  EXPECT_TRUE(report->problems.empty());
  run.open();
  EXPECT_EQ(run.store().health().newer_blocks, 0U);
  EXPECT_TRUE(run.whole());
}

}  // namespace
}  // namespace stoker::coded
