// The one suite that every Store passes: store.h line by line. What a store's features() lack is
// skipped, nothing else. A test program includes this once and instantiates it:
//
//   INSTANTIATE_TEST_SUITE_P(Memory, StoreConformance, ::testing::Values(StoreUnderTest{...}),
//   store_name);
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/store/open.h"
#include "stoker/testing/store_harness.h"

namespace stoker {

inline std::string store_name(const ::testing::TestParamInfo<StoreUnderTest>& info) {
  return info.param.name;
}

class StoreConformance : public ::testing::TestWithParam<StoreUnderTest> {
 protected:
  void SetUp() override {
    world_ = GetParam().make();
    StoreOptions options;
    options.create = true;
    options.capacity_bytes = 64 * kMiB;
    options.chunk_bytes = 64 * kKiB;
    options.objects_max = 1024;
    open(options);
  }
  void TearDown() override {
    store_.reset();
    world_.reset();
  }
  void open(const StoreOptions& options) {
    store_.reset();
    auto store = world_->open(options);
    ASSERT_TRUE(store) << store.error().message();
    store_ = std::move(*store);
  }
  std::unique_ptr<Transaction> begin() { return std::move(*store_->begin()); }

  // Commits one object of `bytes`, written whole.
  Version put(const std::string& key, Bytes bytes, Durability durability = Durability::durable) {
    auto change = begin();
    EXPECT_OK(change->resize(key, bytes.size()));
    EXPECT_OK(change->write(key, 0, slice_of(bytes)).wait());
    const auto version = change->commit(durability).wait();
    EXPECT_OK(version);
    return version ? *version : 0;
  }
  Bytes get(const std::string& key, std::string_view snapshot = {}) {
    return read_all(*store_, key, snapshot);
  }
  Code read_code(const std::string& key, uint64_t offset, size_t bytes,
                 std::string_view snapshot = {}) {
    Bytes into(bytes);
    return code_of(store_->read(key, offset, slice_of(into), {.snapshot = snapshot}).wait());
  }

  std::unique_ptr<StoreWorld> world_;
  std::unique_ptr<Store> store_;
};

TEST_P(StoreConformance, StartsEmptyAndDescribesItself) {
  EXPECT_EQ(store_->info().committed, 0U);
  EXPECT_EQ(store_->info().durable, 0U);
  EXPECT_FALSE(store_->info().composition.empty());
  EXPECT_TRUE(store_->info().read_only.empty());
  EXPECT_TRUE(store_->info().snapshots.empty());
  EXPECT_TRUE(store_->list("")->empty());
}

TEST_P(StoreConformance, ReadsWhatWasWritten) {
  for (const size_t size : {size_t{1}, size_t{511}, size_t{4095}, size_t{4096}, size_t{4097},
                            64 * kKiB - 1, 64 * kKiB, 64 * kKiB + 1, 1 * kMiB + 12345}) {
    const Bytes bytes = pattern(size, size);
    put("object", bytes);
    ASSERT_EQ(get("object"), bytes) << size;
    EXPECT_EQ(store_->stat("object")->bytes, size);
  }
}

TEST_P(StoreConformance, ReadsAnyRangeIntoAnyMemory) {
  const Bytes bytes = pattern(300'000, 1);
  put("object", bytes);
  std::mt19937_64 random(5);
  for (int i = 0; i < 300; ++i) {
    const size_t offset = random() % bytes.size();
    const size_t size =
        random() % std::min<size_t>(bytes.size() - offset, i % 3 == 0 ? 300'000 : 5000) + 1;
    const size_t skew = random() % 64;
    Bytes into(size + skew + 8, std::byte{0x5A});
    EXPECT_OK(store_->read("object", offset, {into.data() + skew, size}).wait());
    ASSERT_EQ(std::memcmp(into.data() + skew, bytes.data() + offset, size), 0)
        << offset << " + " << size;
    for (size_t rim = skew + size; rim < into.size(); ++rim)
      ASSERT_EQ(into[rim], std::byte{0x5A}) << "wrote beyond the buffer";
    for (size_t rim = 0; rim < skew; ++rim)
      ASSERT_EQ(into[rim], std::byte{0x5A}) << "wrote before the buffer";
  }
}

TEST_P(StoreConformance, WritesAnyRangeFromAnyMemory) {
  if (!store_->features().update) GTEST_SKIP() << "it writes whole objects only";
  Bytes model = pattern(300'000, 2);
  put("object", model);
  std::mt19937_64 random(6);
  for (int i = 0; i < 60; ++i) {
    auto change = begin();
    for (int piece = 0; piece < 4; ++piece) {
      const size_t offset = random() % model.size();
      const size_t size =
          random() % std::min<size_t>(model.size() - offset, i % 3 == 0 ? 200'000 : 9000) + 1;
      const size_t skew = random() % 64;
      Bytes from = pattern(size + skew, random());
      const Slice out{from.data() + skew, size};
      EXPECT_OK(change->write("object", offset, out).wait());
      std::memcpy(model.data() + offset, out.data, size);
    }
    EXPECT_OK(change->commit(i % 2 == 0 ? Durability::durable : Durability::deferred).wait());
    ASSERT_EQ(get("object"), model) << i;
  }
}

TEST_P(StoreConformance, NewBytesReadAsZerosAndCutBytesDoNotComeBack) {
  if (!store_->features().update) GTEST_SKIP() << "it writes whole objects only";
  {
    auto change = begin();
    EXPECT_OK(change->resize("sparse", 40 * kMiB));
    EXPECT_OK(change->commit(Durability::durable).wait());
  }
  EXPECT_LT(store_->info().used_bytes, 1 * kMiB) << "zeros cost no space";
  Bytes into(100'000, std::byte{1});
  EXPECT_OK(store_->read("sparse", 39 * kMiB - 7, slice_of(into)).wait());
  EXPECT_EQ(into, Bytes(100'000));

  const Bytes bytes = pattern(200'000, 3);
  put("object", bytes);
  for (const size_t cut :
       {size_t{150'001}, size_t{131'072}, size_t{70'000}, size_t{5}, size_t{0}}) {
    {
      auto change = begin();
      EXPECT_OK(change->resize("object", cut));
      EXPECT_OK(change->resize("object", 200'000));
      Bytes expected(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(cut));
      expected.resize(200'000);
      Bytes staged(200'000, std::byte{1});
      EXPECT_OK(change->read("object", 0, slice_of(staged)).wait());
      ASSERT_EQ(staged, expected) << cut;
      EXPECT_OK(change->commit(Durability::durable).wait());
      ASSERT_EQ(get("object"), expected) << cut;
    }
    put("object", bytes);
  }
}

TEST_P(StoreConformance, ListsByPrefixInOrder) {
  // '-' sorts before '/', '0' behind it: the order is that of whole keys, not of folders.
  for (const char* key : {"m/10", "m/1", "a", "m-1/x", "m0", "n/1/deep", "m/2"})
    put(key, pattern(10, 1));
  const auto keys = [&](std::string_view prefix) {
    std::vector<std::string> found;
    const auto listed = store_->list(prefix);
    for (const ObjectInfo& info : *listed) found.push_back(info.key);
    return found;
  };
  EXPECT_EQ(keys(""),
            (std::vector<std::string>{"a", "m-1/x", "m/1", "m/10", "m/2", "m0", "n/1/deep"}));
  EXPECT_EQ(keys("m"), (std::vector<std::string>{"m-1/x", "m/1", "m/10", "m/2", "m0"}));
  EXPECT_EQ(keys("m/"), (std::vector<std::string>{"m/1", "m/10", "m/2"}));
  EXPECT_EQ(keys("m/1"), (std::vector<std::string>{"m/1", "m/10"}));
  EXPECT_EQ(keys("n/1/"), (std::vector<std::string>{"n/1/deep"}));
  EXPECT_TRUE(keys("z").empty());
}

// Keys of objects and names of folders, in turn.
TEST_P(StoreConformance, ListsWhatStandsBelowAPrefix) {
  for (const char* key : {"m/10", "m/1", "a", "m-1/x", "m0", "n/1/deep", "m/2"})
    put(key, pattern(10, 1));
  using Names = std::vector<std::string>;
  const auto level = [&](std::string_view prefix) {
    const auto listed = store_->list_level(prefix);
    EXPECT_OK(listed) << prefix;
    std::pair<Names, Names> found;
    for (const ObjectInfo& info : listed->objects) {
      found.first.push_back(info.key);
      EXPECT_EQ(info.tag, store_->stat(info.key)->tag);
    }
    found.second = listed->folders;
    return found;
  };
  EXPECT_EQ(level(""), std::pair(Names{"a", "m0"}, Names{"m-1/", "m/", "n/"}));
  EXPECT_EQ(level("m"), std::pair(Names{"m0"}, Names{"m-1/", "m/"}));
  EXPECT_EQ(level("m/"), std::pair(Names{"m/1", "m/10", "m/2"}, Names{}));
  EXPECT_EQ(level("m/1"), std::pair(Names{"m/1", "m/10"}, Names{}));
  EXPECT_EQ(level("n/"), std::pair(Names{}, Names{"n/1/"}));
  EXPECT_EQ(level("n/1"), std::pair(Names{}, Names{"n/1/"}));
  EXPECT_EQ(level("z"), std::pair(Names{}, Names{}));
  EXPECT_EQ(level("z/z"), std::pair(Names{}, Names{}));
  EXPECT_EQ(code_of(store_->list_level("", "no snapshot")), Code::not_found);
}

TEST_P(StoreConformance, ErrorsHaveTheirCodes) {
  put("object", pattern(1000, 1));
  EXPECT_EQ(code_of(store_->stat("none")), Code::not_found);
  EXPECT_EQ(read_code("none", 0, 1), Code::not_found);
  EXPECT_EQ(read_code("object", 0, 1001), Code::invalid_argument);
  EXPECT_EQ(read_code("object", 1000, 1), Code::invalid_argument);
  EXPECT_EQ(read_code("object", UINT64_MAX, 2), Code::invalid_argument);
  EXPECT_EQ(read_code("object", 0, 1, "no snapshot"), Code::not_found);
  EXPECT_EQ(code_of(store_->list("", "no snapshot")), Code::not_found);
  EXPECT_EQ(code_of(store_->stat("object", "no snapshot")), Code::not_found);
  Bytes bytes(2000);
  {
    auto change = begin();
    EXPECT_EQ(code_of(change->remove("none")), Code::not_found);
    EXPECT_EQ(code_of(change->resize("", 5)), Code::invalid_argument);
    for (const uint32_t chunk : {1U, 4096U, 65536U + 512U, 16U << 20})
      EXPECT_EQ(code_of(change->resize("new", 5, chunk)), Code::invalid_argument);
  }
  if (!store_->features().update) return;
  {
    auto change = begin();
    EXPECT_EQ(code_of(change->write("none", 0, slice_of(bytes)).wait()), Code::not_found);
    EXPECT_EQ(code_of(change->write("object", 0, slice_of(bytes)).wait()), Code::invalid_argument);
    EXPECT_EQ(code_of(change->write("object", UINT64_MAX - 5, slice_of(bytes)).wait()),
              Code::invalid_argument);
    EXPECT_EQ(code_of(change->read("none", 0, slice_of(bytes)).wait()), Code::not_found);
    EXPECT_EQ(code_of(change->resize("object", 5, 128 * kKiB)), Code::invalid_argument)
        << "the chunk size is fixed";
    EXPECT_OK(change->resize("object", 5, 64 * kKiB));
  }
  {
    auto change = begin();
    EXPECT_OK(change->remove("object"));
    EXPECT_EQ(code_of(change->remove("object")), Code::not_found);
    EXPECT_EQ(code_of(change->write("object", 0, slice_of(bytes)).wait()), Code::not_found);
    EXPECT_EQ(code_of(change->read("object", 0, slice_of(bytes)).wait()), Code::not_found);
  }
  EXPECT_EQ(get("object"), pattern(1000, 1)) << "abandoned";
}

TEST_P(StoreConformance, AFailedWriteFailsTheCommitAndNothingOfItShows) {
  if (!store_->features().update) GTEST_SKIP() << "it writes whole objects only";
  put("object", pattern(1000, 1));
  Bytes bytes(2000);
  auto change = begin();
  EXPECT_OK(change->write("object", 0, {bytes.data(), 100}).wait());
  EXPECT_EQ(code_of(change->write("object", 900, {bytes.data(), 200}).wait()),
            Code::invalid_argument);
  EXPECT_EQ(code_of(change->commit(Durability::durable).wait()), Code::invalid_argument);
  EXPECT_EQ(get("object"), pattern(1000, 1));
  put("object", pattern(500, 2));  // nobody owns it any more
}

TEST_P(StoreConformance, ATransactionIsSeenWholeOrNotAtAll) {
  if (store_->features().atomic != AtomicUnit::transaction)
    GTEST_SKIP() << "its atomic unit is the object";
  put("a", pattern(100'000, 1));
  put("gone", pattern(10, 1));
  auto change = begin();
  Bytes staged = pattern(100'000, 2);
  EXPECT_OK(change->write("a", 0, slice_of(staged)).wait());
  EXPECT_OK(change->resize("b", 70'000));
  EXPECT_OK(change->write("b", 0, {staged.data(), 70'000}).wait());
  EXPECT_OK(change->remove("gone"));
  EXPECT_EQ(get("a"), pattern(100'000, 1));
  EXPECT_EQ(code_of(store_->stat("b")), Code::not_found);
  EXPECT_OK(store_->stat("gone"));
  const auto version = change->commit(Durability::durable).wait();
  ASSERT_TRUE(version);
  EXPECT_EQ(get("a"), staged);
  EXPECT_EQ(get("b"), pattern(70'000, 2));
  EXPECT_EQ(code_of(store_->stat("gone")), Code::not_found);
  EXPECT_EQ(store_->stat("a")->version, *version);
  EXPECT_EQ(store_->stat("b")->version, *version);
  EXPECT_EQ(store_->info().committed, *version);
}

TEST_P(StoreConformance, ATransactionReadsItsOwnBytes) {
  if (!store_->features().update) GTEST_SKIP() << "it writes whole objects only";
  Bytes expected = pattern(300'000, 1);
  put("object", expected);
  put("other", pattern(1000, 9));
  auto change = begin();
  for (const auto& [offset, size] : std::vector<std::pair<size_t, size_t>>{
           {0, 65'536}, {65'540, 100}, {100, 200}, {190'000, 20'000}, {299'999, 1}}) {
    Bytes from = pattern(size, offset + 77);
    const auto written = change->write("object", offset, slice_of(from));
    std::memcpy(expected.data() + offset, from.data(), size);
    EXPECT_OK(written.wait());
    Bytes into(expected.size());
    EXPECT_OK(change->read("object", 0, slice_of(into)).wait());
    ASSERT_EQ(into, expected) << offset;
  }
  Bytes other(1000);
  EXPECT_OK(change->read("other", 0, slice_of(other)).wait());
  EXPECT_EQ(other, pattern(1000, 9)) << "an object it did not touch";
  EXPECT_OK(change->commit(Durability::deferred).wait());
  Bytes into(expected.size());
  EXPECT_OK(change->read("object", 0, slice_of(into)).wait());
  EXPECT_EQ(into, expected) << "also after commit";
}

// Large enough that a store may have put some of it on its disks before.
TEST_P(StoreConformance, ATransactionReadsALargeObjectOfItsOwn) {
  if (!store_->features().update) GTEST_SKIP() << "it writes whole objects only";
  Bytes expected = pattern(5 * kMiB + 4321, 1);
  auto change = begin();
  ASSERT_OK(change->resize("large", expected.size()));
  ASSERT_OK(change->write("large", 0, slice_of(expected)).wait());
  Bytes into(expected.size());
  EXPECT_OK(change->read("large", 0, slice_of(into)).wait());
  EXPECT_TRUE(into == expected);
  Bytes over = pattern(70'000, 2);
  ASSERT_OK(change->write("large", 123'456, slice_of(over)).wait());
  std::memcpy(expected.data() + 123'456, over.data(), over.size());
  EXPECT_OK(change->read("large", 0, slice_of(into)).wait());
  EXPECT_TRUE(into == expected);
  EXPECT_OK(change->commit(Durability::durable).wait());
  EXPECT_OK(change->read("large", 0, slice_of(into)).wait());
  EXPECT_TRUE(into == expected) << "also after commit";
  change.reset();
  EXPECT_TRUE(get("large") == expected);
}

TEST_P(StoreConformance, TheLastWriteOfARangeWinsWithinATransaction) {
  put("object", pattern(200'000, 1));
  const uint64_t used = store_->info().used_bytes;
  auto change = begin();
  Bytes last;
  EXPECT_OK(change->resize("object", 200'000));
  for (uint64_t round = 0; round < 30; ++round) {
    last = pattern(200'000, 100 + round);
    EXPECT_OK(change->write("object", 0, slice_of(last)).wait());
  }
  EXPECT_LE(store_->info().used_bytes, 3 * used) << "replaced staged bytes are free again";
  EXPECT_OK(change->commit(Durability::durable).wait());
  EXPECT_EQ(get("object"), last);
}

TEST_P(StoreConformance, AbandoningLeavesNothing) {
  if (!store_->features().update) GTEST_SKIP() << "it writes whole objects only";
  put("object", pattern(100'000, 1));
  const uint64_t used = store_->info().used_bytes;
  for (int i = 0; i < 100; ++i) {  // more in all than the store can hold, if anything leaked
    Bytes staged = pattern(1 * kMiB, 2);
    auto change = begin();
    EXPECT_OK(change->resize("big", staged.size()));
    EXPECT_OK(change->write("big", 0, slice_of(staged)).wait());
    Bytes part = pattern(1000, 3);
    EXPECT_OK(change->write("object", 5, slice_of(part)).wait());
  }
  EXPECT_EQ(get("object"), pattern(100'000, 1));
  EXPECT_EQ(code_of(store_->stat("big")), Code::not_found);
  // Dropping does not wait: what is still being merged gives up its space a moment later.
  for (int i = 0; i < 5000 && store_->info().used_bytes != used; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(store_->info().used_bytes, used);
}

TEST_P(StoreConformance, AnOpenTransactionOwnsWhatItWrote) {
  if (!store_->features().update) GTEST_SKIP() << "it writes whole objects only";
  put("object", pattern(1000, 1));
  Bytes bytes(10);
  auto first = begin();
  EXPECT_OK(first->write("object", 0, slice_of(bytes)).wait());
  {
    auto second = begin();
    EXPECT_EQ(code_of(second->write("object", 500, slice_of(bytes)).wait()), Code::busy);
    EXPECT_EQ(code_of(second->resize("object", 5)), Code::busy);
    EXPECT_EQ(code_of(second->remove("object")), Code::busy);
    EXPECT_OK(second->resize("another", 5));
  }
  EXPECT_OK(first->commit(Durability::durable).wait());
  auto third = begin();  // although `first` still exists
  EXPECT_OK(third->write("object", 0, slice_of(bytes)).wait());
  third.reset();
  auto fourth = begin();
  EXPECT_OK(fourth->remove("object"));
  EXPECT_OK(fourth->commit(Durability::durable).wait());
}

TEST_P(StoreConformance, CommitIsCalledOnce) {
  put("object", pattern(10, 1));
  Bytes bytes(10);
  auto change = begin();
  EXPECT_OK(change->commit(Durability::durable).wait());
  EXPECT_EQ(code_of(change->commit(Durability::durable).wait()), Code::invalid_argument);
  EXPECT_EQ(code_of(change->write("object", 0, slice_of(bytes)).wait()), Code::invalid_argument);
  EXPECT_EQ(code_of(change->resize("object", 5)), Code::invalid_argument);
  EXPECT_EQ(code_of(change->remove("object")), Code::invalid_argument);
  EXPECT_EQ(get("object"), pattern(10, 1));
}

TEST_P(StoreConformance, VersionsGrowByOneAndDurableOnesCarryDeferredOnes) {
  if (store_->features().atomic != AtomicUnit::transaction)
    GTEST_SKIP() << "its atomic unit is the object";
  const Version first = put("a", pattern(10, 1));
  EXPECT_EQ(first, 1U);
  EXPECT_EQ(store_->info().durable, first);
  EXPECT_EQ(put("b", pattern(10, 1), Durability::deferred), first + 1);
  EXPECT_EQ(put("c", pattern(10, 1), Durability::deferred), first + 2);
  EXPECT_EQ(store_->info().committed, first + 2);
  EXPECT_OK(begin()->commit(Durability::durable).wait());  // empty: only makes the others durable
  EXPECT_GE(store_->info().durable, first + 2);
  EXPECT_EQ(store_->info().committed, store_->info().durable);
  EXPECT_EQ(store_->stat("a")->version, first);
  EXPECT_EQ(store_->stat("b")->version, first + 1);
}

TEST_P(StoreConformance, SnapshotsKeepTheirVersion) {
  if (!store_->features().snapshots) GTEST_SKIP();
  put("object", pattern(200'000, 1));
  put("removed", pattern(5'000, 1));
  put("deferred", pattern(5'000, 4), Durability::deferred);
  EXPECT_OK(store_->snapshot("one").wait());
  EXPECT_GE(store_->info().durable, store_->info().snapshots.at(0).version)
      << "what has a name is durable";
  EXPECT_EQ(code_of(store_->snapshot("one").wait()), Code::already_exists);
  EXPECT_EQ(code_of(store_->snapshot("").wait()), Code::invalid_argument);
  for (uint64_t round = 0; round < 20; ++round) put("object", pattern(200'000, 10 + round));
  {
    auto change = begin();
    EXPECT_OK(change->remove("removed"));
    EXPECT_OK(change->commit(Durability::durable).wait());
  }
  put("later", pattern(10, 1));
  EXPECT_OK(store_->snapshot("two").wait());
  put("object", pattern(100, 50));
  EXPECT_EQ(get("object", "one"), pattern(200'000, 1));
  EXPECT_EQ(get("removed", "one"), pattern(5'000, 1));
  EXPECT_EQ(get("deferred", "one"), pattern(5'000, 4));
  EXPECT_EQ(get("object", "two"), pattern(200'000, 29));
  EXPECT_EQ(read_code("later", 0, 1, "one"), Code::not_found);
  EXPECT_EQ(store_->stat("object", "one")->bytes, 200'000U);
  EXPECT_EQ(store_->list("", "one")->size(), 3U);
  EXPECT_EQ(store_->info().snapshots.size(), 2U);
  const uint64_t used = store_->info().used_bytes;
  EXPECT_OK(store_->drop("one").wait());
  EXPECT_EQ(code_of(store_->drop("one").wait()), Code::not_found);
  EXPECT_EQ(read_code("object", 0, 1, "one"), Code::not_found);
  EXPECT_EQ(get("object", "two"), pattern(200'000, 29));
  EXPECT_EQ(get("object"), pattern(100, 50));
  EXPECT_LT(store_->info().used_bytes, used) << "what only the snapshot saw is free";
  EXPECT_OK(store_->snapshot("one").wait());
  EXPECT_EQ(get("object", "one"), pattern(100, 50)) << "a name can be used again";
}

TEST_P(StoreConformance, ACommitNamesTheVersionThatItMakes) {
  if (!store_->features().snapshots) {
    EXPECT_EQ(code_of(begin()->name("step")), Code::unsupported);
    return;
  }
  put("deferred", pattern(5'000, 4), Durability::deferred);
  const auto named = [this](std::string_view name, uint64_t seed, Durability durability) {
    auto change = begin();
    Bytes from = pattern(200'000, seed);
    EXPECT_OK(change->resize("object", from.size()));
    EXPECT_OK(change->name(name));
    EXPECT_OK(change->write("object", 0, slice_of(from)).wait());
    return change->commit(durability).wait();
  };
  EXPECT_OK(named("one", 1, Durability::durable));
  EXPECT_EQ(store_->info().snapshots.at(0).version, store_->info().committed);
  EXPECT_EQ(store_->info().durable, store_->info().committed);
  EXPECT_EQ(code_of(named("one", 2, Durability::durable)), Code::already_exists)
      << "and nothing changed";
  EXPECT_EQ(get("object"), pattern(200'000, 1));
  EXPECT_EQ(code_of(named("two", 2, Durability::deferred)), Code::invalid_argument);
  EXPECT_EQ(code_of(begin()->name("")), Code::invalid_argument);
  EXPECT_OK(named("two", 3, Durability::durable));
  put("object", pattern(100, 50));
  EXPECT_EQ(get("object", "one"), pattern(200'000, 1));
  EXPECT_EQ(get("deferred", "one"), pattern(5'000, 4));
  EXPECT_EQ(get("object", "two"), pattern(200'000, 3));
  EXPECT_EQ(store_->info().snapshots.size(), 2U);
  EXPECT_OK(store_->drop("one", Durability::deferred).wait());
  EXPECT_EQ(read_code("object", 0, 1, "one"), Code::not_found);
  EXPECT_EQ(code_of(store_->drop("one", Durability::deferred).wait()), Code::not_found);
  EXPECT_OK(named("one", 4, Durability::durable));
  EXPECT_EQ(get("object", "one"), pattern(200'000, 4));
}

TEST_P(StoreConformance, AFullStoreSaysSoAndWorksAgainWhenSpaceIsMade) {
  if (store_->info().capacity_bytes == 0) GTEST_SKIP() << "it has no capacity of its own";
  const Bytes block = pattern(1 * kMiB, 1);
  Code code = Code::cancelled;
  size_t written = 0;
  for (; written < 200; ++written) {
    auto change = begin();
    Bytes from = block;
    EXPECT_OK(change->resize("block/" + std::to_string(written), from.size()));
    const auto status = change->write("block/" + std::to_string(written), 0, slice_of(from)).wait();
    if (!status) {
      code = status.error().code;
      EXPECT_EQ(code_of(change->commit(Durability::durable).wait()), Code::out_of_space);
      break;
    }
    EXPECT_OK(change->commit(Durability::durable).wait());
  }
  EXPECT_EQ(code, Code::out_of_space);
  EXPECT_GE(written, 60U) << "of 64 MiB nearly all can be used";
  for (size_t i = 0; i < written; ++i) ASSERT_EQ(get("block/" + std::to_string(i)), block) << i;
  auto change = begin();
  for (size_t i = 0; i < 10; ++i) EXPECT_OK(change->remove("block/" + std::to_string(i)));
  EXPECT_OK(change->commit(Durability::durable).wait());
  change.reset();
  for (size_t i = 0; i < 9; ++i) put("again/" + std::to_string(i), block);
  for (size_t i = 0; i < 9; ++i) ASSERT_EQ(get("again/" + std::to_string(i)), block) << i;
}

TEST_P(StoreConformance, SpaceIsReusedForever) {
  if (store_->info().capacity_bytes == 0) GTEST_SKIP() << "it has no capacity of its own";
  const uint64_t rounds = kLess == 1 ? 40 : 16;
  for (uint64_t round = 0; round < rounds; ++round) {  // 8 MiB each through a store of 64
    const Bytes bytes = pattern(8 * kMiB + 4097, round);
    put("object", bytes, round % 3 == 0 ? Durability::durable : Durability::deferred);
    if (round % 8 == 7) {
      ASSERT_EQ(get("object"), bytes) << round;
    }
    if (round % 3 == 2) {
      EXPECT_OK(begin()->commit(Durability::durable).wait());
    }
  }
}

TEST_P(StoreConformance, LargeObjectsAndEveryChunkSize) {
  std::vector<uint32_t> sizes = {64, 516, 8192};
  if (kLess == 1) sizes.insert(sizes.end(), {68, 128, 256, 1024, 4096});
  for (const uint32_t kib : sizes) {
    const auto chunk = static_cast<uint32_t>(kib * kKiB);
    Bytes bytes = pattern(20 * kMiB + 333, chunk);
    auto change = begin();
    EXPECT_OK(change->resize("large", bytes.size(), chunk));
    const size_t half = 9 * kMiB + 17;
    const auto first = change->write("large", 0, {bytes.data(), half});
    const auto second = change->write("large", half, {bytes.data() + half, bytes.size() - half});
    EXPECT_OK(first.wait());
    EXPECT_OK(second.wait());
    EXPECT_OK(change->commit(Durability::durable).wait());
    if (store_->features().update) {
      EXPECT_EQ(store_->stat("large")->chunk_bytes, chunk);
    }
    ASSERT_EQ(get("large"), bytes) << chunk;
    change = begin();
    EXPECT_OK(change->remove("large"));
    EXPECT_OK(change->commit(Durability::durable).wait());
  }
}

TEST_P(StoreConformance, ManyWritesInFlightAtOnce) {
  Bytes bytes = pattern(16 * kMiB, 4);
  auto change = begin();
  EXPECT_OK(change->resize("object", bytes.size()));
  std::vector<Future<void>> writes;
  for (size_t at = 0; at < bytes.size(); at += 64 * kKiB)
    writes.push_back(change->write("object", at, {bytes.data() + at, 64 * kKiB}));
  EXPECT_OK(change->commit(Durability::durable).wait());  // without waiting for them: commit does
  for (const auto& write : writes) {
    EXPECT_TRUE(write.ready()) << "a commit is done after its writes";
    EXPECT_OK(write.wait());
  }
  EXPECT_EQ(get("object"), bytes);
}

// Writers commit two objects with the same round number; readers check each chunk is of one round
// and rounds never go back.
TEST_P(StoreConformance, ReadersBesideACommittingWriter) {
  constexpr size_t kBytes = 256 * 1024 + 100;
  const auto fill = [](uint64_t round) {
    Bytes bytes(kBytes);
    for (size_t at = 0; at + 8 <= kBytes; at += 8) std::memcpy(bytes.data() + at, &round, 8);
    return bytes;
  };
  put("object", fill(1));
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 3; ++reader) {
    readers.emplace_back([&] {
      uint64_t newest = 0;
      while (!stop) {
        Bytes into(kBytes);
        EXPECT_OK(store_->read("object", 0, slice_of(into)).wait());
        uint64_t round = 0;
        std::memcpy(&round, into.data(), 8);
        for (size_t at = 0; at + 8 <= kBytes; at += 8) {
          uint64_t each = 0;
          std::memcpy(&each, into.data() + at, 8);
          ASSERT_EQ(each, round) << "a read mixes two versions";
        }
        EXPECT_GE(round, newest);
        newest = round;
      }
    });
  }
  for (uint64_t round = 2; round < 60; ++round)
    put("object", fill(round), round % 4 == 0 ? Durability::durable : Durability::deferred);
  stop = true;
  for (auto& reader : readers) reader.join();
}

TEST_P(StoreConformance, WritersOfDifferentObjectsRunSideBySide) {
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 4; ++writer) {
    writers.emplace_back([this, writer] {
      const std::string key = "object/" + std::to_string(writer);
      for (uint64_t round = 0; round < 25; ++round) {
        const Bytes bytes = pattern(100'000 + round, static_cast<uint64_t>(writer) * 1000 + round);
        put(key, bytes, round % 2 == 0 ? Durability::durable : Durability::deferred);
        ASSERT_EQ(get(key), bytes);
      }
    });
  }
  for (auto& writer : writers) writer.join();
  EXPECT_EQ(store_->info().committed, 100U);
}

TEST_P(StoreConformance, WhatIsDurableIsThereAfterReopening) {
  if (!world_->persists()) GTEST_SKIP() << "this store forgets when it is closed";
  put("a", pattern(100'000, 1));
  if (store_->features().snapshots) {
    EXPECT_OK(store_->snapshot("named").wait());
  }
  put("a", pattern(5'000, 2), Durability::deferred);
  const Version version = put("b", pattern(1 * kMiB + 1, 3));
  for (int i = 0; i < 3; ++i) {
    open({});
    EXPECT_EQ(get("a"), pattern(5'000, 2));
    EXPECT_EQ(get("b"), pattern(1 * kMiB + 1, 3));
    if (store_->features().versions) {
      EXPECT_EQ(store_->info().committed, version);
      EXPECT_EQ(store_->info().durable, version);
      EXPECT_EQ(store_->stat("b")->version, version);
      EXPECT_EQ(store_->stat("b")->chunk_bytes, 64 * kKiB);
    }
    if (store_->features().snapshots) {
      EXPECT_EQ(get("a", "named"), pattern(100'000, 1));
    }
  }
  StoreOptions read_only;
  read_only.read_only = true;
  open(read_only);
  EXPECT_EQ(get("b"), pattern(1 * kMiB + 1, 3));
  auto change = store_->begin();
  Bytes bytes(10);
  EXPECT_EQ(
      change ? code_of((*change)->write("b", 0, slice_of(bytes)).wait()) : change.error().code,
      Code::read_only);
  if (change) change->reset();
  if (store_->features().versions) {
    EXPECT_EQ(code_of(store_->snapshot("x").wait()), Code::read_only);
  }
}

// ---- stores that begin objects anew

TEST_P(StoreConformance, WithoutUpdatesAnObjectIsWrittenWholeAndAlone) {
  if (store_->features().update) GTEST_SKIP() << "it has updates";
  put("object", pattern(200'000, 1));
  Bytes bytes = pattern(1000, 2);
  {
    auto change = begin();
    EXPECT_EQ(code_of(change->write("object", 0, slice_of(bytes)).wait()), Code::unsupported)
        << "not resized in this transaction";
    EXPECT_EQ(code_of(change->commit(Durability::durable).wait()), Code::unsupported)
        << "a failed write fails the commit";
  }
  {
    auto change = begin();
    EXPECT_OK(change->resize("object", 1000));
    EXPECT_EQ(code_of(change->write("object", 500, slice_of(bytes)).wait()), Code::invalid_argument)
        << "beyond the end";
    EXPECT_EQ(code_of(change->commit(Durability::durable).wait()), Code::invalid_argument);
  }
  EXPECT_EQ(get("object"), pattern(200'000, 1));
  {
    auto change = begin();
    EXPECT_OK(change->resize("object", 5000));
    EXPECT_OK(change->write("object", 1000, slice_of(bytes)).wait());
    EXPECT_EQ(code_of(change->resize("another", 10)), Code::unsupported)
        << "one object a transaction";
    EXPECT_EQ(code_of(change->remove("another")), Code::unsupported);
    EXPECT_EQ(code_of(change->read("object", 0, slice_of(bytes)).wait()), Code::unsupported)
        << "what is staged cannot be read";
    EXPECT_OK(change->commit(Durability::durable).wait());
  }
  Bytes expected(5000);
  std::memcpy(expected.data() + 1000, bytes.data(), bytes.size());
  EXPECT_EQ(get("object"), expected)
      << "nothing of the old object stays; what was not written is zeros";
  {
    auto change = begin();
    EXPECT_OK(change->remove("object"));
    EXPECT_OK(change->commit(Durability::durable).wait());
  }
  EXPECT_EQ(code_of(store_->stat("object")), Code::not_found);
  put("object", {});
  EXPECT_EQ(store_->stat("object")->bytes, 0U);
}

TEST_P(StoreConformance, WhatIsAbandonedIsNeverSeen) {
  put("object", pattern(1000, 1));
  for (int i = 0; i < 10; ++i) {
    auto change = begin();
    Bytes staged = pattern(1 * kMiB, 2);
    EXPECT_OK(change->resize("object", staged.size()));
    const auto writing = change->write("object", 0, slice_of(staged));
    change.reset();  // does not wait
    writing.wait();
  }
  EXPECT_EQ(get("object"), pattern(1000, 1));
  EXPECT_EQ(store_->list("")->size(), 1U);
}

// ---- conditions

TEST_P(StoreConformance, ATagTellsOneContentFromAnother) {
  std::set<std::string> tags;
  for (uint64_t round = 0; round < 10; ++round) {
    put("object", pattern(1000, round));  // of one size, at once one after the other
    const std::string tag = store_->stat("object")->tag;
    EXPECT_FALSE(tag.empty());
    EXPECT_TRUE(tags.insert(tag).second)
        << "round " << round << " has the tag of an earlier one: " << tag;
    EXPECT_EQ(store_->stat("object")->tag, tag);
    EXPECT_EQ(store_->list("")->at(0).tag, tag);
  }
  if (!world_->persists()) return;
  const std::string tag = store_->stat("object")->tag;
  open({});
  EXPECT_EQ(store_->stat("object")->tag, tag);
}

TEST_P(StoreConformance, AConditionHoldsOrTheCommitIsAConflict) {
  if (!store_->features().conditional) {
    EXPECT_EQ(code_of(begin()->require("object", kAbsent)), Code::unsupported);
    return;
  }
  const auto change_if = [this](std::string_view tag, uint64_t seed) {
    auto change = begin();
    Bytes bytes = pattern(70'000, seed);
    EXPECT_OK(change->resize("object", bytes.size()));
    EXPECT_OK(change->write("object", 0, slice_of(bytes)).wait());
    EXPECT_OK(change->require("object", tag));
    return change->commit(Durability::durable).wait();
  };
  EXPECT_EQ(code_of(change_if("no such tag", 1)), Code::conflict) << "it is not there at all";
  EXPECT_EQ(code_of(store_->stat("object")), Code::not_found);
  EXPECT_OK(change_if(kAbsent, 2));
  EXPECT_EQ(code_of(change_if(kAbsent, 3)), Code::conflict);
  EXPECT_EQ(get("object"), pattern(70'000, 2));
  const std::string tag = store_->stat("object")->tag;
  EXPECT_OK(change_if(tag, 4));
  EXPECT_EQ(code_of(change_if(tag, 5)), Code::conflict) << "the tag of the content before";
  EXPECT_EQ(get("object"), pattern(70'000, 4));
  put("object", pattern(70'000, 6));  // a conflict leaves nothing behind
  {
    auto change = begin();
    EXPECT_OK(change->require("object", tag));
    EXPECT_OK(change->remove("object"));
    const Code code = code_of(change->commit(Durability::durable).wait());
    EXPECT_TRUE(code == Code::conflict || (!store_->features().update && code == Code::unsupported))
        << "not all can remove under a condition";
  }
  EXPECT_EQ(get("object"), pattern(70'000, 6));
}

TEST_P(StoreConformance, OfThoseWhoRaceToMakeAnObjectOneWins) {
  if (!store_->features().conditional) GTEST_SKIP() << "it has no conditions";
  for (int round = 0; round < 10; ++round) {
    const std::string key = "race/" + std::to_string(round);
    std::atomic<int> won{0};
    std::atomic<uint64_t> winner{99};
    std::vector<std::thread> racers;
    for (uint64_t racer = 0; racer < 4; ++racer) {
      racers.emplace_back([&, racer] {
        auto change = begin();
        Bytes bytes = pattern(1000, racer);
        // Where an open transaction owns what it writes, the others are told so before they commit.
        Status status = change->resize(key, bytes.size());
        if (status) status = change->write(key, 0, slice_of(bytes)).wait();
        if (status) status = change->require(key, kAbsent);
        if (status) {
          const auto committed = change->commit(Durability::durable).wait();
          if (!committed) status = committed.error();
        }
        if (status) {
          ++won;
          winner = racer;
        } else {
          EXPECT_TRUE(status.error().code == Code::conflict || status.error().code == Code::busy)
              << status.error().message();
        }
      });
    }
    for (auto& racer : racers) racer.join();
    ASSERT_EQ(won, 1) << key;
    ASSERT_EQ(get(key), pattern(1000, winner)) << key;
  }
}

// Commits that wait together share a record: a condition is of what those before it leave, not of
// what was there when they came.
TEST_P(StoreConformance, AConditionSeesTheCommitsBeforeIt) {
  if (!store_->features().conditional || store_->features().atomic != AtomicUnit::transaction)
    GTEST_SKIP();
  for (int round = 0; round < 20; ++round) {
    const std::string key = "object/" + std::to_string(round);
    std::vector<std::unique_ptr<Transaction>> changes;
    std::vector<Future<Version>> commits;
    for (int each = 0; each < 4; ++each) {
      changes.push_back(begin());
      EXPECT_OK(
          changes.back()->resize(each == 1 ? key : key + "/beside/" + std::to_string(each), 10));
      if (each == 2) {  // which the commit before it makes
        EXPECT_OK(changes.back()->require(key, kAbsent));
      }
    }
    for (auto& change : changes) commits.push_back(change->commit(Durability::durable));
    for (size_t each : {0U, 1U, 3U}) EXPECT_OK(commits[each].wait());
    ASSERT_EQ(code_of(commits[2].wait()), Code::conflict) << round;
    EXPECT_EQ(code_of(store_->stat(key + "/beside/2")), Code::not_found);
  }
}

TEST_P(StoreConformance, ACopyIsAnObjectOfItsOwn) {
  EXPECT_EQ(code_of(store_->copy("none", "to")), Code::not_found);
  put("from", pattern(300'000, 1));
  EXPECT_EQ(code_of(store_->copy("from", "from")), Code::invalid_argument);
  EXPECT_OK(store_->copy("from", "folder/to"));
  put("from", pattern(300'000, 2));
  EXPECT_EQ(get("folder/to"), pattern(300'000, 1));
  EXPECT_OK(store_->copy("from", "folder/to"));
  EXPECT_EQ(get("folder/to"), pattern(300'000, 2)) << "an object that is there is replaced";
  {
    auto change = begin();
    EXPECT_OK(change->remove("from"));
    EXPECT_OK(change->commit(Durability::durable).wait());
  }
  EXPECT_EQ(get("folder/to"), pattern(300'000, 2));
  put("empty", {});
  EXPECT_OK(store_->copy("empty", "folder/to"));
  EXPECT_EQ(store_->stat("folder/to")->bytes, 0U);
}

// Random operations against the reference model: see store_harness.h. --gtest_random_seed=N runs
// that seed alone.
TEST_P(StoreConformance, RandomOperationsAgreeWithTheModel) {
  if (store_->features().atomic != AtomicUnit::transaction)
    GTEST_SKIP() << "its atomic unit is the object";
  std::vector<uint64_t> seeds = {1, std::random_device{}()};
  if (kLess == 1) seeds.insert(seeds.end(), {2, 3});
  if (const int given = GTEST_FLAG_GET(random_seed); given != 0)
    seeds = {static_cast<uint64_t>(given)};
  for (const uint64_t seed : seeds) {
    SCOPED_TRACE("replay with --gtest_random_seed=" + std::to_string(seed & 0x7FFFFFFF));
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed & 0x7FFFFFFF));
    store_.reset();
    world_ = GetParam().make();
    RandomRun run(*world_, seed & 0x7FFFFFFF);
    ASSERT_NO_FATAL_FAILURE(run.run(400));
  }
}

}  // namespace stoker
