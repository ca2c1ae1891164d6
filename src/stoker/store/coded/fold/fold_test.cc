// What folds and reads of the logs cost, counted: transfers, and how many of them wait for others.
#include <algorithm>
#include <iterator>
#include <map>
#include <set>

#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

constexpr uint64_t kLatency = 1'000'000;
constexpr uint32_t kFoldChunk = 256 << 10;
constexpr size_t kHot = 16;   // updates of one chunk
constexpr size_t kApart = 3;  // rows from one to the next
// log, bases; stages, FOLD, blocks, pages, table image, each written and flushed
constexpr uint64_t kFoldWaits = 12;

std::set<std::string> disks_of(const std::vector<SimEvent>& events) {
  std::set<std::string> disks;
  for (const SimEvent& event : events) disks.insert(event.path);
  return disks;
}

// One stripe, written and at rest, and where its first chunk is.
class HotStripe {
 public:
  HotStripe(size_t k, size_t m)
      : world_(options(k, m)), store_(std::move(*world_.open_small(false, kFoldChunk))) {
    content_ = put(*store_, "a", k * kFoldChunk, 1);
    world_.disk().start_recording();
    change(0, 4096, 2);
    const auto first = disks_of(world_.disk().stop_recording());
    world_.disk().start_recording();
    change(kFoldChunk, 4096, 3);
    const auto second = disks_of(world_.disk().stop_recording());
    std::set_difference(first.begin(), first.end(), second.begin(), second.end(),
                        std::back_inserter(data_));
    std::set_intersection(first.begin(), first.end(), second.begin(), second.end(),
                          std::back_inserter(parities_));
    EXPECT_EQ(data_.size(), 1U);
    EXPECT_EQ(parities_.size(), m);
    EXPECT_OK(store_->fold_all().wait());
    begin();
  }
  void change(size_t offset, size_t bytes, uint64_t seed) {
    update(*store_, "a", content_, offset, bytes, seed);
  }
  // So many rows of the first chunk, each by a commit of its own; `lost`: the disk of that chunk
  // fails at the last one.
  void heat(bool lost) {
    const size_t troubles = store_->health().troubles.size();
    for (size_t i = 0; i < kHot; ++i) {
      if (lost && i + 1 == kHot) world_.disk().fail_nth(Op::Kind::write, 1, EIO, data());
      change(i * kApart * 4096, 4096, 10 + i);
    }
    EXPECT_EQ(store_->health().troubles.size(), troubles + (lost ? 1 : 0));
    begin();
  }
  // It fails when it should take an update.
  void lose(const std::string& disk) {
    const size_t troubles = store_->health().troubles.size();
    world_.disk().fail_nth(Op::Kind::write, 1, EIO, disk);
    change(kFoldChunk - 4096, 4096, 99);
    EXPECT_EQ(store_->health().troubles.size(), troubles + 1);
    begin();
  }
  void open_again() {
    store_.reset();
    store_ = std::move(*world_.open_small(false, kFoldChunk));
  }
  void begin() {
    reads_ = world_.runtime().loop().counters().reads.get();
    bytes_ = world_.runtime().loop().counters().read_bytes.get();
    waits_ = world_.waits();
  }
  uint64_t reads() { return world_.runtime().loop().counters().reads.get() - reads_; }
  uint64_t blocks_read() {
    return (world_.runtime().loop().counters().read_bytes.get() - bytes_) / 4096;
  }
  uint64_t waits() { return world_.waits() - waits_; }
  // Rows from the first one of the first chunk on.
  ::testing::AssertionResult reads_right(size_t rows) {
    Bytes into(rows * 4096);
    if (const auto read = store_->read("a", 0, slice_of(into), {}).wait(); !read)
      return ::testing::AssertionFailure() << read.error().message();
    return std::equal(into.begin(), into.end(), content_.begin())
               ? ::testing::AssertionSuccess()
               : ::testing::AssertionFailure() << "other bytes";
  }
  bool whole() { return read_all(*store_, "a") == content_; }
  const std::string& data() const { return data_.front(); }
  const std::vector<std::string>& parities() const { return parities_; }
  CodedWorld& world() { return world_; }
  CodedStore& store() { return *store_; }

 private:
  static CodedWorldOptions options(size_t k, size_t m) {
    CodedWorldOptions options = quiet(k, m);
    options.latency_ns = kLatency;
    return options;
  }
  CodedWorld world_;
  std::unique_ptr<CodedStore> store_;
  Bytes content_;
  std::vector<std::string> data_, parities_;
  uint64_t reads_ = 0, bytes_ = 0, waits_ = 0;
};

class CountedFold : public ::testing::TestWithParam<std::pair<size_t, size_t>> {};

TEST_P(CountedFold, OfScatteredRowsReadsTheLogAtOnceAndTheBasesAtOnce) {
  const auto [k, m] = GetParam();
  HotStripe stripe(k, m);
  stripe.heat(false);
  EXPECT_EQ(stripe.store().health().newer_blocks, kHot);
  ASSERT_OK(stripe.store().fold_all().wait());
  EXPECT_EQ(stripe.reads(), kHot * (1 + std::min(1 + m, k - 1)));
  EXPECT_EQ(stripe.waits(), kFoldWaits) << "whatever the number of rows";
  EXPECT_EQ(stripe.store().health().newer_blocks, 0U);
  EXPECT_TRUE(stripe.whole());
}

// The disk of the data went after it had taken the updates: a parity's log has them all, at the
// same cost; new parity comes from the other data.
TEST_P(CountedFold, WithoutTheDiskOfTheDataReadsAParitysLogAtOnce) {
  const auto [k, m] = GetParam();
  HotStripe stripe(k, m);
  stripe.heat(true);
  ASSERT_OK(stripe.store().fold_all().wait());
  EXPECT_EQ(stripe.reads(), kHot * (1 + k - 1));
  EXPECT_EQ(stripe.waits(), kFoldWaits);
  EXPECT_EQ(stripe.store().health().newer_blocks, 0U);
  EXPECT_TRUE(stripe.whole());
}

// All parities of the stripe are away: there is nothing to be computed, only the log to be read.
TEST_P(CountedFold, WithoutAnyParityReadsOnlyTheLog) {
  const auto [k, m] = GetParam();
  HotStripe stripe(k, m);
  for (const std::string& parity : stripe.parities()) stripe.lose(parity);
  stripe.heat(false);
  ASSERT_OK(stripe.store().fold_all().wait());
  EXPECT_EQ(stripe.reads(), kHot + 1) << "and what came while they failed";
  EXPECT_EQ(stripe.store().health().newer_blocks, 0U);
  EXPECT_TRUE(stripe.whole());
  ASSERT_OK(stripe.store().repair().wait());
  EXPECT_TRUE(stripe.store().health().troubles.empty());
  stripe.lose(stripe.data());
  EXPECT_TRUE(stripe.whole()) << "by what the parities got when they came back";
}

INSTANTIATE_TEST_SUITE_P(Codes, CountedFold,
                         ::testing::Values(std::pair<size_t, size_t>{4, 2},
                                           std::pair<size_t, size_t>{6, 3},
                                           std::pair<size_t, size_t>{10, 4}),
                         [](const auto& test) {
                           return std::to_string(test.param.first) + "_" +
                                  std::to_string(test.param.second);
                         });

// Of stripes that nobody has looked at since the store was opened; and they cost one wait more.
TEST(CodedFold, ReadsTheHeadersOfAllItsStripesAtOnce) {
  CodedWorldOptions options = quiet(4, 2);
  options.latency_ns = kLatency;
  CodedWorld world(options);
  constexpr size_t kStripes = 8;
  constexpr size_t kStripe = 4 * 64 * kKiB;
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", kStripes * kStripe, 1);
  }
  auto store = std::move(*world.open_small());
  for (size_t i = 0; i < kStripes; ++i) update(*store, "a", content, i * kStripe, 4096, 10 + i);
  const uint64_t reads = world.runtime().loop().counters().reads.get();
  const uint64_t waits = world.waits();
  ASSERT_OK(store->fold_all().wait());
  EXPECT_EQ(world.waits() - waits, 1 + kFoldWaits);
  EXPECT_EQ(world.runtime().loop().counters().reads.get() - reads, kStripes * (6 + 1 + 3));
  EXPECT_EQ(store->health().folds, kStripes);
  EXPECT_EQ(read_all(*store, "a"), content);
}

// The oldest of the log takes up a whole step and cannot be folded: what comes behind it is, and
// the rest is told.
TEST(CodedFold, WhatCannotBeFoldedIsInTheWayOfNothingElse) {
  for (const bool drained : {false, true}) {
    HotStripe stripe(4, 2);
    stripe.world().disk().start_recording();
    stripe.change(0, kFoldChunk, 5);
    for (const SimEvent& event : stripe.world().disk().stop_recording()) {
      if (event.kind == SimEvent::Kind::write)
        stripe.world().disk().spoil(event.path, event.offset + event.bytes->size() - kFoldChunk);
    }
    Bytes other = put(stripe.store(), "b", 8192, 7);
    update(stripe.store(), "b", other, 4096, 4096, 8);
    ASSERT_EQ(stripe.store().health().newer_blocks, kFoldChunk / 4096 + 1);
    ASSERT_OK((drained ? stripe.store().drain() : stripe.store().fold_all()).wait());
    EXPECT_EQ(stripe.store().health().newer_blocks, kFoldChunk / 4096);
    EXPECT_EQ(stripe.store().health().stuck_stripes, 1U);
    EXPECT_EQ(read_all(stripe.store(), "b"), other);
  }
}

// One update of 40 blocks, and where its blocks lie in the logs.
class LongVal : public ::testing::Test {
 protected:
  static constexpr size_t kRows = 40;
  LongVal() : stripe_(4, 2) {
    stripe_.world().disk().start_recording();
    stripe_.change(0, kRows * 4096, 5);
    for (const SimEvent& event : stripe_.world().disk().stop_recording()) {
      if (event.kind == SimEvent::Kind::write)
        blocks_at_[event.path] = event.offset + event.bytes->size() - kRows * 4096;
    }
    stripe_.begin();
  }
  void spoil(const std::string& path, size_t row) {
    stripe_.world().disk().spoil(path, blocks_at_.at(path) + row * 4096);
  }
  HotStripe stripe_;
  std::map<std::string, uint64_t> blocks_at_;
};

TEST_F(LongVal, IsReadAtOnceFromAParitysLogWhenItsDiskIsLost) {
  EXPECT_TRUE(stripe_.reads_right(kRows));
  EXPECT_EQ(stripe_.reads(), 1U);
  stripe_.lose(stripe_.data());
  EXPECT_TRUE(stripe_.reads_right(kRows));
  EXPECT_EQ(stripe_.reads(), 1U);
  EXPECT_EQ(stripe_.waits(), 1U);
}

TEST_F(LongVal, OnlyWhatIsWrongOfACopyIsReadFromTheNext) {
  stripe_.world().disk().flip(stripe_.data(), blocks_at_.at(stripe_.data()) + 5 * 4096 + 77, 3);
  stripe_.world().disk().flip(stripe_.data(), blocks_at_.at(stripe_.data()) + 9 * 4096, 0);
  EXPECT_TRUE(stripe_.reads_right(kRows));
  EXPECT_EQ(stripe_.reads(), 3U);
  EXPECT_EQ(stripe_.blocks_read(), kRows + 2);
  EXPECT_EQ(stripe_.waits(), 2U);
}

// A bad sector takes the transfer with it: the whole of it from the next copy.
TEST_F(LongVal, WhatCannotBeReadIsReadWholeFromTheNextCopy) {
  spoil(stripe_.data(), 5);
  EXPECT_TRUE(stripe_.reads_right(kRows));
  EXPECT_EQ(stripe_.reads(), 1U) << "that came";
  EXPECT_EQ(stripe_.waits(), 2U);
}

// No copy can be read whole, but each block from some copy.
TEST_F(LongVal, OnlyWhereNoCopyIsWholeItIsReadBlockByBlock) {
  spoil(stripe_.data(), 3);
  for (const std::string& parity : stripe_.parities()) spoil(parity, 7);
  EXPECT_TRUE(stripe_.reads_right(kRows));
  EXPECT_EQ(stripe_.reads(), kRows) << "that came";
  EXPECT_EQ(stripe_.waits(), 3U + 2)
      << "each copy as a whole, then the blocks of the first one, then one of the second";
  for (const std::string& parity : stripe_.parities()) spoil(parity, 3);
  EXPECT_FALSE(stripe_.reads_right(kRows));
  EXPECT_TRUE(stripe_.store().health().troubles.empty());
}

// A disk that is back, with what it missed in a log of its own, is the first place again.
TEST_F(LongVal, IsReadFromItsDiskAgainOnceThatIsBack) {
  stripe_.lose(stripe_.data());
  ASSERT_OK(stripe_.store().repair().wait());
  ASSERT_TRUE(stripe_.store().health().troubles.empty());
  for (const std::string& parity : stripe_.parities()) spoil(parity, 0);
  stripe_.begin();
  EXPECT_TRUE(stripe_.reads_right(kRows));
  EXPECT_EQ(stripe_.waits(), 1U);
}

// The newest of a block is damaged in all logs that had it when a parity comes back: nothing else
// of that stripe is given up for it. What is older is not shown in its place, not after an opening
// either, until something is written there.
TEST(CodedFold, AnUpdateThatNoLogHasKeepsNoShardAway) {
  for (const bool unreadable : {true, false}) {
    HotStripe stripe(4, 2);
    std::map<std::string, uint64_t> at;
    stripe.world().disk().start_recording();
    stripe.change(0, 2 * 4096, 5);
    for (const SimEvent& event : stripe.world().disk().stop_recording()) {
      // of the second block
      if (event.kind == SimEvent::Kind::write)
        at[event.path] = event.offset + event.bytes->size() - 4096;
    }
    stripe.lose(stripe.parities()[0]);
    for (const std::string& path : {stripe.data(), stripe.parities()[1]}) {
      if (unreadable) {
        stripe.world().disk().spoil(path, at.at(path));
      } else {
        stripe.world().disk().flip(path, at.at(path) + 7, 1);
      }
    }
    const auto is_lost = [&] {
      Bytes into(4096);
      EXPECT_TRUE(stripe.reads_right(1)) << "the first block";
      EXPECT_EQ(code_of(stripe.store().read("a", 4096, slice_of(into), {}).wait()),
                Code::corruption);
    };
    ASSERT_OK(stripe.store().repair().wait());
    EXPECT_TRUE(stripe.store().health().troubles.empty());
    is_lost();
    for (int opened = 0; opened < 3; ++opened) {
      stripe.open_again();
      is_lost();
      ASSERT_OK(stripe.store().repair().wait());
      EXPECT_TRUE(stripe.store().health().troubles.empty());
      is_lost();
      const auto report = std::make_shared<ScrubReport>();
      ASSERT_OK(stripe.store().scrub(report).wait());
      EXPECT_FALSE(report->lost.empty()) << "told each time";
    }
    stripe.change(4096, 4096, 6);
    ASSERT_OK(stripe.store().fold_all().wait());
    EXPECT_EQ(stripe.store().health().newer_blocks, 0U);
    EXPECT_TRUE(stripe.whole());
    stripe.open_again();
    EXPECT_TRUE(stripe.whole());
    const auto report = std::make_shared<ScrubReport>();
    ASSERT_OK(stripe.store().scrub(report).wait());
    EXPECT_TRUE(report->lost.empty());
  }
}

}  // namespace
}  // namespace stoker::coded
