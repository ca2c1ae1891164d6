#include "stoker/data/batch_reader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <zstd.h>

#include "stoker/base/crc32c.h"
#include "stoker/data/neighbour_reads.h"
#include "stoker/store/memory_store.h"

namespace stoker::data {
namespace {

class Reading : public testing::Test {
 protected:
  void put(std::string_view key, std::string text) {
    const auto change = store_->begin().value();
    change->resize(key, text.size()).value();
    const Slice from{reinterpret_cast<std::byte*>(text.data()), text.size()};
    change->write(key, 0, from).wait().value();
    (void)change->commit(Durability::durable).wait().value();
  }
  template <typename T>
  void put_numbers(std::string_view key, const std::vector<T>& all) {
    put(key, {reinterpret_cast<const char*>(all.data()), all.size() * sizeof(T)});
  }
  static std::shared_ptr<const SampleTable> table(Result<SampleTable> made) {
    return std::make_shared<const SampleTable>(std::move(made).value());
  }
  static std::vector<int64_t> integers(const Batch& batch) {
    std::vector<int64_t> all(batch.bytes / sizeof(int64_t));
    std::memcpy(all.data(), batch.memory.data(), batch.bytes);
    return all;
  }
  static std::string text(const Batch& batch, const Place& place) {
    return {reinterpret_cast<const char*>(batch.memory.data()) + place.offset, place.bytes};
  }

  Budget budget_{uint64_t{1} << 20};
  std::unique_ptr<Store> store_ = std::move(MemoryStore::make(budget_).value());
};

TEST_F(Reading, IntegersOfSeveralWidthsAreRowsOfOneMatrix) {
  put_numbers<uint16_t>("a", {1, 2, 3, 4, 65535});
  put_numbers<int32_t>("b", {-1, 70000, 5});
  const auto a = table(SampleTable::equal({"a"}, {{0, 2, 0}}, 4, 6));
  const auto b = table(SampleTable::equal({"b"}, {{0, 1, 0}}, 8, 12));
  const auto reader =
      BatchReader::make({{store_.get(), a, Integer::u16}, {store_.get(), b, Integer::i32}}, 2)
          .value();
  const auto batch = reader->read({{{0, 1}, {1, 0}, {0, 0}}, {}, {}}).batch.wait().value();
  EXPECT_EQ(integers(*batch), (std::vector<int64_t>{3, 4, 65535, -1, 70000, 5, 1, 2, 3}));
  EXPECT_EQ(batch->asked, (std::vector<uint64_t>{12, 12}));
}

TEST_F(Reading, UnequalSamplesBeginAtMultiplesOf64) {
  put("a", "0123456789");
  static const std::vector<uint64_t> starts{0, 2, 2, 3}, offsets{5, 9, 0}, bytes{2, 1, 4};
  static const std::vector<uint32_t> objects{0, 0, 0}, crcs{0, 0, crc32c("0123", 4)};
  const auto parts =
      table(SampleTable::ranges({"a"}, {10}, {starts, objects, offsets, bytes, {}, {}}));
  const auto reader = BatchReader::make({{store_.get(), parts, std::nullopt}}, 2).value();
  const auto batch = reader->read({{{0, 2}, {0, 1}, {0, 0}}, {}, {}}).batch.wait().value();
  EXPECT_EQ(batch->starts, (std::vector<uint64_t>{0, 1, 1, 3}));
  EXPECT_EQ(text(*batch, batch->parts[0]), "0123");
  EXPECT_EQ(text(*batch, batch->parts[1]), "56");
  EXPECT_EQ(text(*batch, batch->parts[2]), "9");
  EXPECT_EQ(batch->parts[1].offset, 64);
  EXPECT_EQ(reader->read({{}, {}, {}}).batch.wait().value()->bytes, 0);
  const auto checked =
      table(SampleTable::ranges({"a"}, {10}, {starts, objects, offsets, bytes, crcs, {}}));
  const auto checking = BatchReader::make({{store_.get(), checked, std::nullopt}}, 2).value();
  EXPECT_TRUE(checking->read({{{0, 2}, {0, 1}}, {}, {}}).batch.wait());
  EXPECT_EQ(checking->read({{{0, 2}, {0, 0}}, {}, {}}).batch.wait().error().code, Code::corruption);
}

TEST_F(Reading, RecordsAreSplitIntoTheirColumns) {
  // Two columns, one of two bytes: a size, then both.
  put("a", std::string("\3\0\0\0xxabc", 9) + std::string("\0\0\0\0yy", 6) +
               std::string("\4\0\0\0xxabc", 9));
  static const std::vector<uint64_t> starts{0, 1, 2, 3}, offsets{0, 9, 15}, bytes{9, 6, 9};
  static const std::vector<uint32_t> objects{0, 0, 0};
  const auto records =
      table(SampleTable::ranges({"a"}, {24}, {starts, objects, offsets, bytes, {}, {}}, {0, 2}));
  const auto whole =
      table(SampleTable::ranges({"a"}, {24}, {starts, objects, offsets, bytes, {}, {}}));
  const auto reader =
      BatchReader::make({{store_.get(), records, {}}, {store_.get(), whole, {}}}, 2).value();
  const auto batch = reader->read({{{0, 1}, {1, 2}, {0, 0}}, {}, {}}).batch.wait().value();
  ASSERT_EQ(batch->starts, (std::vector<uint64_t>{0, 2, 3, 5}));
  EXPECT_EQ(text(*batch, batch->parts[0]), "");
  EXPECT_EQ(text(*batch, batch->parts[1]), "yy");
  EXPECT_EQ(batch->parts[2].bytes, 9);
  EXPECT_EQ(text(*batch, batch->parts[3]), "xxa");  // sizes first, then the columns in order
  EXPECT_EQ(text(*batch, batch->parts[4]), "bc");
  const auto wrong = reader->read({{{0, 0}, {0, 2}}, {}, {}}).batch.wait();
  EXPECT_EQ(wrong.error().code, Code::corruption);
  EXPECT_NE(wrong.error().what.find("sample 2"), std::string::npos) << wrong.error().what;
  EXPECT_NE(wrong.error().what.find("'a'"), std::string::npos) << wrong.error().what;
  // Also where they came with their neighbours.
  const auto order = Sequence::in_order(2);
  const auto near = reader->read(order.reads(0, 2)).batch.wait().value();
  EXPECT_EQ(near->starts, (std::vector<uint64_t>{0, 2, 4}));
  EXPECT_EQ(text(*near, near->parts[3]), "yy");
}

TEST_F(Reading, MemoryIsUsedAgainButNotWhileSomebodyHasIt) {
  put("a", std::string(40, 'x'));
  const auto rows = table(SampleTable::equal({"a"}, {{0, 4, 0}}, 10, 10));
  auto reader = BatchReader::make({{store_.get(), rows, std::nullopt}}, 2).value();
  BatchPtr first = reader->read({{{0, 0}}, {}, {}}).batch.wait().value();
  BatchPtr second = reader->read({{{0, 1}}, {}, {}}).batch.wait().value();
  const std::byte* const had = first->memory.data();
  EXPECT_NE(had, second->memory.data());
  first.reset();
  EXPECT_EQ(reader->read({{{0, 2}}, {}, {}}).batch.wait().value()->memory.data(), had);
  reader.reset();
  EXPECT_EQ(text(*second, second->parts[0]), "xxxxxxxxxx");  // outlives its reader
}

// Ranges that all batches of an epoch asked for, and that each batch was right.
uint64_t ranges_of_an_epoch(BatchReader& reader, const Sequence& order, uint64_t batch) {
  uint64_t ranges = 0;
  for (uint64_t at = 0; at < *order.count(); at += batch) {
    const auto read = reader.read(order.reads(at, std::min(at + batch, *order.count())));
    const auto done = read.batch.wait().value();
    ranges += done->ranges[0];
    for (size_t i = 0; i < done->picks.size(); ++i) {
      int64_t first = 0;
      std::memcpy(&first, done->memory.data() + done->parts[i].offset, sizeof first);
      EXPECT_EQ(first, done->picks[i].sample * 3);
    }
  }
  return ranges;
}

TEST_F(Reading, NeighboursOfAWindowComeByOneRead) {
  std::vector<uint16_t> numbers(3001);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<uint16_t>(i);
  put_numbers("a", numbers);
  // Windows of three numbers and the next one: neighbours overlap.
  const auto rows = table(SampleTable::equal({"a"}, {{0, 1000, 0}}, 6, 8));
  const auto reader = BatchReader::make({{store_.get(), rows, Integer::u16}}, 2).value();
  EXPECT_EQ(ranges_of_an_epoch(*reader, Sequence::shuffled(1000, 1), 10), 1000);
  // 63 runs, and one more at each border of the ten windows.
  const uint64_t ranges =
      ranges_of_an_epoch(*reader, Sequence::windowed({1000, 16, 100, 1, 10}, 1), 10);
  EXPECT_GE(ranges, 63);
  EXPECT_LE(ranges, 63 + 10);
  EXPECT_EQ(ranges_of_an_epoch(*reader, Sequence::in_order(1000), 10), 100);
}

TEST_F(Reading, NeighboursThatCouldNotBeReadAreReadAnew) {
  const auto rows = table(SampleTable::equal({"a"}, {{0, 20, 0}}, 10, 10));
  const auto reader = BatchReader::make({{store_.get(), rows, std::nullopt}}, 2).value();
  const Sequence order = Sequence::windowed({20, 5, 10}, 1);
  EXPECT_EQ(reader->read(order.reads(0, 4)).batch.wait().error().code, Code::not_found);
  put("a", std::string(200, 'x'));
  EXPECT_TRUE(reader->read(order.reads(0, 4)).batch.wait());
}

TEST_F(Reading, NeighboursOfSeveralPartsLeaveSmallGapsOnly) {
  const uint64_t far = kJoinedGap + 20;
  put("a", std::string(far, '.') + "0123456789");
  static const std::vector<uint64_t> starts{0, 2, 3}, offsets{0, 5, far}, bytes{2, 3, 4};
  static const std::vector<uint32_t> objects{0, 0, 0};
  const auto parts =
      table(SampleTable::ranges({"a"}, {far + 10}, {starts, objects, offsets, bytes, {}, {}}));
  const auto reader = BatchReader::make({{store_.get(), parts, std::nullopt}}, 2).value();
  const auto batch = reader->read(Sequence::in_order(2).reads(0, 2)).batch.wait().value();
  EXPECT_EQ(batch->ranges[0], 2);
  EXPECT_EQ(batch->asked[0], 8 + 4);
  EXPECT_EQ(text(*batch, batch->parts[1]), "...");
  EXPECT_EQ(text(*batch, batch->parts[2]), "0123");
}

TEST_F(Reading, ErrorsNameWhatIsWrong) {
  put("a", "0123");
  const auto beyond = table(SampleTable::equal({"a", "gone"}, {{0, 1, 2}, {1, 1, 0}}, 4, 4));
  const auto reader = BatchReader::make({{store_.get(), beyond, std::nullopt}}, 2).value();
  EXPECT_EQ(reader->read({{{0, 0}}, {}, {}}).batch.wait().error().code, Code::invalid_argument);
  EXPECT_EQ(reader->read({{{0, 1}}, {}, {}}).batch.wait().error().code, Code::not_found);
  const auto outside = reader->read({{{0, 2}}, {}, {}}).batch.wait();
  EXPECT_EQ(outside.error().code, Code::invalid_argument);
  EXPECT_NE(outside.error().what.find("sample 2"), std::string::npos);
  EXPECT_FALSE(BatchReader::make({{store_.get(), beyond, Integer::i64}}, 2));
  EXPECT_FALSE(BatchReader::make({}, 2));
}

TEST_F(Reading, ManyBatchesMayBeUnderWayWhenTheReaderEnds) {
  put_numbers<uint16_t>("a", std::vector<uint16_t>(1000, 7));
  const auto rows = table(SampleTable::equal({"a"}, {{0, 100, 0}}, 20, 20));
  auto reader = BatchReader::make({{store_.get(), rows, Integer::u16}}, 2).value();
  std::vector<Future<BatchPtr>> all;
  for (uint64_t i = 0; i < 100; ++i)
    all.push_back(reader->read({{{0, i}, {0, 99 - i}}, {}, {}}).batch);
  reader.reset();
  for (const auto& each : all)
    EXPECT_EQ(integers(*each.wait().value()), std::vector<int64_t>(20, 7));
}

TEST_F(Reading, BatchesLieInTheArenaAsFarAsThereIsRoom) {
  put_numbers<uint16_t>("a", {1, 2, 3, 4});
  const auto rows = table(SampleTable::equal({"a"}, {{0, 4, 0}}, 2, 2));
  Budget memory(uint64_t{4} << 20);
  std::shared_ptr<Arena> arena = Arena::make(uint64_t{2} << 20, memory).value();
  const auto in_arena = [arena](const Batch& batch) {
    return batch.memory.data() >= arena->data() &&
           batch.memory.data() + batch.memory.size() <= arena->data() + arena->size();
  };
  auto reader = BatchReader::make({{store_.get(), rows, Integer::u16}}, 2,
                                  {.unpacked_bytes = 1, .arena = arena})
                    .value();
  const auto read = [&] { return reader->read({{{0, 2}, {0, 0}}, {}, {}}).batch.wait().value(); };
  auto first = read();
  EXPECT_TRUE(in_arena(*first));
  EXPECT_EQ(arena->used(), 4096);
  {
    const Buffer others = arena->take(arena->largest_free()).value();
    const auto second = read();
    EXPECT_FALSE(in_arena(*second));
    EXPECT_EQ(integers(*second), (std::vector<int64_t>{3, 1}));
  }
  const auto third = read();
  EXPECT_TRUE(in_arena(*third));
  reader.reset();
  EXPECT_EQ(integers(*first), (std::vector<int64_t>{3, 1}));
  first.reset();
  EXPECT_EQ(arena->used(), 4096);  // of the third
}

// Shards of ten samples of 10 bytes each; "p" is plain, the others are compressed.
class ReadingPacked : public Reading {
 protected:
  static constexpr uint64_t kRaw = 100;

  void SetUp() override {
    for (const char* const key : {"a", "b", "c", "p"}) {
      std::string text(kRaw, *key);
      for (size_t i = 0; i < 10; ++i) text[i * 10 + 9] = static_cast<char>('0' + i);
      if (key[0] != 'p') text = packed(text);
      stored_.push_back({key[0] == 'p' ? Packing::none : Packing::zstd, text.size()});
      put(key, text);
    }
  }
  static std::string packed(const std::string& text) {
    std::string out(ZSTD_compressBound(text.size()), '\0');
    out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
    return out;
  }
  std::shared_ptr<const SampleTable> shards(bool with_crcs = false) const {
    struct Arrays {
      std::vector<uint64_t> starts, offsets, bytes;
      std::vector<uint32_t> objects, crcs;
    };
    const auto arrays = std::make_shared<Arrays>();
    for (uint64_t i = 0; i <= 40; ++i) arrays->starts.push_back(i);
    for (uint64_t i = 0; i < 40; ++i) {
      arrays->offsets.push_back(i % 10 * 10);
      arrays->bytes.push_back(10);
      arrays->objects.push_back(static_cast<uint32_t>(i / 10));
      const std::string text = sample(i);
      if (with_crcs) arrays->crcs.push_back(crc32c(text.data(), text.size()));
    }
    return table(SampleTable::ranges(
        {"a", "b", "c", "p"}, std::vector<uint64_t>(4, kRaw),
        {arrays->starts, arrays->objects, arrays->offsets, arrays->bytes, arrays->crcs, arrays}, {},
        stored_));
  }
  static std::string sample(uint64_t number) {
    std::string text(10, "abcp"[number / 10]);
    text[9] = static_cast<char>('0' + number % 10);
    return text;
  }
  static void expect_right(const Batch& batch) {
    for (size_t i = 0; i < batch.picks.size(); ++i)
      EXPECT_EQ(text(batch, batch.parts[batch.starts[i]]), sample(batch.picks[i].sample));
  }

  std::vector<PackedObject> stored_;
};

TEST_F(ReadingPacked, AShardIsFetchedOnceForAllOfItsSamples) {
  const auto reader = BatchReader::make({{store_.get(), shards(true), std::nullopt}}, 2).value();
  const auto first = reader->read({{{0, 3}, {0, 12}, {0, 1}}, {}, {}}).batch.wait().value();
  expect_right(*first);
  EXPECT_EQ(first->ranges[0], 2);
  EXPECT_EQ(first->asked[0], stored_[0].bytes + stored_[1].bytes);
  EXPECT_LE(first->times.read, first->times.unpacked);
  const auto second = reader->read({{{0, 19}, {0, 0}, {0, 35}}, {}, {}}).batch.wait().value();
  expect_right(*second);
  EXPECT_EQ(second->ranges[0], 1);  // of the plain one
  EXPECT_EQ(second->asked[0], 10);
}

TEST_F(ReadingPacked, WhatIsKeptStaysWithinTheMemory) {
  // Room for one shard and what the next one is stored as.
  const uint64_t room = kRaw + 2 * stored_[0].bytes;
  const auto reader =
      BatchReader::make({{store_.get(), shards(), std::nullopt}}, 2, {room}).value();
  const auto ranges = [&](uint64_t number) {
    const auto batch = reader->read({{{0, number}}, {}, {}}).batch.wait().value();
    expect_right(*batch);
    return batch->ranges[0];
  };
  EXPECT_EQ(ranges(0), 1);
  EXPECT_EQ(ranges(5), 0);
  EXPECT_EQ(ranges(11), 1);
  EXPECT_EQ(ranges(6), 1);  // it had to go
  const auto both = reader->read({{{0, 1}, {0, 11}, {0, 21}}, {}, {}}).batch.wait().value();
  expect_right(*both);
}

TEST_F(ReadingPacked, ManyBatchesShareLittleMemory) {
  const uint64_t room = kRaw + stored_[0].bytes;
  auto reader = BatchReader::make({{store_.get(), shards(), std::nullopt}}, 2, {room}).value();
  std::vector<Future<BatchPtr>> all;
  for (uint64_t i = 0; i < 200; ++i)
    all.push_back(reader->read({{{0, i * 7 % 40}, {0, i * 11 % 40}}, {}, {}}).batch);
  reader.reset();
  for (const auto& each : all) expect_right(*each.wait().value());
}

// As much memory as this is left for shards.
uint64_t cap_for(uint64_t room) { return room + room / 7 + 1; }

TEST_F(ReadingPacked, ShardsAreReservedInTheMemoryOfTheStore) {
  Budget memory(cap_for(kRaw + 2 * stored_[0].bytes));
  auto reader = BatchReader::make({{store_.get(), shards(), std::nullopt, {}, &memory}}, 2).value();
  const auto ranges = [&](uint64_t number) {
    const auto batch = reader->read({{{0, number}}, {}, {}}).batch.wait().value();
    expect_right(*batch);
    return batch->ranges[0];
  };
  EXPECT_EQ(ranges(0), 1);
  EXPECT_GE(memory.used(), kRaw);
  EXPECT_EQ(ranges(5), 0);
  EXPECT_EQ(ranges(11), 1);
  EXPECT_EQ(ranges(6), 1);  // it had to go
  reader.reset();
  EXPECT_EQ(memory.used(), 0);
  EXPECT_GE(memory.peak(), kRaw + stored_[0].bytes);  // packed and unpacked at once
}

TEST_F(ReadingPacked, SourcesShareTheMemoryOfTheirStore) {
  Budget memory(cap_for(kRaw + stored_[0].bytes + 10));
  const BatchSource source{store_.get(), shards(), std::nullopt, {}, &memory};
  auto reader = BatchReader::make({source, source, source}, 2).value();
  std::vector<Future<BatchPtr>> all;
  for (uint64_t i = 0; i < 200; ++i) {
    const auto of = [i](uint64_t by) { return static_cast<uint32_t>(i * by % 3); };
    all.push_back(reader->read({{{of(1), i * 7 % 40}, {of(2), i * 11 % 40}}, {}, {}}).batch);
  }
  reader.reset();
  for (const auto& each : all) expect_right(*each.wait().value());
  EXPECT_EQ(memory.used(), 0);
}

TEST_F(ReadingPacked, ReadersOfOneStoreGiveUpWhatTheyKeepForEachOther) {
  Budget memory(cap_for(kRaw + stored_[0].bytes + 10));  // one shard at a time
  const BatchSource source{store_.get(), shards(), std::nullopt, {}, &memory};
  const auto one = BatchReader::make({source}, 2).value();
  const auto other = BatchReader::make({source}, 2).value();
  for (uint64_t i = 0; i < 3; ++i) {
    expect_right(*one->read({{{0, 10 * i}}, {}, {}}).batch.wait().value());
    expect_right(*other->read({{{0, 10 * i + 1}}, {}, {}}).batch.wait().value());
  }
}

TEST_F(ReadingPacked, ReadersOfOneStoreWaitForWhatTheOthersHaveUnderWay) {
  Budget memory(cap_for(kRaw + stored_[0].bytes + 10));
  const BatchSource source{store_.get(), shards(), std::nullopt, {}, &memory};
  std::vector<std::unique_ptr<BatchReader>> readers;
  for (int i = 0; i < 3; ++i) readers.push_back(BatchReader::make({source}, 2).value());
  std::vector<Future<BatchPtr>> all;
  for (uint64_t i = 0; i < 300; ++i)
    all.push_back(readers[i % 3]->read({{{0, i * 7 % 30}, {0, i * 11 % 30}}, {}, {}}).batch);
  for (const auto& each : all) expect_right(*each.wait().value());
  readers.clear();
  EXPECT_EQ(memory.used(), 0);
}

TEST_F(ReadingPacked, TooLittleMemoryIsAnErrorAndNotAWait) {
  Budget memory(cap_for(2 * kRaw + 2 * stored_[0].bytes));
  const auto reader =
      BatchReader::make({{store_.get(), shards(), std::nullopt, {}, &memory}}, 2).value();
  {
    const Grant others = memory.take(memory.cap() - kRaw, "a test").value();
    std::vector<Future<BatchPtr>> all;
    for (uint64_t i = 0; i < 4; ++i)  // none of them waits for another one
      all.push_back(reader->read({{{0, i * 10 % 30}}, {}, {}}).batch);
    for (const auto& each : all) {
      const Error error = each.wait().error();
      EXPECT_EQ(error.code, Code::over_budget);
      EXPECT_NE(error.what.find("(dram=)"), std::string::npos) << error.what;
      EXPECT_NE(error.what.find("open the store with more"), std::string::npos) << error.what;
    }
  }
  expect_right(*reader->read({{{0, 1}, {0, 11}}, {}, {}}).batch.wait().value());  // it came back

  Budget tiny(kRaw);
  const auto never =
      BatchReader::make({{store_.get(), shards(), std::nullopt, {}, &tiny}}, 2).value();
  const Error error = never->read({{{0, 0}}, {}, {}}).batch.wait().error();
  EXPECT_EQ(error.code, Code::over_budget);
  EXPECT_NE(error.what.find("'a' needs 100 bytes to be unpacked"), std::string::npos) << error.what;
  EXPECT_NE(error.what.find("(dram=)"), std::string::npos) << error.what;
}

TEST_F(ReadingPacked, BatchesAreTheSameWhileTheNumberOfThreadsChanges) {
  const auto threads = std::make_shared<PipelineThreads>(1, 4);
  auto reader =
      BatchReader::make({{store_.get(), shards(true), std::nullopt}}, 2, {}, threads).value();
  std::vector<Future<BatchPtr>> all;
  for (uint64_t i = 0; i < 200; ++i) {
    threads->use(1 + i % 4);
    all.push_back(reader->read({{{0, i * 7 % 40}, {0, i * 11 % 40}}, {}, {}}).batch);
  }
  reader.reset();
  for (const auto& each : all) expect_right(*each.wait().value());
  EXPECT_GT(threads->busy_ns(), 0);
}

TEST_F(ReadingPacked, NeighboursComeFromOneFetch) {
  const auto reader = BatchReader::make({{store_.get(), shards(), std::nullopt}}, 2).value();
  const Sequence order = Sequence::windowed({40, 10, 20, 1, 4}, 1);
  uint64_t ranges = 0;
  for (uint64_t at = 0; at < 40; at += 4) {
    const auto batch = reader->read(order.reads(at, at + 4)).batch.wait().value();
    expect_right(*batch);
    ranges += batch->ranges[0];
  }
  EXPECT_EQ(ranges, 4);
}

TEST_F(ReadingPacked, ErrorsNameTheShard) {
  const auto tight = BatchReader::make({{store_.get(), shards(), std::nullopt}}, 2, {kRaw}).value();
  const auto refused = tight->read({{{0, 0}}, {}, {}}).batch.wait();
  EXPECT_EQ(refused.error().code, Code::over_budget);
  EXPECT_NE(refused.error().what.find("'a'"), std::string::npos) << refused.error().what;
  const auto reader = BatchReader::make({{store_.get(), shards(), std::nullopt}}, 2).value();
  const auto error = [&](const std::string& bytes) {
    put("b", bytes);
    const auto read = reader->read({{{0, 10}, {0, 0}}, {}, {}}).batch.wait();
    return read ? Error{} : read.error();
  };
  std::string flipped(stored_[1].bytes, 'x');
  const Error damaged = error(flipped);
  EXPECT_EQ(damaged.code, Code::corruption);
  EXPECT_NE(damaged.what.find("'b' cannot be unpacked"), std::string::npos) << damaged.what;
  EXPECT_NE(error("short").what.find("'b'"), std::string::npos);
  // It is fetched anew once it is sound again.
  put("b", packed([] {
        std::string text(kRaw, 'b');
        for (size_t i = 0; i < 10; ++i) text[i * 10 + 9] = static_cast<char>('0' + i);
        return text;
      }()));
  expect_right(*reader->read({{{0, 10}}, {}, {}}).batch.wait().value());
}

}  // namespace
}  // namespace stoker::data
