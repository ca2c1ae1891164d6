// What a cache fetches ahead of the readers of a plan. The slow store keeps reads back until a test
// lets them go: nothing here depends on how fast anything is.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <thread>

#include "stoker/store/cached/ahead.h"
#include "stoker/store/cached/format.h"
#include "stoker/store/cached/store.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/cached_lab.h"
#include "stoker/testing/held_reads.h"
#include "stoker/testing/store_harness.h"

namespace stoker {
namespace {

// Of 64 places in memory 32 are for blocks that move, and 8 of them at most for prefetches.
class Prefetching : public ::testing::Test {
 protected:
  Prefetching() {
    std::filesystem::remove_all(root_);
    options_ = {.dram_bytes = 64 * kBlock, .disk_bytes = 32 * kBlock, .block_bytes = kBlock};
  }
  ~Prefetching() override {
    store_.reset();
    runtime_.reset();
    std::filesystem::remove_all(root_);
  }
  Status open() {
    STOKER_ASSIGN(auto slow,
                  open_store("dir:" + root_ + "/slow", runtime_->runtime(), {.create = true}));
    auto held = std::make_unique<HeldReads>(std::move(slow));
    slow_ = held.get();
    OpenFast fast = [this](uint64_t bytes) {
      StoreOptions made;
      made.create = true;
      made.capacity_bytes = bytes;
      return open_store("local:" + root_ + "/fast", runtime_->runtime(), made);
    };
    STOKER_ASSIGN(store_, open_cached_store("cached(test)", fast, std::move(held),
                                            runtime_->runtime(), options_));
    return {};
  }
  void put(const std::string& key, Bytes bytes) {
    auto change = std::move(*store_->begin());
    EXPECT_OK(change->resize(key, bytes.size()));
    EXPECT_OK(change->write(key, 0, slice_of(bytes)).wait());
    EXPECT_OK(change->commit(Durability::durable).wait());
  }
  Bytes read(const std::string& key, uint64_t offset, size_t bytes) {
    Bytes into(bytes);
    EXPECT_OK(store_->read(key, offset, slice_of(into)).wait());
    return into;
  }
  CacheInfo cache() const { return *store_->info().cache; }
  template <typename Done>
  static void until(Done done) {
    while (!done()) std::this_thread::yield();
  }
  // One item a block of an object, from the first to the last.
  static Plan blocks_of(const std::string& key, uint64_t count) {
    return {.keys = {key},
            .runs = {{.bytes = kBlock, .items = count, .stride = kBlock}},
            .ahead = true};
  }

  const std::string root_ = testing::TempDir() + "prefetch_test";
  std::unique_ptr<RuntimeOwner> runtime_ =
      std::move(*RuntimeOwner::make({.engine = "posix", .cpu_threads = 2}));
  CachedOptions options_;
  HeldReads* slow_ = nullptr;
  std::unique_ptr<Store> store_;
};

TEST_F(Prefetching, ReadsOfAPlanFindTheirBlocks) {
  constexpr uint64_t kBlocks = 16;
  ASSERT_OK(open());
  const Bytes bytes = pattern(kBlocks * kBlock, 1);
  put("a", bytes);
  ASSERT_OK(store_->follow(blocks_of("a", kBlocks)));
  for (uint64_t block = 0; block < kBlocks; ++block) {
    until([&] { return cache().prefetched_bytes >= std::min(block + 2, kBlocks) * kBlock; });
    EXPECT_EQ(read("a", block * kBlock, kBlock),
              Bytes(bytes.begin() + static_cast<ptrdiff_t>(block * kBlock),
                    bytes.begin() + static_cast<ptrdiff_t>((block + 1) * kBlock)));
  }
  const CacheInfo info = cache();
  EXPECT_EQ(info.memory_hit_bytes, bytes.size());
  EXPECT_EQ(info.stalls, 0U);
  EXPECT_EQ(info.fetched_bytes, bytes.size());
  EXPECT_EQ(info.prefetched_bytes, bytes.size());
  EXPECT_EQ(info.prefetched_in_vain_bytes, 0U);
  EXPECT_EQ(info.ahead_bytes, 0U);
  EXPECT_EQ(slow_->asked(Priority::demand), 0U);
  for (uint64_t block = 0; block < kBlocks; ++block)
    EXPECT_EQ(slow_->asked()[block].offset, block * kBlock) << "what is due first goes first";
}

TEST_F(Prefetching, AReaderThatWaitsMakesItLookFartherAheadAndDemandWaitsForNoPrefetch) {
  ASSERT_OK(open());
  put("a", pattern(16 * kBlock, 1));
  put("b", pattern(kBlock, 2));
  slow_->hold_prefetches();
  ASSERT_OK(store_->follow(blocks_of("a", 16)));
  until([&] { return slow_->waiting == 2; });
  EXPECT_EQ(cache().ahead_depth_bytes, 2 * kBlock);
  EXPECT_EQ(read("b", 0, kBlock), pattern(kBlock, 2)) << "no plan names it";
  EXPECT_EQ(cache().stalls, 0U);
  std::vector<Bytes> into(4, Bytes(kBlock));
  std::vector<Future<void>> reads;
  for (uint64_t block = 0; block < into.size(); ++block)
    reads.push_back(store_->read("a", block * kBlock, slice_of(into[block])));
  until([&] { return cache().stalls == 4; });
  EXPECT_EQ(cache().ahead_depth_bytes, 6 * kBlock);
  // Each is fetched once, by its reader or ahead of it.
  until([&] { return slow_->asked(Priority::prefetch) >= 8; });
  slow_->let_go();
  for (const auto& each : reads) EXPECT_OK(each.wait());
  for (uint64_t block = 4; block < 16; ++block) read("a", block * kBlock, kBlock);
  EXPECT_EQ(cache().fetched_bytes, 17 * kBlock);
}

// Of 16 places two are for prefetches, and two are left to readers. Reads take all but one.
TEST_F(Prefetching, WithoutMemoryItLooksLessFarAndNobodyWaitsForIt) {
  options_.dram_bytes = 16 * kBlock;
  ASSERT_OK(open());
  const Bytes bytes = pattern(32 * kBlock, 1);
  put("a", bytes);
  put("b", pattern(15 * kBlock, 2));
  slow_->hold();
  std::vector<Bytes> into(15, Bytes(kBlock));
  std::vector<Future<void>> reads;
  for (uint64_t block = 0; block < into.size(); ++block)
    reads.push_back(store_->read("b", block * kBlock, slice_of(into[block])));
  until([&] { return slow_->waiting == 15; });
  ASSERT_OK(store_->follow(blocks_of("a", 32)));
  until([&] { return cache().ahead_depth_bytes == kBlock; });
  EXPECT_EQ(slow_->asked(Priority::prefetch), 0U);
  slow_->let_go();
  for (const auto& each : reads) EXPECT_OK(each.wait());
  EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  EXPECT_EQ(cache().fetched_bytes, 47 * kBlock);
}

TEST_F(Prefetching, WithMemoryForAFewBlocksNothingIsFetchedAhead) {
  options_.dram_bytes = 7 * kBlock;
  ASSERT_OK(open());
  const Bytes bytes = pattern(16 * kBlock, 1);
  put("a", bytes);
  ASSERT_OK(store_->follow(blocks_of("a", 16)));
  for (uint64_t block = 0; block < 16; ++block) read("a", block * kBlock, kBlock);
  EXPECT_EQ(cache().prefetched_bytes, 0U);
  EXPECT_EQ(slow_->asked(Priority::prefetch), 0U);
}

TEST_F(Prefetching, APlanThatTakesItsPlaceCancelsWhatIsNotBegun) {
  ASSERT_OK(open());
  put("a", pattern(16 * kBlock, 1));
  const Bytes bytes = pattern(4 * kBlock, 2);
  put("b", bytes);
  slow_->hold_prefetches();
  ASSERT_OK(store_->follow(blocks_of("a", 16)));
  until([&] { return slow_->waiting == 2; });
  ASSERT_OK(store_->follow(blocks_of("b", 4)));
  until([&] { return slow_->waiting == 4; });
  slow_->let_go();
  for (uint64_t block = 0; block < 4; ++block) {
    until([&] {
      return cache().prefetched_bytes >= (2 + std::min<uint64_t>(block + 2, 4)) * kBlock;
    });
    read("b", block * kBlock, kBlock);
  }
  EXPECT_EQ(read("b", 0, bytes.size()), bytes);
  EXPECT_EQ(slow_->asked().size(), 6U) << "two blocks of a, and four of b";
  EXPECT_EQ(cache().stalls, 0U);
}

// An object that was replaced behind the cache: its plan is of another content.
TEST_F(Prefetching, WhatWasReplacedMeanwhileIsNotKept) {
  ASSERT_OK(open());
  put("a", pattern(16 * kBlock, 1));
  slow_->hold_prefetches();
  ASSERT_OK(store_->follow(blocks_of("a", 16)));
  until([&] { return slow_->waiting == 2; });
  const Bytes bytes = pattern(16 * kBlock, 2);
  put("a", bytes);
  slow_->let_go();
  EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  until([&] { return cache().prefetched_bytes == 0 && cache().ahead_depth_bytes == kBlock; });
  EXPECT_EQ(slow_->asked(Priority::prefetch), 2U);
}

// The tags of eight objects are asked for at the same time, that of one object once for many
// blocks.
TEST_F(Prefetching, TagsOfManyObjectsAreAskedForAtOnce) {
  constexpr uint64_t kObjects = 8;
  ASSERT_OK(open());
  Plan plan{.ahead = true};
  for (uint64_t i = 0; i < kObjects; ++i) {
    const std::string key = "o" + std::to_string(i);
    put(key, pattern(kBlock, i));
    plan.keys.push_back(key);
    plan.runs.push_back({.object = i, .bytes = kBlock, .items = 1, .stride = kBlock});
  }
  put("a", pattern(8 * kBlock, 9));
  // Readers that wait make it look eight blocks ahead.
  Plan before = blocks_of("a", 8);
  before.name = "before";
  slow_->hold();
  ASSERT_OK(store_->follow(before));
  std::vector<Bytes> into(8, Bytes(kBlock));
  std::vector<Future<void>> reads;
  for (uint64_t block = 0; block < into.size(); ++block)
    reads.push_back(store_->read("a", block * kBlock, slice_of(into[block])));
  until([&] { return cache().ahead_depth_bytes == kObjects * kBlock; });
  slow_->let_go();
  for (const auto& each : reads) EXPECT_OK(each.wait());
  ASSERT_OK(store_->follow({.name = "before"}));

  slow_->hold_prefetches();
  const int held = slow_->waiting;
  ASSERT_OK(store_->follow(plan));
  until([&] { return slow_->waiting == held + static_cast<int>(kObjects); });
  slow_->hold_stats();
  slow_->let_go();
  until([&] { return slow_->stats_waiting == static_cast<int>(kObjects); });
  slow_->let_stats_go();
  until([&] { return cache().ahead_bytes == kObjects * kBlock; });
  for (uint64_t i = 0; i < kObjects; ++i)
    EXPECT_EQ(read("o" + std::to_string(i), 0, kBlock), pattern(kBlock, i));
}

TEST_F(Prefetching, TheTagOfOneObjectIsAskedForOnceForAllThatCame) {
  ASSERT_OK(open());
  put("a", pattern(16 * kBlock, 1));
  slow_->hold_prefetches();
  ASSERT_OK(store_->follow(blocks_of("a", 16)));
  until([&] { return slow_->waiting == 2; });
  slow_->hold_stats();
  slow_->let_go();
  until([&] { return slow_->stats_waiting == 1; });
  const int stats = slow_->stats;
  slow_->let_stats_go();
  until([&] { return cache().ahead_bytes == 2 * kBlock; });
  EXPECT_LE(slow_->stats, stats + 1) << "the second block came while the first was asked for";
}

// A store that fails at once is not asked for one position after the other, up to the farthest.
TEST_F(Prefetching, WhatFailedIsFetchedAheadWhenTheSlowStoreIsBack) {
  constexpr uint64_t kBlocks = 32;
  ASSERT_OK(open());
  const Bytes bytes = pattern(kBlocks * kBlock, 1);
  put("a", bytes);
  slow_->fail_prefetches(true);
  ASSERT_OK(store_->follow(blocks_of("a", kBlocks)));
  until([&] { return cache().ahead_depth_bytes == kBlock; });
  for (uint64_t block = 0; block < 4; ++block) read("a", block * kBlock, kBlock);
  EXPECT_LT(slow_->asked(Priority::prefetch), 3 * kBlocks / 4);
  slow_->fail_prefetches(false);
  for (uint64_t block = 4; block < kBlocks; ++block) {
    read("a", block * kBlock, kBlock);
    until([&] { return block + 4 > kBlocks || cache().ahead_bytes > 0; });
  }
  EXPECT_EQ(cache().fetched_bytes, bytes.size());
  EXPECT_GE(cache().prefetched_bytes, 10 * kBlock);
}

// A part is on its way when places come free, and a reader of what lies beside it brings it all.
// One place is for prefetches: nothing else comes ahead meanwhile.
TEST_F(Prefetching, ABlockThatCameWholeIsReadWhileAPartOfItIsOnItsWay) {
  constexpr uint64_t kBlocks = 64, kItem = kBlock / 4, kItems = 4 * kBlocks;
  options_.dram_bytes = 8 * kBlock;
  ASSERT_OK(open());
  const Bytes bytes = pattern(kBlocks * kBlock, 1);
  put("a", bytes);
  ASSERT_OK(store_->follow({.keys = {"a"},
                            .runs = {{.bytes = kItem, .items = kItems, .stride = kItem}},
                            .order = Plan::Shuffled{7},
                            .ahead = true}));
  const Permutation first(kItems, 7, 0), second(kItems, 7, 1);
  for (uint64_t at = 0; at < kItems; ++at) read("a", first.sample(at) * kItem, kItem);
  // The one that came ahead is read, and the next is kept back.
  const auto newest = [&] {
    const auto asked = slow_->asked();
    return *std::ranges::find(asked.rbegin(), asked.rend(), Priority::prefetch,
                              &HeldReads::Asked::priority);
  };
  HeldReads::Asked part;
  for (uint64_t at = 0; part.bytes != kItem;) {
    slow_->let_go();
    until([&] { return cache().ahead_bytes > 0; });
    const HeldReads::Asked came = newest();
    const int before = slow_->waiting;
    slow_->hold_prefetches();
    for (bool last = false; !last; ++at) {
      ASSERT_LT(at, kItems);
      const uint64_t offset = second.sample(at) * kItem;
      last = came.offset <= offset && offset < came.offset + came.bytes;
      read("a", offset, kItem);
    }
    until([&] { return slow_->waiting > before; });
    part = newest();
  }
  const uint64_t block = part.offset / kBlock * kBlock, end = block + kBlock;
  EXPECT_OK(store_->forget("a", 0, block));
  EXPECT_OK(store_->forget("a", end, bytes.size() - end));
  const uint64_t beside = part.offset + kItem < end ? part.offset + kItem : block;
  const auto expected = [&](uint64_t offset) {
    return Bytes(bytes.begin() + static_cast<ptrdiff_t>(offset),
                 bytes.begin() + static_cast<ptrdiff_t>(offset + kItem));
  };
  EXPECT_EQ(read("a", beside, kItem), expected(beside));
  EXPECT_EQ(slow_->asked().back().bytes, kBlock) << "all of it came";
  EXPECT_EQ(read("a", part.offset, kItem), expected(part.offset));
  slow_->let_go();
}

// Four readers, items of a quarter of a block, a cache of half of the set: what does not stay is
// fetched item by item, ahead of them or not.
TEST_F(Prefetching, ExactlyOnceEpochsFetchNoMoreThanTheBound) {
  constexpr uint64_t kBlocks = 64, kItem = kBlock / 4, kItems = 4 * kBlocks, kEpochs = 4;
  ASSERT_OK(open());
  const Bytes bytes = pattern(kBlocks * kBlock, 1);
  put("a", bytes);
  ASSERT_OK(store_->follow({.keys = {"a"},
                            .runs = {{.bytes = kItem, .items = kItems, .stride = kItem}},
                            .order = Plan::Shuffled{7},
                            .ahead = true}));
  for (uint64_t epoch = 0; epoch < kEpochs; ++epoch) {
    const Permutation order(kItems, 7, epoch);
    std::atomic<uint64_t> next{0};
    std::vector<std::thread> readers;
    for (int i = 0; i < 4; ++i)
      readers.emplace_back([&] {
        Bytes into(kItem);
        for (uint64_t at = next++; at < kItems; at = next++) {
          const uint64_t offset = order.sample(at) * kItem;
          EXPECT_OK(store_->read("a", offset, slice_of(into)).wait());
          EXPECT_EQ(std::memcmp(into.data(), bytes.data() + offset, kItem), 0);
        }
      });
    for (auto& each : readers) each.join();
    if (epoch < 2) continue;
    EXPECT_EQ(cache().epochs, epoch);
    EXPECT_EQ(cache().epoch_bound_bytes, 32 * kBlock);
    EXPECT_LE(cache().epoch_fetched_bytes * 100, cache().epoch_bound_bytes * 102);
  }
  EXPECT_GT(cache().prefetched_bytes, 0U);
  EXPECT_EQ(cache().prefetched_in_vain_bytes, 0U);
  EXPECT_EQ(cache().off, "");
}

TEST(Ahead, TheDepthGrowsByStallsAndHalvesUnderPressure) {
  cached::Ahead ahead(8);
  EXPECT_EQ(ahead.depth(), 2U);
  for (int i = 0; i < 10; ++i) ahead.stalled();
  EXPECT_EQ(ahead.depth(), 8U);
  ahead.pressed();
  EXPECT_EQ(ahead.depth(), 4U);
  for (int i = 0; i < 10; ++i) ahead.pressed();
  EXPECT_EQ(ahead.depth(), 1U) << "never none";
  cached::Ahead none(0);
  none.stalled();
  none.pressed();
  EXPECT_FALSE(none.room());
}

std::shared_ptr<cached::Follower> follower_of(Plan plan, const std::string& key, uint64_t items) {
  plan.keys = {key};
  plan.runs = {{.bytes = kBlock, .items = items, .stride = kBlock}};
  plan.ahead = true;
  auto made = cached::Follower::make(
      std::move(plan), {{.key = key, .bytes = items * kBlock, .tag = "t"}}, kBlock, no_limit());
  EXPECT_OK(made);
  return std::shared_ptr<cached::Follower>(std::move(*made));
}

TEST(Ahead, OfSeveralPlansWhatIsDueFirstGoesFirst) {
  cached::Followers followers;
  followers.follow("a", follower_of({}, "a", 100));
  followers.follow("b", follower_of({}, "b", 100));
  cached::Ahead ahead(8);
  std::vector<std::pair<std::string, uint64_t>> order;
  const auto take = [&] {
    const auto due = ahead.due(followers);
    if (!due) return false;
    order.emplace_back(*due->part.key, due->part.offset / kBlock);
    ahead.advance(*due);
    return true;
  };
  for (int i = 0; i < 3; ++i) take();
  followers.read(cached::block_id("b", "t", 5), {});  // its reader is at 6
  for (int i = 0; i < 3; ++i) take();
  const std::vector<std::pair<std::string, uint64_t>> want = {{"a", 0}, {"b", 0}, {"a", 1},
                                                              {"b", 6}, {"b", 7}, {"a", 2}};
  EXPECT_EQ(order, want);
  while (take()) {
  }
  EXPECT_EQ(order.size(), 100 + 1 + 94U) << "up to their ends, and without what readers passed";
}

TEST(Ahead, AShuffledPlanGoesByWhatIsRead) {
  constexpr uint64_t kItems = 50;
  const auto follower = follower_of({.order = Plan::Shuffled{3}}, "a", kItems);
  const auto read = [&](uint64_t at) {
    const uint64_t item = Permutation(kItems, 3, at / kItems).sample(at % kItems);
    ASSERT_EQ(follower->parts(at).size(), 1U);
    EXPECT_EQ(follower->parts(at)[0].offset, item * kBlock);
    const uint64_t before = follower->position();
    follower->pass("a", item * kBlock + 5, kBlock - 5);
    EXPECT_EQ(follower->position(), before) << "no item begins there";
    follower->pass("a", item * kBlock, kBlock);
    EXPECT_EQ(follower->position(), std::max(before, at + 1));
  };
  for (const uint64_t at : {0U, 4U, 2U, 49U}) read(at);
  for (uint64_t at = 0; at < 48; ++at)
    if (at != 0 && at != 4 && at != 2) read(at);
  read(50);
  read(48);  // late, when an epoch was over
  follower->pass("b", 0, kBlock);
  EXPECT_EQ(follower->position(), 51U);
}

TEST(Ahead, AReadOfManyItemsPassesAllOfThem) {
  const auto follower = follower_of({.order = Plan::Shuffled{3}}, "a", 50);
  follower->pass("a", 0, 50 * kBlock);
  EXPECT_EQ(follower->position(), 50U);
}

// Half of an epoch comes late, in its reverse order. In the next epoch many of these items are
// nearer to the position than where they were passed by.
TEST(Ahead, WhatComesLateMovesNoShuffledPlanOn) {
  constexpr uint64_t kItems = 256;
  const auto follower = follower_of({.order = Plan::Shuffled{7}}, "a", kItems);
  const auto pass = [&](uint64_t at) {
    const uint64_t item = Permutation(kItems, 7, at / kItems).sample(at % kItems);
    follower->pass("a", item * kBlock, kBlock);
  };
  for (uint64_t epoch = 0; epoch < 4; ++epoch) {
    for (uint64_t at = 1; at < kItems; at += 2) pass(epoch * kItems + at);
    EXPECT_EQ(follower->position(), (epoch + 1) * kItems);
    for (uint64_t at = kItems; at > 0; at -= 2) pass(epoch * kItems + at - 2);
    EXPECT_EQ(follower->position(), (epoch + 1) * kItems);
  }
}

}  // namespace
}  // namespace stoker
