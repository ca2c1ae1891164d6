// Reads of which a test decides when which op ends: each chunk is verified once its bytes have
// come, whatever has not come yet.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <numeric>

#include "stoker/store/blocking_io.h"
#include "stoker/store/local/store.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/held_engine.h"
#include "stoker/testing/store_harness.h"

namespace stoker {
namespace {

constexpr size_t kChunk = 64 * kKiB;
constexpr size_t kBytes = 3 * kChunk + 8192 + 100;  // of the object "x"
// where reads of it begin, so that chunk 0 comes by way of scratch memory
constexpr size_t kFrom = 4096;
constexpr FileId kVolume = 0;

class LocalReadTest : public ::testing::Test {
 protected:
  void SetUp() override { open({.cpu_threads = 1}); }
  void TearDown() override {
    disks_->let_go();
    store_.reset();
    runtime_.reset();
  }
  void open(const RuntimeOptions& runtime_options) {
    runtime_ =
        std::move(*RuntimeOwner::make(std::make_unique<HeldEngine>(64, disks_), runtime_options));
    StoreOptions options;
    options.create = true;
    options.capacity_bytes = 8 * kMiB;
    options.chunk_bytes = kChunk;
    options.objects_max = 64;
    store_ =
        std::move(*open_local_store({"volume"}, runtime_->runtime(), options, {.files = false}));
    other_ = runtime_->loop().open({.path = "other"})->id;
    // Chunk 2 is written anew, so that it lies elsewhere: five ops read the whole object.
    content_ = pattern(kBytes, 1);
    write(0, kBytes);
    // of a seed close by it would be the same words, moved
    Bytes again = pattern(kChunk, uint64_t{1} << 40);
    std::copy(again.begin(), again.end(), content_.begin() + 2 * kChunk);
    write(2 * kChunk, kChunk);
  }
  void write(size_t offset, size_t bytes) {
    auto change = std::move(*store_->begin());
    ASSERT_OK(change->resize("x", kBytes));
    ASSERT_OK(change->write("x", offset, {content_.data() + offset, bytes}).wait());
    ASSERT_OK(change->commit(Durability::durable).wait());
  }
  void flip_in_chunk(size_t chunk) {
    std::lock_guard lock(disks_->mutex);
    auto& disk = disks_->disk(kVolume);
    const std::byte* from = content_.data() + chunk * kChunk;
    const auto found = std::search(disk.begin(), disk.end(), from, from + 4096);
    ASSERT_NE(found, disk.end());
    found[1000] ^= std::byte{1};
  }

  // Starts the read; its ops are with the disk, which ends none of them.
  Future<void> read() {
    std::memset(into_.data(), 0x5A, into_.size());
    disks_->stick(kVolume);
    const size_t before = disks_->seen.size();
    auto future = store_->read("x", kFrom, into_.slice().sub(0, kBytes - kFrom), {});
    disks_->wait_for_seen(before + kOps);
    ops_.assign(disks_->seen.begin() + static_cast<std::ptrdiff_t>(before), disks_->seen.end());
    EXPECT_EQ(ops_.size(), kOps);
    return future;
  }
  bool holds(size_t from, size_t to) const {
    return std::memcmp(into_.data() + from, content_.data() + kFrom + from, to - from) == 0;
  }
  bool untouched(size_t from, size_t to) const {
    return std::all_of(into_.data() + from, into_.data() + to,
                       [](std::byte byte) { return byte == std::byte{0x5A}; });
  }
  // What ended before has been through the Loop's thread, and what that gave to the pool, which has
  // one thread, is done.
  void settle() {
    struct Marker {
      Op op;
      Pool* pool;
      Promise<void> done;
    } marker{{}, &runtime_->pool(), {}};
    const AlignedBytes page(4096);
    auto future = marker.done.future();
    marker.op.file = other_;
    marker.op.bytes = page.slice();
    marker.op.context = &marker;
    marker.op.done = [](Op& op) noexcept {
      auto& self = *static_cast<Marker*>(op.context);
      self.pool->run([&self] { self.done.complete(Status()); });
    };
    ASSERT_TRUE(runtime_->loop().submit(marker.op));
    ASSERT_OK(future.wait());
  }

  // Chunk 0, by way of scratch; chunk 1; chunk 2; the whole blocks of chunk 3; its last block, by
  // way of scratch.
  static constexpr size_t kOps = 5;
  std::shared_ptr<HeldEngine::Disks> disks_ = std::make_shared<HeldEngine::Disks>();
  std::unique_ptr<RuntimeOwner> runtime_;
  std::unique_ptr<Store> store_;
  FileId other_ = -1;
  Bytes content_;
  AlignedBytes into_{kBytes};
  std::vector<Op> ops_;
};

TEST_F(LocalReadTest, WhatHasComeIsVerifiedWhileTheRestIsOnItsWay) {
  const auto future = read();
  const size_t end_of_0 = kChunk - kFrom;
  EXPECT_TRUE(untouched(0, end_of_0));
  disks_->let_one_go(ops_[0]);
  settle();
  EXPECT_TRUE(holds(0, end_of_0)) << "it goes to the caller's memory when it was verified";
  EXPECT_FALSE(future.ready());
  const size_t last_block = 3 * kChunk + 8192 - kFrom;
  disks_->let_one_go(ops_[4]);
  settle();
  EXPECT_TRUE(untouched(last_block, kBytes - kFrom)) << "the other part of its chunk has not come";
  disks_->let_one_go(ops_[3]);
  settle();
  EXPECT_TRUE(holds(3 * kChunk - kFrom, kBytes - kFrom));
  EXPECT_FALSE(future.ready());
  disks_->let_go();
  EXPECT_OK(future.wait());
  EXPECT_TRUE(holds(0, kBytes - kFrom));
}

TEST_F(LocalReadTest, AnyOrderOfItsOpsGivesTheBytesOrNamesTheDamage) {
  std::array<size_t, kOps> order;
  for (const bool damaged : {false, true}) {
    if (damaged) flip_in_chunk(2);
    std::iota(order.begin(), order.end(), 0);
    do {
      const auto future = read();
      for (const size_t op : order) disks_->let_one_go(ops_[op]);
      const Status status = future.wait();
      if (!damaged) {
        ASSERT_OK(status);
        ASSERT_TRUE(holds(0, kBytes - kFrom));
      } else {
        ASSERT_EQ(code_of(status), Code::corruption);
        ASSERT_NE(status.error().what.find("chunk 2 of 'x'"), std::string::npos)
            << status.error().what;
      }
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST_F(LocalReadTest, TheFirstDamagedChunkIsNamedWhicheverWasFoundFirst) {
  flip_in_chunk(1);
  flip_in_chunk(2);
  const auto future = read();
  for (const size_t op : {2, 1, 0, 3, 4}) disks_->let_one_go(ops_[op]);
  EXPECT_EQ(code_of(future.wait()), Code::corruption);
  EXPECT_NE(future.wait().error().what.find("chunk 1 of 'x'"), std::string::npos)
      << future.wait().error().what;
}

TEST_F(LocalReadTest, AnErrorOfTheDiskComesBeforeDamageAndWhatLacksAPartIsNotLookedAt) {
  flip_in_chunk(1);
  const auto future = read();
  for (const size_t op : {0, 1, 2, 3}) disks_->let_one_go(ops_[op]);
  settle();
  EXPECT_FALSE(future.ready());
  disks_->let_one_go(ops_[4], EIO);
  EXPECT_EQ(code_of(future.wait()), Code::io);
  EXPECT_EQ(future.wait().error().sys_errno, EIO);
  EXPECT_NE(future.wait().error().what.find("reading chunk 3 of 'x'"), std::string::npos)
      << future.wait().error().what;
  EXPECT_TRUE(untouched(3 * kChunk + 8192 - kFrom, kBytes - kFrom));
}

TEST_F(LocalReadTest, NothingIsTouchedOnceADiskWasGivenUpAndTheReadHasFailed) {
  store_.reset();
  runtime_.reset();
  disks_ = std::make_shared<HeldEngine::Disks>();
  open({.cpu_threads = 1, .stall_seconds = 1});
  const auto future = read();
  // of chunk 3 a part, of chunk 2 nothing
  for (const size_t op : {0, 1, 3}) disks_->let_one_go(ops_[op]);
  EXPECT_EQ(code_of(future.wait()), Code::io);
  EXPECT_EQ(future.wait().error().sys_errno, ETIMEDOUT);
  EXPECT_NE(future.wait().error().what.find("reading chunk 2 of 'x'"), std::string::npos)
      << future.wait().error().what;
  const size_t last_block = 3 * kChunk + 8192 - kFrom;
  disks_->let_go();  // the late ones land: in memory that is kept for them
  settle();
  EXPECT_TRUE(untouched(last_block, kBytes - kFrom)) << "nobody verifies them, or copies anything";
  EXPECT_EQ(code_of(store_->begin()), Code::read_only);
}

TEST_F(LocalReadTest, ALargeObjectIsReadInOpsOfAMebibyteAndWrittenInLargerOnes) {
  constexpr size_t bytes = 4 * kMiB;
  const AlignedBytes memory(bytes);
  std::memset(memory.data(), 7, bytes);
  const size_t before = disks_->seen.size();
  auto change = std::move(*store_->begin());
  ASSERT_OK(change->resize("large", bytes, kMiB));
  ASSERT_OK(change->write("large", 0, memory.slice()).wait());
  EXPECT_EQ(disks_->seen.size() - before, 1U);
  ASSERT_OK(change->commit(Durability::deferred).wait());
  const size_t written = disks_->seen.size();
  ASSERT_OK(store_->read("large", 0, memory.slice(), {}).wait());
  EXPECT_EQ(disks_->seen.size() - written, 4U);
}

}  // namespace
}  // namespace stoker
