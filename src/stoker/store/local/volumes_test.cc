// Which volume a write goes to, over simulated disks of known speeds. Their clock is virtual:
// nothing here depends on the machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "stoker/store/blocking_io.h"
#include "stoker/store/local/store.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/sim_engine.h"
#include "stoker/testing/store_harness.h"

namespace stoker {
namespace {

class LocalStoreVolumes : public ::testing::Test {
 protected:
  LocalStoreVolumes() {
    auto engine = std::move(*SimEngine::make(disk_, 64));
    const Clock& clock = static_cast<SimEngine&>(*engine).clock();
    runtime_ = std::move(*RuntimeOwner::make(std::move(engine), {.cpu_threads = 1}, clock));
    make({"a", "b"}, 256 * kMiB);
    std::fill(bytes_.span().begin(), bytes_.span().end(), std::byte{5});
  }
  // A store over two disks that are as fast as each other.
  void make(const std::vector<std::string>& names, uint64_t capacity_bytes,
            std::vector<double> weights = {}) {
    StoreOptions options;
    options.create = true;
    options.capacity_bytes = capacity_bytes;
    options.volume_weights = std::move(weights);
    store_.reset();
    store_ = std::move(*open_local_store(names, runtime_->runtime(), options, {.files = false}));
    for (const std::string& name : names) disk_->throttle(name, 100'000'000);
    before_ = {0, 0};
  }
  // Of what writing an object of so many bytes anew moves.
  double share_of_b(size_t bytes) {
    auto change = std::move(*store_->begin());
    EXPECT_OK(change->resize("x", bytes));
    EXPECT_OK(change->write("x", 0, bytes_.slice().sub(0, bytes)).wait());
    EXPECT_OK(change->commit(Durability::durable).wait());
    const auto volumes = store_->info().volumes;
    const uint64_t a = volumes[0].written_bytes - before_[0],
                   b = volumes[1].written_bytes - before_[1];
    before_ = {volumes[0].written_bytes, volumes[1].written_bytes};
    EXPECT_EQ(a + b, bytes);
    return static_cast<double>(b) / static_cast<double>(a + b);
  }

  std::shared_ptr<SimDisk> disk_ = std::make_shared<SimDisk>();
  std::unique_ptr<RuntimeOwner> runtime_;
  std::unique_ptr<Store> store_;
  // aligned, or the few lanes of the bounce path would be what is measured
  const AlignedBytes bytes_{64 * kMiB};
  std::vector<uint64_t> before_ = std::vector<uint64_t>(2);
};

TEST_F(LocalStoreVolumes, AVolumeThatBecomesSlowGetsLessAndOneThatRecoversGetsMore) {
  constexpr size_t bytes = 64 * kMiB;
  EXPECT_NEAR(share_of_b(bytes), 0.5, 0.05);
  EXPECT_NEAR(share_of_b(bytes), 0.5, 0.05);
  disk_->throttle("b", 25'000'000);
  // its speed is that of the last gigabyte
  for (int i = 0; i < 8; ++i) static_cast<void>(share_of_b(bytes));
  EXPECT_LT(share_of_b(bytes), 0.3);
  EXPECT_LT(store_->info().volumes[1].bytes_per_second,
            0.5 * store_->info().volumes[0].bytes_per_second);
  disk_->throttle("b", 100'000'000);
  for (int i = 0; i < 32; ++i) static_cast<void>(share_of_b(bytes));
  EXPECT_GT(share_of_b(bytes), 0.35);
}

// Writes from the pool cannot wait for reads, which are verified there.
TEST_F(LocalStoreVolumes, AReadKeepsTheSpaceOfWhatItReadsAndNoOther) {
  make({"space"}, 6 * kMiB);
  const auto put = [&](const char* key, size_t bytes, uint64_t seed) {
    Bytes content = pattern(bytes, seed);
    auto change = std::move(*store_->begin());
    EXPECT_OK(change->resize(key, bytes));
    const Status written = change->write(key, 0, slice_of(content)).wait();
    if (written) {
      EXPECT_OK(change->commit(Durability::durable).wait());
    }
    return written;
  };
  const auto put_from_the_pool = [&](const char* key, size_t bytes, uint64_t seed) {
    Promise<void> done;
    const auto future = done.future();
    runtime_->pool().run([&] { done.complete(put(key, bytes, seed)); });
    return future.wait();
  };
  ASSERT_OK(put("read", kMiB, 1));
  ASSERT_OK(put("x", 2 * kMiB, 2));
  disk_->hold_reads("space");
  AlignedBytes into(kMiB);
  const auto reading = store_->read("read", 0, into.slice(), {});
  while (disk_->held("space") == 0) std::this_thread::yield();
  for (uint64_t seed = 3; seed < 8; ++seed) ASSERT_OK(put_from_the_pool("x", 2 * kMiB, seed));
  ASSERT_OK(put("read", kMiB, 8));
  ASSERT_OK(put("y", kMiB, 9));
  EXPECT_EQ(put_from_the_pool("z", 2 * kMiB, 10).error().code, Code::out_of_space)
      << "a mebibyte of it is being read";
  disk_->let_go("space");
  ASSERT_OK(reading.wait());
  EXPECT_EQ(std::memcmp(into.data(), pattern(kMiB, 1).data(), kMiB), 0);
  EXPECT_OK(put_from_the_pool("z", 2 * kMiB, 10));
  EXPECT_EQ(read_all(*store_, "read"), pattern(kMiB, 8));
}

// A run's store has room for little more than two versions of its one object. So a volume must have
// the room of its share, twice; with equal rooms none can have much more or less than half.
TEST_F(LocalStoreVolumes, WhereRoomIsTightSharesFollowTheWeightsItWasSharedOutBy) {
  constexpr size_t bytes = 64 * kMiB;
  constexpr uint64_t tight = 2 * bytes + bytes / 20 + 4 * kMiB;
  const auto share_of_the_slow = [&] {
    for (int i = 0; i < 20; ++i) static_cast<void>(share_of_b(bytes));
    return (share_of_b(bytes) + share_of_b(bytes)) / 2;
  };
  make({"equal a", "equal b"}, tight);
  disk_->throttle("equal b", 25'000'000);
  EXPECT_GT(share_of_the_slow(), 0.44) << "or this test shows nothing";
  make({"weighed a", "weighed b"}, tight, {4, 1});
  disk_->throttle("weighed b", 25'000'000);
  EXPECT_LT(share_of_the_slow(), 0.3);
}

// Half as much again lets the share of one of two volumes fall, and that of the other grow, by a
// quarter of what is written.
TEST_F(LocalStoreVolumes, WithRoomToMoveSharesFollowAVolumeThatBecomesSlow) {
  constexpr size_t bytes = 64 * kMiB;
  constexpr uint64_t tight = 2 * bytes + bytes / 20 + 4 * kMiB;
  make({"roomy a", "roomy b"}, tight + tight / 2);
  EXPECT_NEAR(share_of_b(bytes), 0.5, 0.05);
  disk_->throttle("roomy b", 25'000'000);
  for (int i = 0; i < 20; ++i) static_cast<void>(share_of_b(bytes));
  EXPECT_LT((share_of_b(bytes) + share_of_b(bytes)) / 2, 0.3);
}

// With so little on its way the other one is always the quicker, and what was slow once would never
// be asked again.
TEST_F(LocalStoreVolumes, AVolumeThatWasPassedOverForLongIsTriedAgain) {
  constexpr size_t bytes = 4 * kMiB;
  const auto share_of = [&](int writes) {
    double sum = 0;
    for (int i = 0; i < writes; ++i) sum += share_of_b(bytes);
    return sum / writes;
  };
  disk_->throttle("a", 10'000'000);
  disk_->throttle("b", 10'000'000);
  EXPECT_NEAR(share_of(10), 0.5, 0.2);
  disk_->throttle("b", 100'000);
  static_cast<void>(share_of(10));
  const double slow = share_of(200);  // a minute and a half of the other one
  EXPECT_LT(slow, 0.02);
  EXPECT_GT(slow, 0.0) << "it is still asked now and then";
  disk_->throttle("b", 10'000'000);
  static_cast<void>(share_of(200));
  EXPECT_GT(share_of(10), 0.3);
}

// Chunks of which a part is written anew are written like others: what that takes a volume counts.
TEST_F(LocalStoreVolumes, PartsOfChunksDoNotStayWithASlowVolume) {
  constexpr size_t bytes = 4 * kMiB;
  disk_->throttle("a", 10'000'000);
  disk_->throttle("b", 10'000'000);
  for (int i = 0; i < 10; ++i) static_cast<void>(share_of_b(bytes));
  disk_->throttle("b", 100'000);
  for (int i = 0; i < 10; ++i) static_cast<void>(share_of_b(bytes));
  for (int i = 0; i < 400; ++i) {
    auto change = std::move(*store_->begin());
    ASSERT_OK(change->write("x", 4096, bytes_.slice().sub(0, 4096)).wait());
    ASSERT_OK(change->commit(Durability::durable).wait());
  }
  const auto volumes = store_->info().volumes;
  const uint64_t a = volumes[0].written_bytes - before_[0],
                 b = volumes[1].written_bytes - before_[1];
  EXPECT_GE(a + b, 400 * kMiB) << "merged chunks count";
  EXPECT_LT(static_cast<double>(b), 0.05 * static_cast<double>(a));
}

// However quick it is. Space is the volumes' own: the store is full when none has room.
TEST_F(LocalStoreVolumes, WhatFindsNoRoomOnAFullVolumeGoesToTheOther) {
  constexpr size_t bytes = 8 * kMiB;
  disk_->throttle("a", 1'000'000);
  const auto put = [&](int number) -> Status {
    const std::string key = "x" + std::to_string(number);
    auto change = std::move(*store_->begin());
    STOKER_TRY(change->resize(key, bytes));
    STOKER_TRY(change->write(key, 0, bytes_.slice().sub(0, bytes)).wait());
    STOKER_TRY(change->commit(Durability::durable).wait());
    return {};
  };
  const auto volume = [&](size_t index) { return store_->info().volumes[index]; };
  const auto written = [&](size_t index) { return volume(index).written_bytes; };
  for (int i = 0; i < 10; ++i) ASSERT_OK(put(i));
  EXPECT_GT(written(1), 64 * kMiB) << "the quick one takes what it can";
  EXPECT_EQ(volume(1).refused_bytes, 0U);
  for (int i = 10; i < 24; ++i) ASSERT_OK(put(i));
  const uint64_t full = written(1);
  EXPECT_GT(full, 120 * kMiB);
  EXPECT_LE(full, 128 * kMiB);
  for (int i = 24; i < 28; ++i) ASSERT_OK(put(i));
  EXPECT_EQ(written(1), full);
  EXPECT_EQ(written(0), 28 * bytes - full);
  EXPECT_GE(volume(1).refused_bytes, 4 * bytes)
      << "all of the last ones, and what it was too full for before";
  EXPECT_EQ(volume(0).refused_bytes, 0U);
  for (const size_t index : {0U, 1U})
    EXPECT_EQ(volume(index).free_bytes, volume(index).capacity_bytes - written(index));
  EXPECT_LT(volume(1).free_bytes, kMiB) << "less than a chunk";
  Status last;
  int stored = 28;
  while (last && stored < 64) {
    last = put(stored);
    if (last) ++stored;
  }
  ASSERT_FALSE(last);
  EXPECT_EQ(last.error().code, Code::out_of_space);
  EXPECT_GE(stored, 30);
  AlignedBytes read(bytes);
  for (int i = 0; i < stored; ++i) {
    ASSERT_OK(store_->read("x" + std::to_string(i), 0, read.slice()).wait());
    EXPECT_TRUE(std::ranges::equal(read.span(), bytes_.span().first(bytes)));
  }
}

}  // namespace
}  // namespace stoker
