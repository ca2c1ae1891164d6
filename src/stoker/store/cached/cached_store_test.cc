// What a cache adds to the suite: how often it asks the slow store, and what it survives.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "stoker/store/cached/followers.h"
#include "stoker/store/cached/format.h"
#include "stoker/store/cached/policy.h"
#include "stoker/store/cached/store.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/cached_lab.h"
#include "stoker/testing/fault_store.h"
#include "stoker/testing/format_example.h"
#include "stoker/testing/held_reads.h"
#include "stoker/testing/slow_store.h"
#include "stoker/testing/store_harness.h"

namespace stoker {
namespace {

// A folder behind a cache. The stores below are reached through fault wrappers.
class CachedStore : public ::testing::Test {
 protected:
  CachedStore() {
    std::filesystem::remove_all(root_);
    options_ = {.dram_bytes = 4 * kMiB,
                .disk_bytes = 2 * kMiB,
                .block_bytes = kBlock,
                .probe = std::chrono::milliseconds(1)};
  }
  ~CachedStore() override {
    store_.reset();
    runtime_.reset();
    std::filesystem::remove_all(root_);
  }
  Status open() {
    store_.reset();
    STOKER_ASSIGN(auto slow,
                  open_store("dir:" + root_ + "/slow", runtime_->runtime(), {.create = true}));
    auto wrapped = std::make_unique<FaultStore>(std::move(slow));
    slow_ = &wrapped->plan();
    OpenFast fast = [this](uint64_t bytes) -> Result<std::unique_ptr<Store>> {
      if (lost_) return fail(Code::io, "the disk of the cache does not answer");
      StoreOptions made;
      made.create = true;
      made.capacity_bytes = bytes;
      STOKER_ASSIGN(auto opened, open_store("local:" + root_ + "/fast", runtime_->runtime(), made));
      if (delay_.count() > 0)
        opened = std::make_unique<SlowStore>(std::move(opened), SlowDelays{.read = delay_});
      auto held = std::make_unique<HeldReads>(std::move(opened));
      held_ = held.get();
      auto each = std::make_unique<FaultStore>(std::move(held));
      fast_ = &each->plan();
      return std::unique_ptr<Store>(std::move(each));
    };
    STOKER_ASSIGN(store_, open_cached_store("cached(test)", fast, std::move(wrapped),
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
  uint64_t slow_reads() const { return slow_->calls(StoreCall::read); }

  const std::string root_ = testing::TempDir() + "cached_store_test";
  std::unique_ptr<RuntimeOwner> runtime_ =
      std::move(*RuntimeOwner::make({.engine = "posix", .cpu_threads = 2}));
  CachedOptions options_;
  FaultPlan* slow_ = nullptr;
  FaultPlan* fast_ = nullptr;
  HeldReads* held_ = nullptr;  // of FAST
  std::atomic<bool> lost_{false};
  std::chrono::milliseconds delay_{0};  // of reads of FAST
  std::unique_ptr<Store> store_;
};

TEST_F(CachedStore, WhatWasReadOnceIsNotFetchedAgainAlsoAfterReopening) {
  ASSERT_OK(open());
  const Bytes bytes = pattern(20 * kBlock + 77, 1);
  put("a", bytes);
  for (int round = 0; round < 3; ++round) EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  EXPECT_EQ(slow_reads(), 21U) << "one for each block";
  EXPECT_EQ(cache().fetched_bytes, bytes.size());
  ASSERT_OK(open());
  EXPECT_EQ(cache().held_bytes, bytes.size());
  EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  EXPECT_EQ(slow_reads(), 0U);
  EXPECT_EQ(cache().hit_bytes, bytes.size());
}

TEST_F(CachedStore, AReplacedObjectIsNeverServedStale) {
  ASSERT_OK(open());
  for (uint64_t round = 0; round < 60; ++round) {  // more in all than there are slots
    const Bytes bytes = pattern(2 * kBlock, round);
    put("a", bytes);
    ASSERT_EQ(read("a", 0, bytes.size()), bytes);
    const auto middle = bytes.begin() + kBlock;
    ASSERT_EQ(read("a", kBlock - 5, 10), Bytes(middle - 5, middle + 5));
  }
  EXPECT_LE(cache().held_bytes, cache().usable_bytes);
}

TEST_F(CachedStore, ReadsOfTheSameBlockAreMerged) {
  auto slow = open_store("dir:" + root_ + "/slow", runtime_->runtime(), {.create = true});
  ASSERT_OK(slow);
  auto counted = std::make_unique<FaultStore>(std::move(*slow));
  FaultPlan& plan = counted->plan();
  const SlowDelays delays{.read = std::chrono::milliseconds(200)};
  OpenFast fast = [this](uint64_t bytes) {
    StoreOptions made;
    made.create = true;
    made.capacity_bytes = bytes;
    return open_store("local:" + root_ + "/fast", runtime_->runtime(), made);
  };
  auto opened = open_cached_store("cached(test)", fast,
                                  std::make_unique<SlowStore>(std::move(counted), delays),
                                  runtime_->runtime(), options_);
  ASSERT_OK(opened);
  store_ = std::move(*opened);
  const Bytes bytes = pattern(kBlock, 1);
  put("a", bytes);
  std::vector<Bytes> into(8, Bytes(1000));
  std::vector<Future<void>> reads;
  for (size_t i = 0; i < into.size(); ++i)
    reads.push_back(store_->read("a", i * 1000, slice_of(into[i])));
  for (size_t i = 0; i < into.size(); ++i) {
    EXPECT_OK(reads[i].wait());
    EXPECT_EQ(std::memcmp(into[i].data(), bytes.data() + i * 1000, 1000), 0);
  }
  EXPECT_EQ(plan.calls(StoreCall::read), 1U);
}

TEST_F(CachedStore, WhatIsNotAdmittedFetchesTheRangeAlone) {
  options_.dram_bytes = kBlock;  // one block at a time
  ASSERT_OK(open());
  put("a", pattern(4 * kBlock, 1));
  EXPECT_EQ(read("a", kBlock - 10, 20), [&] {
    const Bytes all = pattern(4 * kBlock, 1);
    return Bytes(all.begin() + kBlock - 10, all.begin() + kBlock + 10);
  }());
  EXPECT_EQ(cache().fetched_bytes, kBlock + 10) << "one block, and a range of the other";
}

// The block holds bytes that SLOW cannot give; those that are asked for it has.
TEST_F(CachedStore, ABlockThatFailsFailsNoReadOfItsGoodBytes) {
  ASSERT_OK(open());
  const Bytes bytes = pattern(kBlock, 1);
  put("a", bytes);
  slow_->fail_nth(StoreCall::read, 1, Code::corruption);
  EXPECT_EQ(read("a", 5, 100), Bytes(bytes.begin() + 5, bytes.begin() + 105));
  EXPECT_EQ(cache().fetched_bytes, 100U);
  slow_->fail_nth(StoreCall::read, 1, Code::corruption);
  slow_->fail_nth(StoreCall::read, 1, Code::corruption);
  Bytes into(100);
  EXPECT_EQ(code_of(store_->read("a", 5, slice_of(into)).wait()), Code::corruption);
  EXPECT_EQ(read("a", 0, kBlock), bytes);
}

// Of 64 places in memory half are for blocks that stay.
TEST_F(CachedStore, BlocksStayInMemoryUpToAHardLimit) {
  ASSERT_OK(open());
  EXPECT_GE(runtime_->budget().used(), options_.dram_bytes) << "it is reserved at once";
  const Bytes bytes = pattern(16 * kBlock, 1);
  put("a", bytes);
  for (int round = 0; round < 3; ++round) EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  EXPECT_EQ(cache().memory_hit_bytes, 2 * bytes.size());
  EXPECT_EQ(cache().hit_bytes, 0U);
  ASSERT_OK(open());
  EXPECT_EQ(read("a", 5, 10), Bytes(bytes.begin() + 5, bytes.begin() + 15));
  for (int round = 0; round < 2; ++round) EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  EXPECT_EQ(cache().hit_bytes, 10 + bytes.size()) << "from the disk once";
  EXPECT_EQ(cache().memory_hit_bytes, bytes.size());
  EXPECT_OK(store_->forget("a", 0, kBlock));
  EXPECT_EQ(read("a", 0, kBlock), Bytes(bytes.begin(), bytes.begin() + kBlock));
  EXPECT_EQ(cache().fetched_bytes, kBlock) << "forgotten in memory too";
}

// What a plan names soonest stays in memory: 4 blocks of 8 places, read again and again.
TEST_F(CachedStore, APlanSaysWhatStaysInMemory) {
  options_.dram_bytes = 8 * kBlock;
  ASSERT_OK(open());
  put("a", pattern(4 * kBlock, 1));
  const Bytes bytes = pattern(16 * kBlock, 2);
  put("b", bytes);
  Plan plan{.keys = {"a", "b"}};
  for (uint64_t i = 0; i < 16; ++i) {
    plan.runs.push_back({.bytes = kBlock, .items = 4, .stride = kBlock});
    plan.runs.push_back({.object = 1, .offset = i * kBlock, .bytes = kBlock});
  }
  ASSERT_OK(store_->follow(plan));
  for (uint64_t i = 0; i < 16; ++i) {
    for (uint64_t block = 0; block < 4; ++block) read("a", block * kBlock, kBlock);
    read("b", i * kBlock, kBlock);
  }
  EXPECT_EQ(cache().memory_hit_bytes, 15 * 4 * kBlock);
  EXPECT_EQ(cache().fetched_bytes, 20 * kBlock);
}

TEST_F(CachedStore, ObjectsOfAPlanAreNotAskedForAtEachRead) {
  options_.believe = std::chrono::hours(24 * 365);  // longer than any machine runs
  ASSERT_OK(open());
  Bytes bytes = pattern(8 * kBlock, 1);
  put("a", bytes);
  const auto stats = [this] { return slow_->calls(StoreCall::stat); };
  read("a", 0, bytes.size());
  uint64_t before = stats();
  read("a", 0, bytes.size());
  EXPECT_EQ(stats(), before + 1) << "no plan names it";
  const Plan plan{.keys = {"a"},
                  .runs = {{.bytes = kBlock, .items = 8, .stride = kBlock}},
                  .order = Plan::Shuffled{}};
  ASSERT_OK(store_->follow(plan));
  before = stats();
  for (int round = 0; round < 5; ++round) EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  ASSERT_OK(store_->stat("a"));
  EXPECT_EQ(stats(), before);
  bytes = pattern(8 * kBlock, 2);
  put("a", bytes);
  EXPECT_EQ(read("a", 0, bytes.size()), bytes) << "what this store wrote is seen at once";
  EXPECT_OK(store_->remove({"a"}));
  Bytes into(1);
  EXPECT_EQ(code_of(store_->read("a", 0, slice_of(into)).wait()), Code::not_found);
  ASSERT_OK(store_->follow({}));
  EXPECT_EQ(code_of(store_->stat("a")), Code::not_found);
}

TEST_F(CachedStore, WhatAnotherWriterReplacedIsSeenInTime) {
  options_.believe = std::chrono::milliseconds(1);
  ASSERT_OK(open());
  put("a", pattern(kBlock, 1));
  ASSERT_OK(store_->follow({.keys = {"a"}, .runs = {{.bytes = kBlock}}}));
  read("a", 0, kBlock);
  {
    const auto other = open_store("dir:" + root_ + "/slow", runtime_->runtime(), {});
    ASSERT_OK(other);
    Bytes bytes = pattern(kBlock, 2);
    auto change = std::move(*(*other)->begin());
    EXPECT_OK(change->resize("a", bytes.size()));
    EXPECT_OK(change->write("a", 0, slice_of(bytes)).wait());
    EXPECT_OK(change->commit(Durability::durable).wait());
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_EQ(read("a", 0, kBlock), pattern(kBlock, 2));
}

TEST_F(CachedStore, ADiskThatIsTooSlowIsDoneWithout) {
  options_.late = std::chrono::milliseconds(5);
  options_.probe = std::chrono::hours(1);
  options_.dram_bytes = kBlock;  // none stays in memory
  ASSERT_OK(open());
  const Bytes bytes = pattern(kBlock, 1);
  put("a", bytes);
  read("a", 0, kBlock);
  store_.reset();
  delay_ = std::chrono::milliseconds(20);
  ASSERT_OK(open());
  for (int each = 0; each < 3; ++each) {
    EXPECT_EQ(cache().off, "");
    EXPECT_EQ(read("a", 0, kBlock), bytes);
  }
  EXPECT_NE(cache().off.find(" ms to read a block"), std::string::npos);
  EXPECT_EQ(cache().fetched_bytes, 0U);
  EXPECT_EQ(read("a", 0, kBlock), bytes);
  EXPECT_EQ(cache().fetched_bytes, kBlock);
}

TEST_F(CachedStore, ADiskThatWasTooSlowComesBack) {
  options_.late = std::chrono::milliseconds(100);
  options_.dram_bytes = kBlock;  // none stays in memory
  ASSERT_OK(open());
  const Bytes bytes = pattern(kBlock, 1);
  put("a", bytes);
  read("a", 0, kBlock);
  delay_ = std::chrono::milliseconds(150);
  ASSERT_OK(open());
  delay_ = {};  // of the next one
  lost_ = true;
  for (int each = 0; each < 3; ++each) EXPECT_EQ(read("a", 0, kBlock), bytes);
  EXPECT_NE(cache().off, "");
  EXPECT_EQ(read("a", 0, kBlock), bytes);
  EXPECT_EQ(cache().fetched_bytes, kBlock) << "from the slow store meanwhile";
  lost_ = false;
  while (!cache().off.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(read("a", 0, kBlock), bytes);
  EXPECT_EQ(cache().fetched_bytes, kBlock) << "it is as warm as it was";
  EXPECT_EQ(cache().hit_bytes, 4 * kBlock);
}

// As long as there are free slots, a read of any length is kept.
TEST_F(CachedStore, AnEmptyCacheFillsFromOneRead) {
  ASSERT_OK(open());
  const Bytes bytes = pattern(32 * kBlock, 1);
  put("a", bytes);
  EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  EXPECT_EQ(cache().admitted_bytes, bytes.size());
}

// Eight slots are free of 40: what comes waits in memory until they are, and is kept all the same.
TEST_F(CachedStore, AFullCacheTakesMoreThanItHasFreeSlots) {
  ASSERT_OK(open());
  put("a", pattern(32 * kBlock, 1));
  const Bytes bytes = pattern(16 * kBlock, 2);
  put("b", bytes);
  const auto blocks = [](uint64_t object, uint64_t count) {
    return PlanRun{.object = object, .bytes = kBlock, .items = count, .stride = kBlock};
  };
  ASSERT_OK(
      store_->follow({.keys = {"a", "b"}, .runs = {blocks(0, 32), blocks(1, 16), blocks(1, 16)}}));
  read("a", 0, 32 * kBlock);
  for (int round = 0; round < 2; ++round) EXPECT_EQ(read("b", 0, bytes.size()), bytes);
  EXPECT_EQ(cache().fetched_bytes, 48 * kBlock);
  ASSERT_OK(open());  // closing wrote all of it
  EXPECT_EQ(cache().held_bytes, 32 * kBlock);
  EXPECT_EQ(read("b", 0, bytes.size()), bytes);
  EXPECT_EQ(cache().fetched_bytes, 0U);
}

// FAST writes blocks beside those that were in their slots: it needs room for a whole commit.
TEST_F(CachedStore, AForgottenCacheFillsAgain) {
  ASSERT_OK(open());
  const Bytes bytes = pattern(32 * kBlock, 1);
  put("a", bytes);
  for (int round = 0; round < 4; ++round) {
    EXPECT_EQ(read("a", 0, bytes.size()), bytes);
    EXPECT_OK(store_->forget("a", 0, bytes.size()));
    EXPECT_EQ(cache().off, "");
  }
  EXPECT_EQ(cache().admitted_bytes, 4 * bytes.size());
}

// Bytes of the volume change behind the store's back, wherever they are.
TEST_F(CachedStore, ADamagedVolumeServesNoWrongByte) {
  const Bytes bytes = pattern(20 * kBlock + 77, 1);
  uint64_t found = 0;
  for (uint64_t damage = 0; damage < 6; ++damage) {
    ASSERT_OK(open());
    put("a", bytes);
    ASSERT_EQ(read("a", 0, bytes.size()), bytes);
    store_.reset();
    const std::string volume = root_ + "/fast/stoker.volume";
    const uint64_t size = std::filesystem::file_size(volume);
    std::mt19937_64 random(damage);
    std::fstream file(volume, std::ios::in | std::ios::out | std::ios::binary);
    for (int each = 0; each < 200; ++each) {
      const Bytes noise = pattern(64, random());
      file.seekp(static_cast<std::streamoff>(random() % (size - noise.size())));
      file.write(reinterpret_cast<const char*>(noise.data()),
                 static_cast<std::streamsize>(noise.size()));
    }
    file.close();
    ASSERT_OK(open());
    for (int round = 0; round < 3; ++round) ASSERT_EQ(read("a", 0, bytes.size()), bytes);
    found += cache().damaged_blocks;
    store_.reset();
    std::filesystem::remove_all(root_ + "/fast");
  }
  EXPECT_GT(found, 0U);
}

TEST_F(CachedStore, ABudgetTooSmallForOneBlockIsAnError) {
  options_.dram_bytes = kBlock - 1;
  EXPECT_EQ(code_of(open()), Code::invalid_argument);
  options_.dram_bytes = 4 * kMiB;
  options_.disk_bytes = kBlock - 1;
  EXPECT_EQ(code_of(open()), Code::invalid_argument);
}

TEST_F(CachedStore, WhatIsForgottenIsFetchedOnceMore) {
  ASSERT_OK(open());
  const Bytes bytes = pattern(4 * kBlock, 1);
  put("a", bytes);
  EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  EXPECT_OK(store_->forget("a", kBlock + 5, kBlock));  // blocks 1 and 2
  EXPECT_EQ(code_of(store_->forget("a", 0, bytes.size() + 1)), Code::invalid_argument);
  const uint64_t before = cache().fetched_bytes;
  EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  EXPECT_EQ(cache().fetched_bytes - before, 2 * kBlock);
}

TEST_F(CachedStore, ADamagedBlockComesFromTheSlowStore) {
  ASSERT_OK(open());
  const Bytes bytes = pattern(4 * kBlock, 1);
  put("a", bytes);
  EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  ASSERT_OK(open());
  fast_->fail_nth(StoreCall::read, 2, Code::corruption);
  EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  EXPECT_EQ(cache().damaged_blocks, 1U);
  EXPECT_EQ(cache().off, "");
  EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  EXPECT_EQ(cache().fetched_bytes, 2 * kBlock) << "once instead of it, once to keep it";
}

TEST_F(CachedStore, ALostDiskIsDoneWithoutAndComesBack) {
  ASSERT_OK(open());
  const Bytes bytes = pattern(8 * kBlock, 1);
  put("a", bytes);
  EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  ASSERT_OK(open());
  lost_ = true;
  for (int each = 0; each < 8; ++each) fast_->fail_nth(StoreCall::read, 1, Code::io);
  EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  EXPECT_NE(cache().off, "");
  EXPECT_EQ(read("a", 5, 1000), Bytes(bytes.begin() + 5, bytes.begin() + 1005));
  lost_ = false;
  while (!cache().off.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const uint64_t before = cache().fetched_bytes;
  EXPECT_EQ(read("a", 0, bytes.size()), bytes);
  EXPECT_EQ(cache().fetched_bytes, before) << "it is as warm as it was";
}

TEST_F(CachedStore, ACommitThatFailsLosesOnlyTheCache) {
  ASSERT_OK(open());
  const Bytes bytes = pattern(20 * kBlock, 1);
  put("a", bytes);
  fast_->fail_nth(StoreCall::commit, 1, Code::out_of_space);
  for (int round = 0; round < 5; ++round) ASSERT_EQ(read("a", 0, bytes.size()), bytes);
}

TEST_F(CachedStore, ALostDiskAtOpeningIsDoneWithout) {
  lost_ = true;
  ASSERT_OK(open());
  put("a", pattern(1000, 1));
  EXPECT_EQ(read("a", 0, 1000), pattern(1000, 1));
  EXPECT_NE(cache().off, "");
}

// The slot holds another block, with a right checksum, when the read gets to it.
TEST_F(CachedStore, ASlotThatIsFilledAnewDuringAReadIsNotBelieved) {
  options_.dram_bytes = kBlock;  // none stays in memory
  ASSERT_OK(open());
  const Bytes first = pattern(kBlock, 1), second = pattern(kBlock, 2);
  put("a", first);
  put("b", second);
  put("c", first);
  read("a", 0, kBlock);
  EXPECT_OK(store_->forget("c", 0, 1));  // commits what is gathered
  held_->hold();
  Bytes into(kBlock);
  const auto reading = store_->read("a", 0, slice_of(into));
  while (held_->waiting == 0) std::this_thread::yield();
  EXPECT_OK(store_->forget("a", 0, kBlock));  // its slot is free, and is the first to be filled
  read("b", 0, kBlock);
  EXPECT_OK(store_->forget("c", 0, 1));
  held_->let_go();
  EXPECT_OK(reading.wait());
  EXPECT_EQ(into, first);
  EXPECT_EQ(read("b", 0, kBlock), second);
  EXPECT_EQ(cache().hit_bytes, kBlock) << "b alone";
}

// Read whole from its slot to stay in memory, while somebody finds that its bytes are wrong.
TEST_F(CachedStore, WhatIsForgottenDuringAReadStaysNowhere) {
  ASSERT_OK(open());
  const Bytes bytes = pattern(kBlock, 1);
  put("a", bytes);
  read("a", 0, kBlock);
  ASSERT_OK(open());
  held_->hold();
  Bytes into(kBlock);
  const auto reading = store_->read("a", 0, slice_of(into));
  while (held_->waiting == 0) std::this_thread::yield();
  EXPECT_OK(store_->forget("a", 0, kBlock));
  held_->let_go();
  EXPECT_OK(reading.wait());
  EXPECT_EQ(into, bytes);
  EXPECT_EQ(read("a", 0, kBlock), bytes);
  EXPECT_EQ(cache().fetched_bytes, kBlock) << "not from memory";
}

// Many readers, blocks that come and go: never a wrong byte.
TEST_F(CachedStore, ReadersBesideEvictionsSeeTheRightBytes) {
  options_.dram_bytes = 1 * kMiB;
  ASSERT_OK(open());
  constexpr size_t kObjects = 6;
  const auto content = [](size_t key) { return pattern(12 * kBlock + 100, 100 + key); };
  std::vector<Bytes> contents;
  for (size_t key = 0; key < kObjects; ++key) {
    contents.push_back(content(key));
    put("o/" + std::to_string(key), contents.back());
  }
  std::vector<std::thread> readers;
  for (uint64_t reader = 0; reader < 4; ++reader) {
    readers.emplace_back([&, reader] {
      std::mt19937_64 random(reader);
      for (int i = 0; i < 300; ++i) {
        const size_t key = random() % kObjects;
        const size_t offset = random() % contents[key].size();
        const size_t left = contents[key].size() - offset;
        const size_t size = 1 + random() % std::min<size_t>(left, 3 * kBlock);
        Bytes into(size);
        const std::string name = "o/" + std::to_string(key);
        ASSERT_OK(store_->read(name, offset, slice_of(into)).wait());
        ASSERT_EQ(std::memcmp(into.data(), contents[key].data() + offset, size), 0);
        if (i % 50 == 49) {
          EXPECT_OK(store_->forget(name, offset, size));
        }
      }
    });
  }
  for (auto& reader : readers) reader.join();
  EXPECT_GT(cache().hit_bytes, 0U);
  EXPECT_EQ(cache().off, "");
  EXPECT_LE(cache().held_bytes, cache().usable_bytes);
}

TEST_F(CachedStore, AnotherSlowStoreBeginsEmptyAndADamagedMapToo) {
  ASSERT_OK(open());
  put("a", pattern(4 * kBlock, 1));
  read("a", 0, 4 * kBlock);
  store_.reset();
  {
    auto fast = open_store("local:" + root_ + "/fast", runtime_->runtime(), {});
    ASSERT_OK(fast);
    auto change = std::move(*(*fast)->begin());
    Bytes byte(1, std::byte{0x55});
    EXPECT_OK(change->write("cache/map", cached::kHeaderBytes + 3, slice_of(byte)).wait());
    EXPECT_OK(change->commit(Durability::durable).wait());
  }
  ASSERT_OK(open());
  EXPECT_EQ(cache().held_bytes, 0U);
  EXPECT_EQ(read("a", 0, 4 * kBlock), pattern(4 * kBlock, 1));
}

TEST(CacheFormat, TheExampleInTheSpecificationIsWhatWeReadAndWrite) {
  const auto bytes = format_example("cache.md", "map", cached::kHeaderBytes + cached::kRecordBytes);
  const cached::Header header{
      .block_bytes = kBlock, .slots = 4, .slow = cached::identity("dir:/data")};
  const cached::Record record{cached::block_id("a", "t", 0), 2, 5};
  const std::string made = cached::encode(header) + cached::encode(std::span(&record, 1));
  const auto span = std::as_bytes(std::span(made));
  EXPECT_EQ(std::vector<std::byte>(span.begin(), span.end()), bytes) << example_text(span);
  const auto map = cached::decode(span);
  ASSERT_OK(map);
  EXPECT_EQ(map->header, header);
  EXPECT_EQ(map->used, std::vector<cached::Record>{record});
}

TEST(CacheFormat, EveryChangedByteIsNoticed) {
  const cached::Header header{
      .block_bytes = kBlock, .slots = 4, .slow = cached::identity("dir:/data")};
  const cached::Record record{cached::block_id("a", "t", 0), 2, 5};
  std::string made = cached::encode(header) + cached::encode(std::span(&record, 1));
  for (char& byte : made) {
    byte = static_cast<char>(byte ^ 1);
    EXPECT_FALSE(cached::decode(std::as_bytes(std::span(made))));
    byte = static_cast<char>(byte ^ 1);
  }
}

TEST(CachePolicy, AScanDoesNotEvictWhatIsUsed) {
  cached::Policy policy(100);
  for (uint64_t i = 0; i < 50; ++i) policy.add({i, 0});
  for (uint64_t i = 0; i < 50; ++i) policy.hit({i, 0});
  for (uint64_t i = 1000; i < 3000; ++i) {
    policy.add({i, 0});
    ASSERT_LE(policy.size(), 100U);
  }
  for (uint64_t i = 0; i < 50; ++i) EXPECT_TRUE(policy.holds({i, 0})) << i;
}

// Objects of one block each; item i is object i.
std::unique_ptr<cached::Follower> follower_of(size_t objects, Plan plan) {
  std::vector<ObjectInfo> infos;
  for (size_t i = 0; i < objects; ++i) {
    plan.keys.push_back(std::to_string(i));
    plan.runs.push_back({.object = i, .bytes = kBlock});
    infos.push_back({.key = plan.keys.back(), .bytes = kBlock, .tag = "t"});
  }
  auto made = cached::Follower::make(std::move(plan), infos, kBlock, no_limit());
  EXPECT_OK(made);
  return std::move(*made);
}

// Stride 0 is one range again and again: a client must not keep a server busy with a few bytes.
TEST(CachePolicy, ManyItemsOfFewBlocksAreNamedAtOnce) {
  const std::vector<ObjectInfo> objects = {{.key = "a", .bytes = 10 * kBlock, .tag = "t"}};
  const auto made = [&](const PlanRun& run) {
    return cached::Follower::make({.keys = {"a"}, .runs = {run}, .order = Plan::Shuffled{}},
                                  objects, kBlock, no_limit());
  };
  const auto again = made({.offset = kBlock - 1, .bytes = 2, .items = uint64_t{1} << 40});
  ASSERT_OK(again);
  EXPECT_EQ((*again)->distinct_bytes(), 2 * kBlock);
  EXPECT_FALSE((*again)->names(cached::block_id("a", "t", 2)));
  EXPECT_EQ(code_of(made({.bytes = 1, .items = (uint64_t{1} << 40) + 1})), Code::invalid_argument);
  ASSERT_OK(made({.bytes = 10 * kBlock, .items = uint64_t{1} << 40})) << "its bytes still fit";
  const auto apart = made({.bytes = 1, .items = 5, .stride = 2 * kBlock});
  ASSERT_OK(apart);
  EXPECT_TRUE((*apart)->names(cached::block_id("a", "t", 8)));
  EXPECT_FALSE((*apart)->names(cached::block_id("a", "t", 7)));
}

// A mixture of a small source, which comes round often, and a large one.
// What docs/stores/cached.md says of the memory of a map: a plan names each block of a large set.
TEST(CachePolicy, APlanTakesLittleMemoryForABlock) {
  constexpr uint64_t kBlocks = 100'000;
  const ObjectInfo object{.key = "a", .bytes = kBlocks * kBlock, .tag = "t"};
  const Plan plan{.keys = {"a"},
                  .runs = {{.bytes = kBlock, .items = kBlocks, .stride = kBlock}},
                  .order = Plan::Shuffled{}};
  const size_t before = mallinfo2().uordblks;
  const auto follower = cached::Follower::make(plan, {object}, kBlock, no_limit());
  ASSERT_OK(follower);
  EXPECT_LE(mallinfo2().uordblks - before, 128 * kBlocks);
}

// What the tables of a plan may take is reserved before they are made, and given back.
TEST(CachePolicy, APlanReservesWhatItsTablesTake) {
  constexpr uint64_t kBlocks = 20'000;
  const ObjectInfo object{.key = "a", .bytes = kBlocks * kBlock, .tag = "t"};
  const PlanRun each{.bytes = kBlock, .items = kBlocks, .stride = kBlock};
  for (const bool listed : {true, false}) {
    Plan plan{.keys = {"a"}, .runs = {each}};
    if (!listed) plan.order = Plan::Shuffled{};
    Budget budget(64 * kMiB);
    {
      const size_t before = mallinfo2().uordblks;
      const auto follower = cached::Follower::make(plan, {object}, kBlock, budget);
      ASSERT_OK(follower);
      EXPECT_LE(mallinfo2().uordblks - before, budget.used());
      EXPECT_LE(budget.used(), 200 * kBlocks) << "and not much more";
    }
    EXPECT_EQ(budget.used(), 0U);
    Budget small(100 * kBlocks);
    const auto refused = cached::Follower::make(plan, {object}, kBlock, small);
    ASSERT_EQ(code_of(refused), Code::over_budget);
    EXPECT_NE(refused.error().message().find("budget_bytes"), std::string::npos)
        << refused.error().message();
    EXPECT_EQ(small.used(), 0U);
  }
}

TEST_F(CachedStore, APlanThatDoesNotFitTheBudgetIsRefusedAndTheOneBeforeStays) {
  runtime_ = std::move(*RuntimeOwner::make(
      {.engine = "posix", .cpu_threads = 2, .budget_bytes = options_.dram_bytes + 8 * kMiB}));
  ASSERT_OK(open());
  put("a", pattern(4 * kBlock, 1));
  ASSERT_OK(store_->follow({.keys = {"a"}, .runs = {{.bytes = kBlock}}}));
  Plan large{.keys = {"a"}};
  large.runs.assign(400'000, {.bytes = kBlock});
  EXPECT_EQ(code_of(store_->follow(large)), Code::over_budget);
  EXPECT_EQ(cache().plans, 1U);
  EXPECT_EQ(read("a", 0, 4 * kBlock), pattern(4 * kBlock, 1));
}

TEST(CachePolicy, AMixtureThatIsFollowedIsFetchedAsBeladyWould) {
  constexpr uint64_t kSmall = 40, kLarge = 400, kPlaces = 200, kReads = 20'000;
  const Plan::Mixed mixed{{kSmall, kLarge}, {0.3, 0.7}, 5};
  cached::Followers followers;
  followers.follow("", follower_of(kSmall + kLarge, {.order = mixed}));
  const Mixture mixture = *Mixture::make(mixed.weights, mixed.seed);
  std::vector<uint64_t> reads;
  for (uint64_t at = 0; at < 2 * kReads; ++at) {
    const Draw draw = mixture.draw(at);
    const uint64_t count = mixed.items[draw.source];
    reads.push_back(
        (draw.source == 0 ? 0 : kSmall) +
        Permutation(count, 5 + 1 + draw.source, draw.number / count).sample(draw.number % count));
  }
  cached::Policy policy(kPlaces);
  uint64_t misses = 0;
  for (uint64_t at = 0; at < kReads; ++at) {
    const auto id = cached::block_id(std::to_string(reads[at]), "t", 0);
    followers.read(id, {&policy});
    if (policy.holds(id)) continue;
    ++misses;
    const auto next = followers.next(id);
    if (policy.admits(next)) policy.add(id, next);
  }
  // Belady, which may also keep nothing of what it fetches.
  std::vector<uint64_t> next(reads.size()), last(kSmall + kLarge, reads.size());
  for (size_t at = reads.size(); at-- > 0;) next[at] = std::exchange(last[reads[at]], at);
  std::map<uint64_t, uint64_t> held;  // by next use
  uint64_t belady = 0;
  for (uint64_t at = 0; at < kReads; ++at) {
    if (held.erase(at) == 0) ++belady;
    held.emplace(next[at], reads[at]);
    if (held.size() > kPlaces) held.erase(std::prev(held.end()));
  }
  EXPECT_EQ(misses, belady);
}

TEST(CachePolicy, WhatIsNeverReadIsPassedBy) {
  const auto id = [](uint64_t item) { return cached::block_id(std::to_string(item), "t", 0); };
  const auto follower = follower_of(10'000, {});
  std::vector<cached::BlockId> changed;
  for (uint64_t item = 1; item < 4096; ++item) follower->read(id(item), changed);
  EXPECT_EQ(follower->next(id(0)), 0U) << "it may still come";
  for (uint64_t item = 4096; item < 9000; ++item) follower->read(id(item), changed);
  EXPECT_EQ(follower->next(id(0)), cached::kNever);
  EXPECT_EQ(follower->next(id(9999)), 999U);
}

TEST(CachePolicy, WhatNoPlanNamesEntersWhenAPlanIsOver) {
  cached::Policy policy(2);
  policy.add({1, 0}, 5);
  policy.add({2, 0}, cached::kSomeDay);
  EXPECT_FALSE(policy.admits({}));
  EXPECT_FALSE(policy.admits(cached::kSomeDay)) << "none is worth another's place";
  policy.plan({1, 0}, cached::kNever);
  ASSERT_TRUE(policy.admits({}));
  EXPECT_EQ(policy.add({3, 0}), (cached::BlockId{1, 0}));
  EXPECT_EQ(policy.add({4, 0}, cached::kSomeDay), (cached::BlockId{3, 0}));
}

TEST(CachePolicy, OfSeveralPlansTheEarliestUseCounts) {
  const auto id = [](uint64_t item) { return cached::block_id(std::to_string(item), "t", 0); };
  cached::Followers followers;
  followers.follow("a", follower_of(100, {}));
  EXPECT_EQ(followers.next(id(60)), 60U);
  followers.follow("b", follower_of(100, {.position = 50}));
  EXPECT_EQ(followers.next(id(60)), 2 * 10U);
  EXPECT_EQ(followers.next(id(100)), std::nullopt);
  followers.follow("b", nullptr);
  EXPECT_EQ(followers.next(id(60)), 60U);
}

TEST(CachePolicy, WhatComesBackSoonEntersTheMainQueue) {
  cached::Policy policy(100);
  for (uint64_t i = 0; i < 101; ++i) policy.add({i, 0});
  EXPECT_FALSE(policy.holds({0, 0}));
  policy.add({0, 0});
  for (uint64_t i = 1000; i < 1099; ++i) policy.add({i, 0});
  EXPECT_TRUE(policy.holds({0, 0})) << "all others passed through the small queue";
}

}  // namespace
}  // namespace stoker
