// The one suite that every Shard passes. A test program includes this once and instantiates it:
//
//   INSTANTIATE_TEST_SUITE_P(File, ShardConformance, ::testing::Values(ShardUnderTest{...}), ...);
#pragma once

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stoker/base/crc32c.h"
#include "stoker/base/mutex.h"
#include "stoker/base/pool.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/coded/format/log.h"
#include "stoker/store/coded/shards/shard.h"
#include "stoker/testing/sim_engine.h"
#include "stoker/testing/store_harness.h"

namespace stoker::coded {

struct ShardUnderTest {
  std::string name;
  // Over a disk that is in the SimDisk under the Loop.
  std::function<std::unique_ptr<Shard>(Loop& loop, Pool& pool, const std::string& path)> make;
};

class ShardConformance : public ::testing::TestWithParam<ShardUnderTest> {
 protected:
  static constexpr size_t kBlock = 4096;
  static constexpr size_t kBlocks = 64;
  static constexpr uint64_t kLatency = 1'000'000;
  static constexpr Fence kFirst{1, 0xA}, kSecond{2, 0xB};  // of two writers

  void SetUp() override { start(LoopOptions()); }
  void start(const LoopOptions& options) {
    shards_.clear();
    loop_.reset();
    disk_ = std::make_shared<SimDisk>(1);
    SimDevice device;
    device.latency_ns = kLatency;
    device.jitter_ns = 0;
    auto engine = std::move(*SimEngine::make(disk_, 64, device));
    const Clock& clock = static_cast<SimEngine&>(*engine).clock();
    loop_ = std::move(*Loop::make(std::move(engine), options, clock));
    for (const std::string path : {"a", "b"}) {
      disk_->put(path, SimImage(kBlocks * kBlock));
      shards_.push_back(GetParam().make(*loop_, pool_, path));
      ASSERT_OK(shards_.back()->fence(kFirst));
    }
  }
  // As after a crash of all that serves the first shard, but for what is on its disk.
  void start_anew() {
    shards_[0].reset();
    shards_[0] = GetParam().make(*loop_, pool_, "a");
  }

  // What ends is counted, and waited for.
  struct Ends {
    Mutex mutex;
    CondVar changed;
    size_t left = 0;
    template <typename Request>
    void expect(Request& request) {
      MutexLock lock(mutex);
      ++left;
      request.context = this;
      request.done = [](Request& ended) noexcept {
        auto& ends = *static_cast<Ends*>(ended.context);
        MutexLock held(ends.mutex);
        --ends.left;
        ends.changed.notify_all();
      };
    }
    void wait() {
      MutexLock lock(mutex);
      changed.wait(lock, [this] { return left == 0; });
    }
  };

  Shard& shard(size_t nth = 0) { return *shards_[nth]; }
  // Of these bytes, in memory that lives as long as the test.
  Slice block(uint8_t fill, size_t blocks = 1) {
    AlignedBytes& bytes = memory_.emplace_back(blocks * kBlock);
    std::memset(bytes.data(), fill, bytes.size());
    return bytes.slice();
  }
  ShardPut put_of(std::vector<ShardPut::Wave> waves, bool flush) {
    ShardPut put;
    put.fence = kFirst;
    put.waves = std::move(waves);
    put.flush = flush;
    return put;
  }
  Status run(ShardPut& put) {
    Ends ends;
    ends.expect(put);
    {
      Plug plug(*loop_);
      shard().put(put, plug);
    }
    ends.wait();
    return put.status;
  }
  Status put(std::vector<ShardPut::Wave> waves, bool flush) {
    ShardPut request = put_of(std::move(waves), flush);
    return run(request);
  }
  // By this writer, one block.
  Status put_by(const Fence& fence, size_t at, uint8_t fill) {
    ShardPut request = put_of({{{at * kBlock, block(fill)}}}, true);
    request.fence = fence;
    return run(request);
  }
  static Code code_of(const Status& status) { return status ? Code{} : status.error().code; }
  // What the disk has now in this block; all of its bytes are alike.
  int on_disk(size_t block) const {
    std::vector<std::byte> bytes(kBlock);
    disk_->image("a").read(block * kBlock, bytes);
    for (const std::byte byte : bytes) {
      if (byte != bytes[0]) return -1;
    }
    return std::to_integer<int>(bytes[0]);
  }
  std::string story() {
    std::string told;
    for (const SimEvent& event : disk_->stop_recording()) {
      if (event.kind == SimEvent::Kind::flush) told += "F" + std::to_string(event.covers.size());
      if (event.kind == SimEvent::Kind::write) told += std::to_string(event.offset / kBlock);
      told += " ";
    }
    return told;
  }

  std::shared_ptr<SimDisk> disk_;
  Pool pool_{2};
  std::unique_ptr<Loop> loop_;
  std::vector<std::unique_ptr<Shard>> shards_;
  std::deque<AlignedBytes> memory_;
};

TEST_P(ShardConformance, WhatWasPutIsRead) {
  ASSERT_OK(put({{{3 * kBlock, block(7, 2)}, {9 * kBlock, block(8)}}}, false));
  const Slice into = block(0, 2);
  const Slice other = block(0);
  Ends ends;
  std::deque<ShardRead> reads(2);
  for (ShardRead& read : reads) ends.expect(read);
  reads[0].offset = 3 * kBlock;
  reads[0].into = into;
  reads[1].offset = 9 * kBlock;
  reads[1].into = other;
  {
    Plug plug(*loop_);
    for (ShardRead& read : reads) shard().read(read, plug);
  }
  ends.wait();
  for (const ShardRead& read : reads) EXPECT_OK(read.status);
  EXPECT_EQ(into.data[0], std::byte{7});
  EXPECT_EQ(into.data[2 * kBlock - 1], std::byte{7});
  EXPECT_EQ(other.data[kBlock - 1], std::byte{8});
}

// A flush covers all of its wave; none comes that nobody asked for.
TEST_P(ShardConformance, AWaveIsFlushedBeforeTheNext) {
  disk_->start_recording();
  ASSERT_OK(put({{{0, block(1)}}, {{kBlock, block(2)}}}, false));
  EXPECT_EQ(story(), "0 F1 1 ");
  disk_->start_recording();
  ASSERT_OK(put({{{2 * kBlock, block(3)}}}, true));
  EXPECT_EQ(story(), "2 F1 ");
  disk_->start_recording();
  ASSERT_OK(put({{}, {{3 * kBlock, block(4)}}, {}}, false));
  EXPECT_EQ(story(), "F0 3 F1 ");
  disk_->start_recording();
  ASSERT_OK(put({}, true));
  EXPECT_EQ(story(), "F0 ");
}

// A flush alone covers what was put before it.
TEST_P(ShardConformance, AFlushCoversWhatWasPutBefore) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    start(LoopOptions());
    ASSERT_OK(put({{{0, block(1, 4)}}}, false));
    ASSERT_OK(put({}, true));
    disk_->cut_power(seed);
    disk_->restore_power();
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(on_disk(i), 1);
  }
}

// Wherever the power goes: where anything is of a wave all is of those before it, and all is of
// what was told to be durable.
TEST_P(ShardConformance, APowerCutKeepsTheOrderOfWaves) {
  size_t whole = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    start(LoopOptions());
    disk_->cut_power_after_changes(seed % 10, seed);
    std::vector<ShardPut::Wave> waves;
    for (uint8_t wave = 0; wave < 3; ++wave) {
      const uint64_t at = 2 * wave * kBlock;
      waves.push_back({{at, block(1)}, {at + kBlock, block(1)}});
    }
    const Status status = put(std::move(waves), true);
    disk_->cut_power(seed);
    disk_->restore_power();
    size_t first_lacking = 6;
    for (size_t i = 6; i-- > 0;) first_lacking = on_disk(i) == 1 ? first_lacking : i;
    if (status) {
      EXPECT_EQ(first_lacking, 6U) << seed;
    }
    whole += status ? 1 : 0;
    for (size_t i = (first_lacking / 2 + 1) * 2; i < 6; ++i) EXPECT_EQ(on_disk(i), 0) << seed;
  }
  EXPECT_EQ(whole, 6U) << "9 changes: 6 writes, 3 flushes";
}

TEST_P(ShardConformance, NothingFollowsAFailedWrite) {
  disk_->fail_nth(Op::Kind::write, 2, EIO, "a");
  disk_->start_recording();
  const Status status =
      put({{{0, block(1)}}, {{kBlock, block(2)}}, {{2 * kBlock, block(3)}}}, true);
  EXPECT_EQ(status.error().code, Code::io);
  EXPECT_EQ(on_disk(0), 1);
  EXPECT_EQ(on_disk(1), 0);
  EXPECT_EQ(on_disk(2), 0);
  EXPECT_EQ(story().substr(0, 5), "0 F1 ");
  ASSERT_OK(put({{{kBlock, block(2)}}}, true)) << "a failure is of its request";
  EXPECT_EQ(on_disk(1), 2);
}

TEST_P(ShardConformance, NothingFollowsAFailedFlush) {
  disk_->fail_nth(Op::Kind::sync, 1, EIO, "a");
  EXPECT_EQ(put({{{0, block(1)}}, {{kBlock, block(2)}}}, false).error().code, Code::io);
  EXPECT_EQ(on_disk(1), 0);
  disk_->fail_nth(Op::Kind::sync, 1, EIO, "a");
  EXPECT_EQ(put({{{0, block(1)}}}, true).error().code, Code::io) << "it is not durable";
}

// A wave with a failure is waited for: nothing of a request is under way once it is done.
TEST_P(ShardConformance, AFailedWaveIsWaitedFor) {
  disk_->fail_nth(Op::Kind::write, 1, EIO, "a");
  EXPECT_FALSE(put({{{0, block(1)}, {kBlock, block(2)}, {2 * kBlock, block(3)}}}, true));
  EXPECT_EQ(on_disk(1), 2);
  EXPECT_EQ(on_disk(2), 3);
}

TEST_P(ShardConformance, AnUnreadableBlockFailsItsOwnReadOnly) {
  ASSERT_OK(put({{{0, block(1, 2)}}}, false));
  disk_->spoil("a", kBlock);
  Ends ends;
  std::deque<ShardRead> reads(2);
  for (size_t i = 0; i < 2; ++i) {
    ends.expect(reads[i]);
    reads[i].offset = i * kBlock;
    reads[i].into = block(0);
  }
  {
    Plug plug(*loop_);
    for (ShardRead& read : reads) shard().read(read, plug);
  }
  ends.wait();
  EXPECT_OK(reads[0].status);
  EXPECT_EQ(reads[1].status.error().code, Code::io);
}

// Each read tells which of its own blocks are wrong; what did not come is compared with nothing.
TEST_P(ShardConformance, AReadTellsWhichBlocksAreNotWhatTheirCrcsSay) {
  ASSERT_OK(put({{{0, block(1, 4)}, {8 * kBlock, block(2, 4)}}}, false));
  const auto crc = [this](uint8_t fill) { return crc32c(block(fill).data, kBlock); };
  disk_->flip("a", 2 * kBlock + 99, 1);
  disk_->spoil("a", 9 * kBlock);
  Ends ends;
  std::deque<ShardRead> reads(4);
  for (size_t i = 0; i < 4; ++i) {
    ends.expect(reads[i]);
    reads[i].offset = i == 3 ? 8 * kBlock : 0;
    reads[i].into = block(0, 4);
  }
  reads[0].crcs.assign(4, crc(1));
  reads[1].crcs = {crc(1), crc(7), crc(7), crc(1)};
  reads[3].crcs.assign(4, crc(2));
  {
    Plug plug(*loop_);
    for (ShardRead& read : reads) shard().read(read, plug);
  }
  ends.wait();
  for (size_t i = 0; i < 3; ++i) EXPECT_OK(reads[i].status) << "it came, be it wrong";
  EXPECT_EQ(reads[0].wrong, std::vector<bool>({false, false, true, false}));
  EXPECT_EQ(reads[1].wrong, std::vector<bool>({false, true, true, false}));
  EXPECT_TRUE(reads[2].wrong.empty()) << "of which nobody told what it should be";
  EXPECT_EQ(code_of(reads[3].status), Code::io);
  EXPECT_TRUE(reads[3].wrong.empty());
  disk_->flip("a", 2 * kBlock + 99, 1);
  Ends again;
  again.expect(reads[0]);
  {
    Plug plug(*loop_);
    shard().read(reads[0], plug);
  }
  again.wait();
  EXPECT_TRUE(reads[0].wrong.empty()) << "a request may be used again";
}

TEST_P(ShardConformance, ItsHealthCountsWhatWentWrong) {
  ASSERT_OK(put({{{0, block(1, 2)}}}, true));
  const auto read = [this](std::vector<uint32_t> crcs) {
    Ends ends;
    ShardRead request;
    ends.expect(request);
    request.into = block(0, 2);
    request.crcs = std::move(crcs);
    {
      Plug plug(*loop_);
      shard().read(request, plug);
    }
    ends.wait();
  };
  const auto counts = [this] {
    const ShardHealth health = shard().health();
    EXPECT_EQ(health.last.empty(),
              health.failed_reads + health.failed_puts + health.wrong_blocks == 0);
    return std::vector<uint64_t>{health.failed_reads, health.failed_puts, health.wrong_blocks};
  };
  using Counts = std::vector<uint64_t>;
  const uint32_t crc = crc32c(block(1).data, kBlock);
  read({crc, crc});
  EXPECT_EQ(counts(), Counts({0, 0, 0}));
  read({crc + 1, crc + 2});
  EXPECT_EQ(counts(), Counts({0, 0, 2}));
  EXPECT_NE(shard().health().last.find("offset 0"), std::string::npos);
  disk_->fail_nth(Op::Kind::read, 1, EIO, "a");
  read({crc, crc});
  EXPECT_EQ(counts(), Counts({1, 0, 2}));
  for (const Op::Kind kind : {Op::Kind::write, Op::Kind::sync}) {
    disk_->fail_nth(kind, 1, EIO, "a");
    EXPECT_FALSE(put({{{0, block(1)}}}, true));
  }
  EXPECT_EQ(counts(), Counts({1, 2, 2}));
  EXPECT_EQ(code_of(put_by({9, 9}, 0, 1)), Code::conflict);
  EXPECT_EQ(counts(), Counts({1, 2, 2})) << "the disk did nothing wrong";
  EXPECT_EQ(shard(1).health().failed_puts, 0U);
  EXPECT_TRUE(shard(1).health().last.empty());
}

// Two shards, three requests each: one latency for reads, two for writes that are flushed. The
// flush of one waits for no write of the other.
TEST_P(ShardConformance, WhatAPlugHoldsBeginsAtOnce) {
  uint64_t from = loop_->clock().now_ns() / kLatency;
  const auto passed = [&] {
    const uint64_t now = loop_->clock().now_ns() / kLatency;
    return now - std::exchange(from, now);
  };
  Ends ends;
  std::deque<ShardRead> reads(6);
  {
    Plug plug(*loop_);
    for (size_t i = 0; i < reads.size(); ++i) {
      ends.expect(reads[i]);
      reads[i].offset = i * kBlock;
      reads[i].into = block(0);
      shard(i % 2).read(reads[i], plug);
    }
  }
  ends.wait();
  EXPECT_EQ(passed(), 1U);
  std::deque<ShardPut> puts(2);
  disk_->slow("b", 5 * kLatency);
  disk_->start_recording();
  {
    Plug plug(*loop_);
    for (size_t i = 0; i < puts.size(); ++i) {
      puts[i] = put_of({{{0, block(1)}}}, true);
      ends.expect(puts[i]);
      shard(i).put(puts[i], plug);
    }
  }
  ends.wait();
  EXPECT_GE(passed(), 7U);
  std::string order;
  for (const SimEvent& event : disk_->stop_recording())
    order += event.path + (event.kind == SimEvent::Kind::flush ? "F " : " ");
  EXPECT_EQ(order, "a b aF bF ");
}

// The queue may be full when the next step is due. The request says so, and put again it goes on
// where it stopped.
TEST_P(ShardConformance, AFullQueueIsToldAndNothingIsDoneTwice) {
  LoopOptions options;
  options.depth = 1;
  options.queue_max = 4;
  start(options);
  ShardPut::Wave second;
  for (size_t i = 1; i <= 4; ++i) second.push_back({i * kBlock, block(2)});
  ShardPut put = put_of({{{0, block(1)}}, std::move(second)}, true);
  Ends puts, others;
  std::deque<ShardRead> reads(4);
  {
    const auto gate = disk_->hold();
    puts.expect(put);
    {
      Plug plug(*loop_);
      shard().put(put, plug);
    }
    // As many as the queue takes wait behind it, and go last: the second wave, as long, finds no
    // room.
    Plug plug(*loop_);
    for (ShardRead& read : reads) {
      others.expect(read);
      read.priority = Priority::scrub;
      read.into = block(0);
      shard(1).read(read, plug);
    }
    plug.release();
  }
  puts.wait();
  others.wait();
  ASSERT_FALSE(put.status);
  EXPECT_EQ(put.status.error().code, Code::busy);
  EXPECT_EQ(on_disk(0), 1);
  EXPECT_EQ(on_disk(1), 0);
  disk_->start_recording();
  ASSERT_OK(run(put));
  EXPECT_EQ((" " + story()).find(" 0 "), std::string::npos) << "the first wave was done";
  for (size_t i = 1; i <= 4; ++i) EXPECT_EQ(on_disk(i), 2);
  disk_->start_recording();
  ASSERT_OK(run(put)) << "once it has ended it begins again";
  EXPECT_EQ(story(), "0 F1 1 2 3 4 F4 ");
}

// Who put it waits for nothing else by then.
TEST_P(ShardConformance, AFlushIsOfTheFirstClass) {
  const auto ops = [this](Priority priority) { return loop_->counters(priority).ops.get(); };
  const uint64_t demanded = ops(Priority::demand);
  ShardPut put = put_of({{{0, block(1)}}, {{kBlock, block(2)}}}, true);
  put.priority = Priority::scrub;
  ASSERT_OK(run(put));
  EXPECT_EQ(ops(Priority::scrub), 2U);
  EXPECT_EQ(ops(Priority::demand) - demanded, 2U);
}

TEST_P(ShardConformance, AHigherFenceEndsTheWriterOfALower) {
  ASSERT_OK(put_by(kFirst, 0, 1));
  ASSERT_OK(shard().fence(kSecond));
  EXPECT_EQ(*shard().fenced(), kSecond);
  disk_->start_recording();
  EXPECT_EQ(code_of(put_by(kFirst, 0, 2)), Code::conflict);
  EXPECT_EQ(code_of(put_by({2, 0xA}, 0, 2)), Code::conflict)
      << "of that number, and not its writer";
  EXPECT_EQ(code_of(put_by({3, 0xA}, 0, 2)), Code::conflict) << "of a fence that it never got";
  EXPECT_EQ(story(), "");
  EXPECT_EQ(on_disk(0), 1);
  ASSERT_OK(put_by(kSecond, 0, 3));
  EXPECT_EQ(code_of(shard().fence(kFirst)), Code::conflict);
  EXPECT_EQ(code_of(shard().fence({2, 0xA})), Code::conflict);
  EXPECT_OK(shard().fence(kSecond)) << "its own once more";
  EXPECT_EQ(*shard().fenced(), kSecond);
  ASSERT_OK(put_by(kSecond, 0, 4));
  EXPECT_EQ(on_disk(0), 4);
}

TEST_P(ShardConformance, AFenceOutlivesWhoServesTheShard) {
  ASSERT_OK(shard().fence(kSecond));
  disk_->cut_power(7);
  disk_->restore_power();
  start_anew();
  EXPECT_EQ(code_of(put_by(kSecond, 0, 1)), Code::conflict) << "nobody fenced it since";
  EXPECT_EQ(*shard().fenced(), kSecond);
  EXPECT_EQ(code_of(shard().fence(kFirst)), Code::conflict);
  EXPECT_EQ(code_of(put_by(kFirst, 0, 1)), Code::conflict);
  EXPECT_EQ(on_disk(0), 0);
  ASSERT_OK(shard().fence(kSecond));
  ASSERT_OK(put_by(kSecond, 0, 1));
}

// It is the old one or the new one, and the new one if that was answered.
TEST_P(ShardConformance, APowerCutTearsNoFence) {
  size_t answered = 0, stayed = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    start(LoopOptions());
    disk_->cut_power_after_changes(seed % 5, seed);
    const Status status = shard().fence(kSecond);
    disk_->cut_power(seed);
    disk_->restore_power();
    start_anew();
    const auto found = shard().fenced();
    ASSERT_OK(found);
    EXPECT_TRUE(*found == kSecond || (!status && *found == kFirst)) << seed;
    answered += status ? 1 : 0;
    stayed += *found == kFirst ? 1 : 0;
  }
  EXPECT_GT(answered, 0U);
  EXPECT_GT(stayed, 0U);
}

// What is not stored fences nobody.
TEST_P(ShardConformance, AFenceThatCannotBeStoredIsNone) {
  for (const Op::Kind kind : {Op::Kind::write, Op::Kind::sync}) {
    disk_->fail_nth(kind, 1, EIO, "a");
    EXPECT_EQ(code_of(shard().fence(kSecond)), Code::io);
    EXPECT_OK(put_by(kFirst, 0, 1));
  }
  EXPECT_OK(shard().fence({3, 0xC}));
  EXPECT_EQ(code_of(put_by(kFirst, 0, 2)), Code::conflict);
}

// The other one tells it, and the next fence mends it.
TEST_P(ShardConformance, ACopyOfTheFenceThatCannotBeReadIsCountedAndMended) {
  for (const uint64_t at : kFenceAt) {
    start(LoopOptions());
    ASSERT_OK(shard().fence(kSecond));
    disk_->spoil("a", at);
    start_anew();
    EXPECT_EQ(*shard().fenced(), kSecond);
    EXPECT_EQ(shard().health().failed_reads, 1U);
    EXPECT_EQ(code_of(shard().fence(kFirst)), Code::conflict);
    ASSERT_OK(shard().fence({3, 0xC}));
    start_anew();
    EXPECT_EQ(*shard().fenced(), (Fence{3, 0xC}));
    EXPECT_EQ(shard().health().failed_reads, 0U);
  }
}

// A put of many waves is longer than the fence that comes behind it.
TEST_P(ShardConformance, AFenceWaitsForWhatWasTaken) {
  constexpr size_t kWaves = 20;
  std::vector<ShardPut::Wave> waves;
  for (size_t i = 0; i < kWaves; ++i) waves.push_back({{(kBlocks - 1 - i) * kBlock, block(1)}});
  ShardPut put = put_of(std::move(waves), true);
  Ends ends;
  ends.expect(put);
  {
    Plug plug(*loop_);
    shard().put(put, plug);
  }
  ASSERT_OK(shard().fence(kSecond));
  for (size_t i = 0; i < kWaves; ++i) EXPECT_EQ(on_disk(kBlocks - 1 - i), 1) << i;
  ends.wait();
  EXPECT_OK(put.status) << "it was taken before";
}

// Of all that want to open, each number is of one.
TEST_P(ShardConformance, OfWritersThatFenceAtOnceTheHighestStays) {
  constexpr size_t kWriters = 8;
  std::vector<Status> ended(kWriters);
  {
    std::vector<std::jthread> writers;
    for (size_t i = 0; i < kWriters; ++i)
      writers.emplace_back([&, i] { ended[i] = shard().fence({2 + i / 2, i}); });
  }
  EXPECT_OK(ended[kWriters - 1] ? ended[kWriters - 1] : ended[kWriters - 2]);
  for (size_t i = 0; i < kWriters; i += 2) EXPECT_FALSE(ended[i] && ended[i + 1]) << i;
  const Fence last = *shard().fenced();
  EXPECT_EQ(last.number, 2 + (kWriters - 1) / 2);
  for (size_t i = 0; i < kWriters; ++i)
    EXPECT_EQ(static_cast<bool>(put_by({2 + i / 2, i}, 0, 1)), last.writer == i) << i;
}

// A log of one segment, of frames of two blocks: their VALs are told, and which blocks cannot be
// read.
TEST_P(ShardConformance, AScanTellsTheIntactFramesOfASegment) {
  Shape shape;
  shape.k = 2;
  shape.m = 1;
  shape.shards = 3;
  shape.chunk_bytes = kChunkMin;
  shape.segment_bytes = 8 * kBlock;
  shape.area_bytes = kBlock;
  shape.segments = 4;
  StoreId store{};
  store[0] = 7;
  constexpr size_t kShard = 1, kSegment = 2;
  const uint64_t from = shape.segment_at(kSegment);
  const auto write = [&](uint64_t count) {
    LogWriter writer({store, count << 32 | 9}, shape.segment_bytes);
    for (Stamp stamp = 1; stamp <= 3; ++stamp) {
      const Slice user = block(static_cast<uint8_t>(stamp));
      FrameBuilder frame;
      ValItem val;
      val.stamp = stamp;
      val.crcs = {0};
      frame.add(val, {user.data, user.size});
      std::vector<std::byte> payload(frame.payload_bytes());
      frame.payload({kShard, kSegment, writer.cursor().offset}, payload);
      AlignedBytes& bytes = memory_.emplace_back(frame.bytes());
      ASSERT_EQ(bytes.size(), 2 * kBlock);
      const uint64_t at = from + writer.append(payload, bytes.span());
      ASSERT_OK(put({{{at, bytes.slice()}}}, true));
    }
  };
  const auto scan = [&](uint64_t floor, size_t of) {
    return shard().scan({shape, store, of, kSegment, floor}, Priority::demand);
  };
  const auto stamps = [](const ShardScan& found) {
    std::string told;
    for (const auto& [at, content] : found.frames)
      told += std::to_string(at / kBlock) + ":" +
              std::to_string(std::get<ValItem>(content.items.at(0)).stamp) + " ";
    return told;
  };
  EXPECT_EQ(stamps(scan(0, kShard)), "") << "zeros";
  write(5);
  const ShardScan whole = scan(5, kShard);
  EXPECT_EQ(stamps(whole), "0:1 2:2 4:3 ");
  EXPECT_EQ(whole.end.count(), 5U);
  EXPECT_EQ(whole.end.cursor.offset, 6 * kBlock);
  EXPECT_TRUE(whole.unreadable.empty() && whole.why.empty() && whole.any_read);
  disk_->fail_nth(Op::Kind::read, 1, ETIMEDOUT, "a");
  EXPECT_EQ(stamps(scan(5, kShard)), "0:1 2:2 4:3 ") << "one that failed says nothing of the rest";
  EXPECT_EQ(stamps(scan(6, kShard)), "") << "of a generation below the floor";
  EXPECT_EQ(stamps(scan(0, kShard + 1)), "") << "a copy of another shard's";
  disk_->flip("a", from + 2 * kBlock + 70, 1);
  EXPECT_EQ(stamps(scan(0, kShard)), "0:1 4:3 ");
  disk_->spoil("a", from + 4 * kBlock);
  const ShardScan spoilt = scan(0, kShard);
  EXPECT_EQ(stamps(spoilt), "0:1 ");
  EXPECT_EQ(spoilt.unreadable, std::vector<uint64_t>{from + 4 * kBlock});
  EXPECT_FALSE(spoilt.why.empty());
  EXPECT_TRUE(spoilt.any_read);
  for (size_t i = 0; i < 8; ++i) disk_->spoil("a", from + i * kBlock);
  const ShardScan dark = scan(0, kShard);
  EXPECT_EQ(dark.unreadable.size(), 8U);
  EXPECT_FALSE(dark.any_read);
}

}  // namespace stoker::coded
