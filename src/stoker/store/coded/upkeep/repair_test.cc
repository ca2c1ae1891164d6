// What a repair reads, writes and flushes, counted; that it keeps to the cap on memory; and that
// neither it nor a reader waits for the slowest shard where others will do.
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>

#include "stoker/base/log.h"
#include "stoker/store/coded/upkeep/trouble.h"
#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

constexpr uint32_t kChunk = 64 << 10;  // of 16 rows, whose header is one page, twice
constexpr size_t kPages = 2 * kBlock;
// nothing here takes that, but what waits for ever
constexpr auto kLong = std::chrono::seconds(60);

// A store of one object of so many stripes, at rest, whose second disk is a new one.
class NewDisk {
 public:
  NewDisk(size_t k, size_t m, size_t stripes, CodedWorldOptions options,
          uint32_t chunk_bytes = kChunk)
      : world_(with(std::move(options), k, m)), k_(k), m_(m), chunk_bytes_(chunk_bytes) {
    auto store = std::move(*world_.open_small(false, chunk_bytes_));
    content_ = put(*store, "a", stripes * k * chunk_bytes_, 1);
    store.reset();
    world_.disk().remove(world_.paths()[1]);
  }
  static CodedWorldOptions timed() {
    CodedWorldOptions options = quiet(4, 2);
    options.latency_ns = 1'000'000;
    return options;
  }
  void open(bool replacing = true) {
    StoreOptions options;
    if (replacing) options.replace = {world_.paths()[1]};
    store_ = std::move(*world_.open_coded(options));
  }
  void repair() {
    ASSERT_OK(store_->repair().wait());
    ASSERT_TRUE(store_->health().troubles.empty());
  }
  // Also without as many others as may be lost.
  ::testing::AssertionResult whole() {
    store_.reset();
    for (size_t i = 0; i < m_; ++i)
      world_.disk().remove(world_.paths()[2 * i + 2 < k_ + m_ ? 2 * i + 2 : 0]);
    open(false);
    return read_all(*store_, "a") == content_ ? ::testing::AssertionSuccess()
                                              : ::testing::AssertionFailure() << "other bytes";
  }
  CodedWorld& world() { return world_; }
  CodedStore& store() { return *store_; }
  void close() { store_.reset(); }
  SimDisk& disk() { return world_.disk(); }
  Budget& budget() { return world_.runtime().budget(); }
  const std::string& slow() { return world_.paths()[0]; }
  const Bytes& content() const { return content_; }

 private:
  static CodedWorldOptions with(CodedWorldOptions options, size_t k, size_t m) {
    options.k = k;
    options.m = m;
    return options;
  }
  CodedWorld world_;
  const size_t k_, m_;
  const uint32_t chunk_bytes_;
  std::unique_ptr<CodedStore> store_;
  Bytes content_;
};

struct Cost {
  uint64_t read = 0, written = 0, flushes = 0, waits = 0;
};

// Of the repair of so many stripes.
Cost cost_of(size_t k, size_t m, size_t stripes) {
  NewDisk run(k, m, stripes, NewDisk::timed());
  run.open();
  const ClassCounters& counters = run.world().runtime().loop().counters(Priority::scrub);
  const Cost before{counters.bytes_read.get(), counters.bytes_written.get(), 0,
                    run.world().waits()};
  run.disk().start_recording();
  run.repair();
  const auto events = run.disk().stop_recording();
  const auto flushes = std::count_if(events.begin(), events.end(), [](const SimEvent& event) {
    return event.kind == SimEvent::Kind::flush;
  });
  const Cost cost{counters.bytes_read.get() - before.read,
                  counters.bytes_written.get() - before.written, static_cast<uint64_t>(flushes),
                  run.world().waits() - before.waits};
  EXPECT_TRUE(run.whole());
  return cost;
}

class CodedRepairCost : public ::testing::TestWithParam<std::pair<size_t, size_t>> {};

// For each stripe: the headers of those that are left, the new disk's own (blank) pages and not its
// blocks, one chunk more than decoding takes where there is one; the chunk is written, and its page
// twice. Headers, pages, chunks, and the two writes: five transfers long, at most. All flushes
// belong to the admission.
TEST_P(CodedRepairCost, OfAStripe) {
  const auto [k, m] = GetParam();
  const Cost few = cost_of(k, m, 3);
  const Cost many = cost_of(k, m, 9);
  const size_t left = k + m - 1;
  EXPECT_EQ(many.read - few.read, 6 * (left * kPages + kPages + std::min(k + 1, left) * kChunk));
  EXPECT_EQ(many.written - few.written, 6 * (kChunk + kPages));
  EXPECT_EQ(many.flushes, few.flushes);
  EXPECT_LE(many.waits, few.waits + 9 * 5);  // stripes are rebuilt beside each other, or not
}

INSTANTIATE_TEST_SUITE_P(Codes, CodedRepairCost,
                         ::testing::Values(std::pair<size_t, size_t>{2, 1},
                                           std::pair<size_t, size_t>{4, 2},
                                           std::pair<size_t, size_t>{6, 3}),
                         [](const auto& test) {
                           return std::to_string(test.param.first) + "_" +
                                  std::to_string(test.param.second);
                         });

// A chunk of 256 rows is read in four parts, one of which is on its way while the one before it is
// decoded and written.
TEST(CodedRepair, ALargeChunkIsReadAndWrittenInPartsAndOnce) {
  constexpr uint32_t kLarge = 1 << 20;
  NewDisk run(4, 2, 2, NewDisk::timed(), kLarge);
  run.open();
  const ClassCounters& counters = run.world().runtime().loop().counters(Priority::scrub);
  const uint64_t waits = run.world().waits();
  const uint64_t read = counters.bytes_read.get();
  run.disk().start_recording();
  run.repair();
  size_t written = 0;
  for (const SimEvent& event : run.disk().stop_recording())
    written += event.kind == SimEvent::Kind::write && event.bytes->size() == 64 * kBlock ? 1 : 0;
  EXPECT_EQ(written, 2U * 4);
  EXPECT_GE(counters.bytes_read.get() - read, 2 * 5 * kLarge);
  EXPECT_LE(run.world().waits() - waits, 2U * (3 + 8) + 40) << "and the admission";
  EXPECT_TRUE(run.whole());
}

// A block of a live shard that is found bad is written, and flushed, and nothing else is.
TEST(CodedRepair, AMendedBlockIsFlushed) {
  CodedWorld world(quiet(4, 2));
  auto store = std::move(*world.open_small());
  world.disk().start_recording();
  const Bytes content = put(*store, "a", 4 * kChunk, 1);
  std::string path;
  for (const SimEvent& event : world.disk().stop_recording()) {
    if (event.kind != SimEvent::Kind::write || event.bytes->size() != kChunk ||
        std::memcmp(event.bytes->data(), content.data(), kChunk) != 0)
      continue;
    path = event.path;
    world.disk().flip(path, event.offset + 5 * kBlock + 77, 3);
  }
  ASSERT_FALSE(path.empty());
  EXPECT_EQ(read_all(*store, "a"), content);
  world.disk().start_recording();
  ASSERT_OK(store->repair().wait());
  const auto events = world.disk().stop_recording();
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].kind, SimEvent::Kind::write);
  EXPECT_EQ(events[0].bytes->size(), kBlock);
  EXPECT_EQ(events[1].kind, SimEvent::Kind::flush);
  EXPECT_EQ(events[0].path, path);
  EXPECT_EQ(store->health().mended_blocks, 1U);
}

// Reads of one disk do not end. Those that wait for nothing else end all the same; what is left
// behind keeps its memory, which is of the cap, and no more is asked of that disk once two of its
// reads are late.
class SlowDisk : public ::testing::Test {
 protected:
  static constexpr uint64_t kRows = 6 * kChunk;  // all chunks of the rows that are decoded at once
  static constexpr uint64_t kCap = 1 << 30;
  static constexpr size_t kStripes = 10;
  static constexpr size_t kStripesAtOnce = 4;  // by a repair
  static CodedWorldOptions options() {
    CodedWorldOptions options = quiet(4, 2);
    options.budget_bytes = kCap;
    return options;
  }
  SlowDisk() : run_(4, 2, kStripes, options()) {}
  ~SlowDisk() override { run_.disk().let_go(run_.slow()); }
  void open(bool replacing) {
    run_.open(replacing);
    used_ = run_.budget().used() + headers();
  }
  uint64_t headers() { return kStripes * headers_bytes(run_.store().shape()); }
  void hold() {
    EXPECT_EQ(read_all(run_.store(), "a"), run_.content());  // with all headers
    // what came last by chance
    while (run_.budget().used() != used_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    run_.disk().hold_reads(run_.slow());
  }
  // Two, and those that began before these were late.
  void expect_late(size_t most) {
    const size_t late = run_.disk().held(run_.slow());
    EXPECT_GE(late, 2U);
    EXPECT_LE(late, most);
    EXPECT_EQ(run_.budget().used() - used_, late * kRows);
  }
  // Closing waits for what was left behind.
  void close() {
    auto closed = std::async(std::launch::async, [&] { run_.close(); });
    EXPECT_EQ(closed.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
    run_.disk().let_go(run_.slow());
    closed.wait();
    EXPECT_LE(run_.budget().used(), used_);
  }
  NewDisk run_;
  uint64_t used_ = 0;
};

TEST_F(SlowDisk, ARepairDoesNotWaitForIt) {
  open(true);
  hold();
  const auto repaired = run_.store().repair();
  ASSERT_TRUE(repaired.wait_for(kLong));
  EXPECT_OK(repaired.wait());
  EXPECT_TRUE(run_.store().health().troubles.empty());
  EXPECT_EQ(run_.store().health().rebuilt_bytes, 10U * kChunk);
  expect_late(kStripesAtOnce);
  close();
  EXPECT_TRUE(run_.whole());
}

// As nobody else uses the store: a disk has so many requests, for the headers of as many stripes.
TEST_F(SlowDisk, ARepairAsksForSeveralStripesAtOnce) {
  run_.open(true);
  run_.disk().hold_reads(run_.slow());
  const auto repaired = run_.store().repair();
  for (int i = 0; i < 5000 && run_.disk().held(run_.slow()) < kStripesAtOnce; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(run_.disk().held(run_.slow()), kStripesAtOnce);
  run_.disk().let_go(run_.slow());
  EXPECT_OK(repaired.wait());
  EXPECT_EQ(run_.store().health().rebuilt_bytes, kStripes * kChunk);
  EXPECT_TRUE(run_.whole());
}

TEST_F(SlowDisk, AReadThatDecodesDoesNotWaitForIt) {
  open(false);
  Bytes into(kChunk);
  const auto read = [&](size_t chunk) {
    return run_.store().read("a", chunk * kChunk, slice_of(into), {});
  };
  std::vector<size_t> decoded;
  for (size_t chunk = 0; chunk < 4 * 10; ++chunk) {
    const uint64_t before = run_.store().health().decoded_blocks;
    ASSERT_OK(read(chunk).wait());
    if (run_.store().health().decoded_blocks > before) decoded.push_back(chunk);
  }
  ASSERT_GT(decoded.size(), 2U) << "two are late, and then no more is asked";
  hold();
  for (const size_t chunk : decoded) {
    const auto done = read(chunk);
    ASSERT_TRUE(done.wait_for(kLong)) << chunk;
    ASSERT_OK(done.wait());
    ASSERT_EQ(std::memcmp(into.data(), run_.content().data() + chunk * kChunk, kChunk), 0);
  }
  expect_late(2);
  close();
}

// What they hold of the cap comes back by itself.
TEST_F(SlowDisk, AFoldThatFindsNoMemoryWaitsForTheReadsThatWereLeftBehind) {
  open(true);
  Bytes content = run_.content();
  update(run_.store(), "a", content, 0, kBlock, 7);
  const uint64_t used = run_.budget().used() + headers();
  EXPECT_EQ(read_all(run_.store(), "a"), content);
  while (run_.budget().used() != used) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  run_.disk().hold_reads(run_.slow());
  ASSERT_OK(run_.store().repair().wait());
  ASSERT_GE(run_.disk().held(run_.slow()), 2U);
  {
    const Grant others = std::move(*run_.budget().take(kCap - run_.budget().used(), "a test"));
    const auto folded = run_.store().fold_all();
    EXPECT_FALSE(folded.wait_for(std::chrono::milliseconds(100)));
    run_.disk().let_go(run_.slow());
    EXPECT_OK(folded.wait());
  }
  EXPECT_EQ(run_.store().health().newer_blocks, 0U);
  EXPECT_EQ(read_all(run_.store(), "a"), content);
}

// Or others who go on leaving some behind would keep it waiting for ever.
TEST(CodedStragglers, WhoWaitsIsToldOfTheFirstThatComes) {
  Stragglers stragglers;
  EXPECT_FALSE(stragglers.await());
  stragglers.left(0);
  stragglers.left(1);
  auto waiting = std::async(std::launch::async, [&] { return stragglers.await(); });
  EXPECT_EQ(waiting.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  stragglers.came(1);
  EXPECT_EQ(waiting.wait_for(kLong), std::future_status::ready);
  stragglers.came(0);
  EXPECT_TRUE(waiting.get());
  EXPECT_FALSE(stragglers.await());
}

// With two disks away it takes all that are left: the slow one is waited for, and nothing is lost
// or given up.
TEST_F(SlowDisk, WhereItTakesTheSlowOneItIsWaitedFor) {
  run_.disk().remove(run_.world().paths()[3]);
  open(true);
  hold();
  const auto repaired = run_.store().repair();
  EXPECT_FALSE(repaired.wait_for(std::chrono::milliseconds(200)));
  run_.disk().let_go(run_.slow());
  EXPECT_OK(repaired.wait());
  EXPECT_EQ(run_.store().health().troubles.size(), 1U);
  EXPECT_EQ(read_all(run_.store(), "a"), run_.content());
}

// One that is wrong counts for nothing: the spare one takes its place, and what was good is not
// made anew from it.
TEST(CodedRepair, AWrongBlockAmongThoseReadIsAnErasure) {
  for (size_t flipped = 0; flipped < 6; ++flipped) {
    if (flipped == 1) continue;  // the new one
    NewDisk run(4, 2, 3, quiet(4, 2));
    Bytes head(kBlock);
    run.disk().image(run.world().paths()[0]).read(0, head);
    const Shape shape = (**decode_superblock(head)).shape;
    const std::string path = run.world().paths()[flipped];
    for (size_t slot = 0; slot < shape.slots; ++slot)
      run.disk().flip(path, shape.block_at(slot, 7) + 99, 1);
    run.open();
    ASSERT_OK(run.store().repair().wait());
    EXPECT_TRUE(run.store().health().troubles.empty());
    EXPECT_EQ(run.store().health().lost_chunks, 0U) << flipped;
    EXPECT_EQ(read_all(run.store(), "a"), run.content()) << flipped;
    ASSERT_OK(run.store().scrub(std::make_shared<ScrubReport>()).wait());
    EXPECT_TRUE(run.whole()) << flipped;
  }
}

class RepairMemory : public ::testing::Test {
 protected:
  static constexpr uint64_t kCap = 256 << 20;
  static constexpr uint64_t kRow = 3 * kBlock;  // of 2 + 1
  static CodedWorldOptions options() {
    CodedWorldOptions options = quiet(2, 1);
    options.budget_bytes = kCap;
    return options;
  }
  RepairMemory() : run_(2, 1, 1, options(), 1 << 20) { run_.open(); }
  // All but so much of the cap is taken by somebody else.
  Grant leave(uint64_t bytes) {
    return std::move(*run_.budget().take(kCap - run_.budget().used() - bytes, "a test"));
  }
  uint64_t headers() { return headers_bytes(run_.store().shape()); }  // of its only stripe
  NewDisk run_;
};

TEST_F(RepairMemory, WithoutRoomForARowItSaysSoAndGivesNothingUp) {
  {
    const Grant others = leave(headers() + kRow - 1);
    EXPECT_EQ(code_of(run_.store().repair().wait()), Code::over_budget);
  }
  EXPECT_EQ(run_.store().health().troubles.size(), 1U);
  EXPECT_EQ(run_.store().health().lost_chunks, 0U);
  run_.repair();
  EXPECT_TRUE(run_.whole());
}

TEST_F(RepairMemory, ItKeepsToTheCapHoweverLittleIsLeft) {
  const uint64_t used = run_.budget().used();
  {
    const Grant others = leave(headers() + kRow);
    run_.repair();
  }
  EXPECT_EQ(run_.budget().used(), used + headers());
  EXPECT_TRUE(run_.whole());
}

// Lines of the log that say this.
class LinesOfTheLog final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  std::atomic<int> begun = 0, ended = 0;

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    const std::string_view text(message.payload.data(), message.payload.size());
    if (text.starts_with("folding does not go on")) ++begun;
    if (text.starts_with("folding goes on again")) ++ended;
  }
  void flush_() override {}
};

// Somebody else has what a fold would take, for as long as it is tried again and again.
TEST(CodedTrouble, AFoldThatFindsNoRoomIsToldOnceAndOnceMoreWhenItDoes) {
  constexpr uint64_t kCap = 256 << 20;
  constexpr uint64_t kRow = 5 * kBlock;  // that a fold takes, 2 + 1
  const auto lines = std::make_shared<LinesOfTheLog>();
  log().logger().sinks().push_back(lines);
  {
    CodedWorldOptions options = quiet(2, 1);
    options.background = true;
    options.budget_bytes = kCap;
    CodedWorld world(options);
    auto store = std::move(*world.open_small());
    Budget& budget = world.runtime().budget();
    Bytes content = put(*store, "a", 2 * kChunk, 1);
    auto change = std::move(*store->begin());
    ASSERT_OK(change->expect("a", Class::read_only));  // folded as soon as nobody commits
    ASSERT_OK(change->commit(Durability::durable).wait());
    change.reset();
    Grant others;
    for (uint64_t seed = 2; lines->begun == 0; ++seed) {
      ASSERT_LT(seed, 200U);
      others = Grant();
      update(*store, "a", content, 0, 4096, seed);
      auto taken = budget.take(kCap - budget.used() - kRow + 1, "a test");
      if (!taken) continue;  // a fold took some just then
      others = std::move(*taken);
      for (int i = 0; i < 100 && lines->begun == 0 && store->health().newer_blocks > 0; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(350));  // it is tried each 100 ms
    EXPECT_EQ(lines->begun, 1);
    EXPECT_EQ(lines->ended, 0);
    others = Grant();
    const auto until = std::chrono::steady_clock::now() + kLong;
    while (lines->ended == 0 && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_EQ(store->health().newer_blocks, 0U);
    EXPECT_EQ(read_all(*store, "a"), content);
  }
  EXPECT_EQ(lines->begun, 1);
  EXPECT_EQ(lines->ended, 1);
  log().logger().sinks().pop_back();
}

TEST(CodedTrouble, IsToldWhenItBeginsAndWhenItEnds) {
  Trouble trouble("a test");
  const Error full = fail(Code::over_budget, "there is no room");
  EXPECT_FALSE(trouble.over("all is well"));
  EXPECT_TRUE(trouble.met(full));
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(trouble.met(full));
  EXPECT_TRUE(trouble.met(fail(Code::io, "and it is broken"))) << "another one";
  EXPECT_TRUE(trouble.over("two stripes were folded"));
  EXPECT_FALSE(trouble.over("and more"));
  // It comes and goes: that is not told each time.
  EXPECT_FALSE(trouble.met(fail(Code::io, "and it is broken")));
  EXPECT_FALSE(trouble.over("again"));
  EXPECT_TRUE(trouble.met(full)) << "not the one that was told last";
}

}  // namespace
}  // namespace stoker::coded
