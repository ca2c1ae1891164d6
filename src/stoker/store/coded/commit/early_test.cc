// Stripes on their way before their commit, and how few transfers writes and updates take. All of
// it is counted.
#include "stoker/store/coded/commit/early.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

constexpr size_t kK = 2, kM = 1, kN = kK + kM;
constexpr size_t kChunk = 64 * kKiB;
constexpr size_t kStripe = kK * kChunk;

// Writes of whole chunks.
size_t chunks_written(const std::vector<SimEvent>& events) {
  return static_cast<size_t>(std::count_if(events.begin(), events.end(), [](const SimEvent& each) {
    return each.kind == SimEvent::Kind::write && each.bytes->size() == kChunk;
  }));
}

size_t writes(const std::vector<SimEvent>& events) {
  return static_cast<size_t>(std::count_if(events.begin(), events.end(), [](const SimEvent& each) {
    return each.kind == SimEvent::Kind::write;
  }));
}

class CodedEarly : public ::testing::Test {
 protected:
  CodedEarly() : world_(quiet(kK, kM)), store_(std::move(*world_.open_small())) {
    content_ = pattern(3 * kStripe, 7);
    used_ = world_.runtime().budget().used();
  }
  // Piece by piece, and it grows with them, as a file that is read.
  std::unique_ptr<Transaction> write_in_pieces(size_t piece) {
    auto change = std::move(*store_->begin());
    for (size_t at = 0; at < content_.size(); at += piece) {
      const size_t size = std::min(piece, content_.size() - at);
      EXPECT_OK(change->resize("a", at + size));
      EXPECT_OK(change->write("a", at, slice_of(content_).sub(at, size)).wait());
    }
    return change;
  }
  CodedWorld world_;
  std::unique_ptr<CodedStore> store_;
  Bytes content_;
  uint64_t used_ = 0;  // of the cap, by a store at rest
};

TEST_F(CodedEarly, EachChunkIsWrittenOnceAndItsPagesByOneTransfer) {
  for (const size_t piece : {kStripe, kChunk, size_t{24 * kKiB}, size_t{10'000}}) {
    if (piece != kStripe) {
      ASSERT_OK(store_->remove({"a"}));
    }
    world_.disk().start_recording();
    auto change = write_in_pieces(piece);
    ASSERT_OK(change->commit(Durability::durable).wait());
    const auto events = world_.disk().stop_recording();
    EXPECT_EQ(chunks_written(events), 3 * kN) << piece;
    // of each stripe a chunk and its pages on each shard; then a COMMIT on each
    EXPECT_EQ(writes(events), 3 * 2 * kN + world_.paths().size()) << piece;
    EXPECT_EQ(read_all(*store_, "a"), content_) << piece;
  }
}

// The pages of all stripes with their flush; then the COMMIT and its flush.
TEST(CodedEarlyWaits, ACommitOfManyStripesWaitsForFourTransfers) {
  for (const size_t stripes : {2, 8}) {
    CodedWorldOptions options = quiet(4, 2);
    options.latency_ns = 1'000'000;
    CodedWorld world(options);
    auto store = std::move(*world.open_small());
    Bytes content = pattern(stripes * 4 * 64 * kKiB, 1);
    const IoCounters& counters = world.runtime().loop().counters();
    const uint64_t before = counters.written_bytes.get();
    auto change = std::move(*store->begin());
    ASSERT_OK(change->resize("a", content.size()));
    ASSERT_OK(change->write("a", 0, slice_of(content)).wait());
    const uint64_t bytes = before + stripes * 6 * 64 * kKiB;
    for (int i = 0; i < 5000 && counters.written_bytes.get() < bytes; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const uint64_t waits = world.waits();
    ASSERT_OK(change->commit(Durability::durable).wait());
    EXPECT_EQ(world.waits() - waits, 4U) << stripes;
  }
}

// One that the pool encodes.
TEST(CodedEarlyWaits, ALargeStripeIsOnItsWayBeforeItsCommit) {
  CodedWorld world(quiet(2, 1));
  auto store = std::move(*world.open_small(false, kMiB));
  Bytes content = pattern(2 * kMiB, 1);
  const IoCounters& counters = world.runtime().loop().counters();
  const uint64_t before = counters.written_bytes.get();
  auto change = std::move(*store->begin());
  ASSERT_OK(change->resize("a", content.size()));
  ASSERT_OK(change->write("a", 0, slice_of(content)).wait());
  for (int i = 0; i < 5000 && counters.written_bytes.get() < before + 3 * kMiB; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(counters.written_bytes.get() - before, 3 * kMiB);
  ASSERT_OK(change->commit(Durability::durable).wait());
  EXPECT_EQ(read_all(*store, "a"), content);
}

// In memory that a read has left, of whole large pages.
TEST(CodedEarlyWaits, AStripeOfOddChunksIsOnItsWayBeforeItsCommitToo) {
  constexpr uint32_t kOdd = 3 * kMiB;
  CodedWorld world(quiet(2, 1));
  auto store = std::move(*world.open_small(false, kOdd));
  const Bytes first = put(*store, "a", size_t{2} * kOdd, 1);
  EXPECT_EQ(read_all(*store, "a"), first);
  for (uint64_t i = 0; i < 2; ++i) {
    Bytes into(kOdd);
    ASSERT_OK(store->read("a", i * kOdd, slice_of(into), {}).wait());
  }
  Bytes content = pattern(size_t{2} * kOdd, 2);
  const IoCounters& counters = world.runtime().loop().counters();
  const uint64_t before = counters.written_bytes.get();
  auto change = std::move(*store->begin());
  ASSERT_OK(change->resize("b", content.size()));
  ASSERT_OK(change->write("b", 0, slice_of(content)).wait());
  for (int i = 0; i < 5000 && counters.written_bytes.get() < before + uint64_t{3} * kOdd; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(counters.written_bytes.get() - before, uint64_t{3} * kOdd);
  ASSERT_OK(change->commit(Durability::durable).wait());
  EXPECT_EQ(read_all(*store, "b"), content);
}

// The first read of an object brings the headers of the stripes that come next.
TEST(CodedHeadersAhead, AReaderThatGoesOnFindsThem) {
  constexpr size_t kStripes = 8, kChunks = 4, kParities = 2;
  CodedWorld world(quiet(kChunks, kParities));
  auto store = std::move(*world.open_small());
  const Bytes content = put(*store, "a", kStripes * kChunks * kChunk, 1);
  store.reset();
  store = std::move(*world.open_small());
  const Counter& reads = world.runtime().loop().counters().reads;
  const Budget& budget = world.runtime().budget();
  const uint64_t before = reads.get();
  const uint64_t used = budget.used() + kStripes * headers_bytes(store->shape());
  Bytes into(kChunks * kChunk);
  ASSERT_OK(store->read("a", 0, slice_of(into), {}).wait());
  const uint64_t expected = kStripes * kParities + kChunks;
  // read, and kept
  for (int i = 0; i < 5000 && (reads.get() < before + expected || budget.used() != used); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(reads.get() - before, expected);
  EXPECT_EQ(budget.used(), used);
  for (size_t stripe = 1; stripe < kStripes; ++stripe)
    ASSERT_OK(store->read("a", stripe * into.size(), slice_of(into), {}).wait());
  EXPECT_EQ(reads.get() - before, expected + (kStripes - 1) * kChunks);
}

// All chunks of a stripe are looked at in one step, beside each other and beside the next stripe.
TEST(CodedScrubWaits, AStripeWaitsForOneTransferAtMost) {
  const auto waits = [](size_t stripes) {
    CodedWorldOptions options = quiet(4, 2);
    options.latency_ns = 1'000'000;
    CodedWorld world(options);
    auto store = std::move(*world.open_small());
    put(*store, "a", stripes * 4 * kChunk, 1);
    const auto report = std::make_shared<ScrubReport>();
    const uint64_t before = world.waits();
    EXPECT_OK(store->scrub(report).wait());
    EXPECT_EQ(report->chunks, stripes * 6);
    EXPECT_EQ(report->found(), 0U);
    return world.waits() - before;
  };
  // How threads meet adds one now and then: the least of several runs is what it needs.
  const auto least = [&waits](size_t stripes) {
    uint64_t found = waits(stripes);
    for (int i = 1; i < 5; ++i) found = std::min(found, waits(stripes));
    return found;
  };
  EXPECT_LE(least(8), least(2) + 6);
}

TEST_F(CodedEarly, TheCommitFindsTheChunksWritten) {
  auto change = write_in_pieces(kStripe);
  const IoCounters& counters = world_.runtime().loop().counters();
  for (int i = 0; i < 1000 && counters.written_bytes.get() < 3 * kN * kChunk; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  world_.disk().start_recording();
  ASSERT_OK(change->commit(Durability::durable).wait());
  EXPECT_EQ(chunks_written(world_.disk().stop_recording()), 0U);
  EXPECT_EQ(read_all(*store_, "a"), content_);
  change.reset();
  EXPECT_EQ(world_.runtime().budget().used(), used_ + 3 * headers_bytes(store_->shape()));
}

TEST_F(CodedEarly, WhatIsWrittenOverItCountsAndWhatIsAbandonedGivesItsSlotsBack) {
  const uint64_t used = store_->info().used_bytes;
  {
    auto change = write_in_pieces(kStripe);
    Bytes other = pattern(5000, 8);
    std::copy(other.begin(), other.end(), content_.begin() + 1000);
    ASSERT_OK(change->write("a", 1000, slice_of(other)).wait());
    ASSERT_OK(change->commit(Durability::durable).wait());
    EXPECT_EQ(read_all(*store_, "a"), content_);
  }
  ASSERT_OK(store_->remove({"a"}));
  for (int i = 0; i < 20; ++i) write_in_pieces(kStripe);  // more than there is room for, in turn
  for (int i = 0; i < 1000 && store_->info().used_bytes != used; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(store_->info().used_bytes, used);
}

TEST_F(CodedEarly, WhatFailedOnItsWayIsWrittenAgain) {
  world_.disk().fail_nth(Op::Kind::write, 2, EIO, world_.paths()[1]);
  ASSERT_OK(write_in_pieces(kStripe)->commit(Durability::durable).wait());
  EXPECT_EQ(read_all(*store_, "a"), content_);
  EXPECT_EQ(store_->health().live.size(), world_.paths().size());
  // it was written again, as one that failed once need not fail for ever
  store_.reset();
  world_.disk().remove(world_.paths()[0]);
  store_ = std::move(*world_.open_small());
  EXPECT_EQ(read_all(*store_, "a"), content_);
}

// A store with room for much, in little memory.
class CodedLargeTransaction : public ::testing::Test {
 protected:
  static constexpr size_t kStripes = 300;
  static constexpr uint64_t kCap = 12 * kMiB;  // a third of it
  static CodedWorldOptions options() {
    CodedWorldOptions options = quiet(kK, kM);
    options.budget_bytes = kCap;
    return options;
  }
  static StoreOptions store_options() {
    StoreOptions options;
    options.create = true;
    options.capacity_bytes = 2 * kStripes * kStripe;
    options.chunk_bytes = kChunk;
    return options;
  }
  CodedLargeTransaction() : world_(options()), content_(pattern(kStripes * kStripe, 3)) { open(); }
  void open() { store_ = std::move(*world_.open_coded(store_options())); }
  Budget& budget() { return world_.runtime().budget(); }
  // All of it, not committed.
  std::unique_ptr<Transaction> write() {
    auto change = std::move(*store_->begin());
    EXPECT_OK(change->resize("a", content_.size()));
    EXPECT_OK(change->write("a", 0, slice_of(content_)).wait());
    return change;
  }
  Bytes read(Transaction& change, size_t offset, size_t bytes) {
    Bytes into(bytes);
    EXPECT_OK(change.read("a", offset, slice_of(into)).wait());
    return into;
  }
  Bytes part(size_t offset, size_t bytes) const {
    const auto at = content_.begin() + static_cast<ptrdiff_t>(offset);
    return {at, at + static_cast<ptrdiff_t>(bytes)};
  }
  // Piece by piece, within the cap.
  Bytes read_all() {
    Bytes all(content_.size());
    for (size_t at = 0; at < all.size(); at += kStripe)
      EXPECT_OK(store_->read("a", at, slice_of(all).sub(at, kStripe), {}).wait());
    return all;
  }
  void change_bytes(Transaction& change, size_t offset, size_t bytes, uint64_t seed) {
    Bytes other = pattern(bytes, seed);
    std::copy(other.begin(), other.end(), content_.begin() + static_cast<ptrdiff_t>(offset));
    ASSERT_OK(change.write("a", offset, slice_of(other)).wait());
  }
  CodedWorld world_;
  std::unique_ptr<CodedStore> store_;
  Bytes content_;
};

TEST_F(CodedLargeTransaction, NeedsNoMemoryForWhatIsOnTheDisks) {
  ASSERT_GT(content_.size(), 3 * kCap);
  world_.disk().start_recording();
  auto change = write();
  EXPECT_LT(budget().used(), kCap / 2);
  ASSERT_OK(change->commit(Durability::durable).wait());
  EXPECT_EQ(chunks_written(world_.disk().stop_recording()), kStripes * kN);
  EXPECT_TRUE(read(*change, kStripe - 777, 2 * kStripe) == part(kStripe - 777, 2 * kStripe));
  change.reset();
  EXPECT_TRUE(read_all() == content_);
  store_.reset();
  const auto report = fsck(world_, kK, kM);
  ASSERT_TRUE(report);
  EXPECT_TRUE(report->problems.empty()) << report->problems.front();
  open();
  EXPECT_TRUE(read_all() == content_);
}

TEST_F(CodedLargeTransaction, ReadsAndChangesWhatIsOnTheDisksAlready) {
  auto change = write();
  EXPECT_TRUE(read(*change, 0, 3 * kStripe) == part(0, 3 * kStripe));
  EXPECT_TRUE(read(*change, kStripe + 777, 5000) == part(kStripe + 777, 5000));
  change_bytes(*change, 1000, 5000, 8);                     // in one chunk
  change_bytes(*change, 5 * kStripe - 100, 2 * kChunk, 9);  // in three
  EXPECT_TRUE(read(*change, 0, 6 * kStripe) == part(0, 6 * kStripe));
  // cut in the middle of a stripe, and grown: zeros
  const size_t kept = (kStripes - 2) * kStripe + 5000;
  ASSERT_OK(change->resize("a", kept));
  ASSERT_OK(change->resize("a", content_.size()));
  std::fill(content_.begin() + static_cast<ptrdiff_t>(kept), content_.end(), std::byte{0});
  EXPECT_TRUE(read(*change, kept - 100, 2 * kChunk) == part(kept - 100, 2 * kChunk));
  ASSERT_OK(change->commit(Durability::durable).wait());
  EXPECT_TRUE(read_all() == content_);
}

TEST_F(CodedLargeTransaction, GivesAllBackWhenItIsAbandoned) {
  const uint64_t used = budget().used();
  const uint64_t bytes = store_->info().used_bytes;
  for (int i = 0; i < 4; ++i) write();
  for (int i = 0; i < 1000 && store_->info().used_bytes != bytes; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(store_->info().used_bytes, bytes);
  EXPECT_EQ(budget().used(), used);
}

// What the others have is not written again, whatever becomes of one disk meanwhile.
TEST_F(CodedLargeTransaction, GoesOnWithoutADisk) {
  const IoCounters& counters = world_.runtime().loop().counters();
  const uint64_t all = counters.written_bytes.get() + kStripes * kN * kChunk;
  auto change = write();
  for (int i = 0; i < 1000 && counters.written_bytes.get() < all; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  world_.disk().fail_nth(Op::Kind::write, 1, EIO, world_.paths()[1]);
  put(*store_, "b", 5000, 1);
  ASSERT_EQ(store_->health().live.size(), kN - 1);
  EXPECT_TRUE(read(*change, 0, 3 * kStripe) == part(0, 3 * kStripe));
  world_.disk().start_recording();
  ASSERT_OK(change->commit(Durability::durable).wait());
  EXPECT_EQ(chunks_written(world_.disk().stop_recording()), 0U);
  EXPECT_TRUE(read_all() == content_);
}

// A new disk that was not there when the blocks were written.
TEST_F(CodedLargeTransaction, IsWrittenAgainWhereADiskCameMeanwhile) {
  for (const size_t fresh : {0U, 1U, 2U}) {
    store_.reset();
    world_.disk().remove(world_.paths()[fresh]);
    StoreOptions replacing = store_options();
    replacing.replace = {world_.paths()[fresh]};
    store_ = std::move(*world_.open_coded(replacing));
    content_ = pattern(content_.size(), 20 + fresh);
    auto change = write();
    ASSERT_OK(store_->repair().wait());
    ASSERT_EQ(store_->health().live.size(), kN);
    ASSERT_OK(change->commit(Durability::durable).wait());
    change.reset();
    EXPECT_TRUE(read_all() == content_);
    // each disk is needed where another is lost
    for (const std::string& lost : world_.paths()) {
      store_.reset();
      const auto images = images_of(world_);
      world_.disk().remove(lost);
      open();
      EXPECT_TRUE(read_all() == content_) << fresh << " " << lost;
      store_.reset();
      put_back(world_, images);
      open();
    }
  }
}

TEST_F(CodedEarly, AnUpdateOfTwoHalvesReadsThemTogether) {
  ASSERT_OK(write_in_pieces(kStripe)->commit(Durability::durable).wait());
  const Counter& reads = world_.runtime().loop().counters().reads;
  EXPECT_EQ(read_all(*store_, "a"), content_);
  const uint64_t before = reads.get();
  update(*store_, "a", content_, 3 * 4096 + 100, 4096, 3);
  EXPECT_EQ(reads.get() - before, 1U);
  update(*store_, "a", content_, 3 * 4096 + 200, 4096, 4);  // both in the log by now, as one VAL
  EXPECT_EQ(reads.get() - before, 2U);
  update(*store_, "a", content_, kStripe - 100, 200, 5);  // over the border of two stripes
  EXPECT_EQ(reads.get() - before, 4U);
  EXPECT_EQ(read_all(*store_, "a"), content_);
}

}  // namespace
}  // namespace stoker::coded
