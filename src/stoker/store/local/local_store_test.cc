// What only a local store can show: what is on its volumes, what a crash and damage leave, and what its commits cost.
#include "stoker/store/local/store.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "stoker/base/crc32c.h"
#include "stoker/store/local/fsck.h"
#include "stoker/store/local/journal.h"
#include "stoker/store/local/volume.h"
#include "stoker/store/runtime.h"
#include "stoker/store/writer_lock.h"
#include "stoker/testing/store_harness.h"

namespace stoker {
namespace {

class LocalStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = testing::TempDir() + "local_store_" + std::to_string(getpid()) + "_" + testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(root_);
    runtime_ = std::move(*RuntimeOwner::make({.engine = "posix", .cpu_threads = 2}));
    volumes_ = {root_ + "/a"};
    options_.create = true;
    options_.capacity_bytes = 2 * kMiB;
    options_.chunk_bytes = 64 * kKiB;
    options_.objects_max = 64;
    options_.holder = "the test";
  }
  void TearDown() override {
    store_.reset();
    runtime_.reset();
    std::filesystem::remove_all(root_);
  }
  Result<std::unique_ptr<Store>> try_open(const StoreOptions& options) { return open_local_store(volumes_, runtime_->runtime(), options); }
  Result<std::unique_ptr<Store>> try_open() { return try_open(options_); }
  void open() {
    store_.reset();
    auto store = try_open();
    ASSERT_OK(store);
    store_ = std::move(*store);
  }
  void put(const std::string& key, Bytes bytes, Durability durability = Durability::durable) {
    auto change = std::move(*store_->begin());
    ASSERT_OK(change->resize(key, bytes.size()));
    ASSERT_OK(change->write(key, 0, slice_of(bytes)).wait());
    ASSERT_OK(change->commit(durability).wait());
  }
  FsckReport fsck(FsckOptions options = {}) {
    auto report = fsck_local_store(volumes_, runtime_->runtime(), options);
    EXPECT_OK(report);
    if (report) return *report;
    FsckReport failed;
    failed.problems.push_back(report.error().what);
    return failed;
  }
  std::string file(size_t volume = 0) const { return volumes_[volume] + "/stoker.volume"; }
  local::VolumeHeader header(size_t volume = 0) {
    Bytes sector = bytes_at(0, local::kHeaderBytes, volume);
    return **local::decode_header(sector);
  }
  Bytes bytes_at(uint64_t offset, size_t size, size_t volume = 0) {
    Bytes bytes(size);
    const int fd = ::open(file(volume).c_str(), O_RDONLY);
    EXPECT_EQ(pread(fd, bytes.data(), size, static_cast<off_t>(offset)), static_cast<ssize_t>(size));
    close(fd);
    return bytes;
  }
  void flip(uint64_t offset, size_t volume = 0, uint8_t bits = 1) {
    Bytes byte = bytes_at(offset, 1, volume);
    byte[0] ^= std::byte{bits};
    const int fd = ::open(file(volume).c_str(), O_WRONLY);
    EXPECT_EQ(pwrite(fd, byte.data(), 1, static_cast<off_t>(offset)), 1);
    close(fd);
  }
  // The offsets, within a copy of the journal, of the frames of its newest generation.
  std::vector<uint64_t> newest_frames(size_t copy, size_t volume = 0) {
    const auto head = header(volume);
    std::vector<uint64_t> newest;
    uint64_t generation = 0;
    for (uint64_t area = 0; area < 2; ++area) {
      Bytes bytes = bytes_at(head.journal_at[copy] + area * head.area_bytes, head.area_bytes, volume);
      MemoryLogSource source(bytes);
      const auto first = *read_frame(source, head.store, 0);
      if (!first || first->generation < generation) continue;
      generation = first->generation;
      newest.clear();
      LogScan scan(source, {head.store, generation});
      for (auto item = *scan.next(); item; item = *scan.next()) newest.push_back(area * head.area_bytes + std::get<LogRecord>(*item).offset);
    }
    return newest;
  }

  std::string root_;
  std::vector<std::string> volumes_;
  StoreOptions options_;
  std::unique_ptr<RuntimeOwner> runtime_;
  std::unique_ptr<Store> store_;
};

TEST_F(LocalStoreTest, ComesBackWithWhatWasDurable) {
  open();
  put("a", pattern(100'000, 1));
  put("b", pattern(10, 2), Durability::deferred);
  put("c", pattern(70'000, 3));
  put("lost", pattern(5, 4), Durability::deferred);
  EXPECT_EQ(store_->info().committed, 4U);
  EXPECT_EQ(store_->info().durable, 3U);
  open();
  EXPECT_EQ(store_->info().committed, 3U);
  EXPECT_GE(runtime_->budget().used(), store_->info().map_bytes) << "the recovered map counts, too";
  EXPECT_EQ(read_all(*store_, "a"), pattern(100'000, 1));
  EXPECT_EQ(read_all(*store_, "b"), pattern(10, 2));
  EXPECT_EQ(read_all(*store_, "c"), pattern(70'000, 3));
  EXPECT_EQ(code_of(store_->stat("lost")), Code::not_found);
  store_.reset();
  EXPECT_TRUE(fsck().problems.empty());
}

TEST_F(LocalStoreTest, ReservesItsSpaceWhenMade) {
  open();
  struct stat st {};
  ASSERT_EQ(stat(file().c_str(), &st), 0);
  EXPECT_GE(static_cast<uint64_t>(st.st_blocks) * 512, options_.capacity_bytes);
  EXPECT_EQ(store_->info().capacity_bytes, options_.capacity_bytes);
  EXPECT_EQ(store_->info().used_bytes, 0U);
}

TEST_F(LocalStoreTest, RefusesWhatIsNoStoreOrNotThere) {
  options_.create = false;
  EXPECT_EQ(code_of(try_open()), Code::not_found);
  std::filesystem::create_directories(volumes_[0]);
  EXPECT_EQ(code_of(try_open()), Code::not_found);
  std::ofstream(file()) << std::string(200'000, 'x');
  options_.create = true;
  EXPECT_EQ(code_of(try_open()), Code::mismatch);
}

TEST_F(LocalStoreTest, RefusesOptionsThatMakeNoStore) {
  StoreOptions odd = options_;
  odd.chunk_bytes = 100'000;
  EXPECT_EQ(code_of(try_open(odd)), Code::invalid_argument);
  odd = options_;
  odd.capacity_bytes = 0;
  EXPECT_EQ(code_of(try_open(odd)), Code::invalid_argument);
  odd.capacity_bytes = uint64_t{1} << 50;
  const auto full = try_open(odd);
  EXPECT_EQ(code_of(full), Code::out_of_space);
  EXPECT_FALSE(std::filesystem::exists(file()));
  open();
}

TEST_F(LocalStoreTest, ASecondWriterIsToldWhoHoldsIt) {
  open();
  const auto second = try_open();
  EXPECT_EQ(code_of(second), Code::busy);
  EXPECT_NE(second.error().what.find("in use by the test"), std::string::npos) << second.error().what;
  StoreOptions reader = options_;
  reader.read_only = true;
  EXPECT_EQ(code_of(try_open(reader)), Code::busy);  // what a reader maps would be overwritten under it
  store_.reset();
  auto one = try_open(reader);
  auto two = try_open(reader);  // readers share
  EXPECT_OK(one);
  EXPECT_OK(two);
  // The name of the writer that is gone would send its user looking for the wrong process.
  const auto writer = try_open();
  EXPECT_EQ(code_of(writer), Code::busy);
  EXPECT_NE(writer.error().what.find("being read by another process"), std::string::npos) << writer.error().what;
  EXPECT_EQ(writer.error().what.find("the test"), std::string::npos) << writer.error().what;
}

TEST_F(LocalStoreTest, WhoeverLetsGoLeavesNoName) {
  open();
  store_.reset();
  const Bytes text = bytes_at(kHolderAt, 512);
  EXPECT_TRUE(std::all_of(text.begin(), text.end(), [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST_F(LocalStoreTest, AFileThatBeginsWithZerosIsTakenOnlyIfThereIsNothingElseInIt) {
  std::filesystem::create_directories(volumes_[0]);
  const uint64_t size = 16 * kMiB;
  for (const uint64_t at : {local::kHeaderRegion, 5 * kMiB + 4097, size - 1}) {
    std::ofstream(file()) << "";
    std::filesystem::resize_file(file(), size);
    const int fd = ::open(file().c_str(), O_WRONLY);
    ASSERT_EQ(pwrite(fd, "!", 1, static_cast<off_t>(at)), 1);
    close(fd);
    const auto store = try_open();
    EXPECT_EQ(code_of(store), Code::mismatch) << at;
    EXPECT_NE(store.error().what.find("holds data from byte " + std::to_string(at / 4096 * 4096)), std::string::npos) << store.error().what;
    EXPECT_EQ(bytes_at(at, 1)[0], static_cast<std::byte>('!'));
    EXPECT_EQ(std::filesystem::file_size(file()), size);
  }
  std::ofstream(file()) << std::string(size, '\0');  // written, so that no hole tells that it is empty
  open();
  put("a", pattern(1000, 1));
  open();
  EXPECT_EQ(read_all(*store_, "a"), pattern(1000, 1));
}

TEST_F(LocalStoreTest, WhatACutOffMakingLeavesIsMadeAgain) {
  std::filesystem::create_directories(volumes_[0]);
  std::ofstream(file()) << "";  // the name was made, the size was not
  StoreOptions reader = options_;
  reader.read_only = true;
  EXPECT_FALSE(try_open(reader));
  EXPECT_EQ(std::filesystem::file_size(file()), 0U);
  open();
  struct stat st {};
  ASSERT_EQ(stat(file().c_str(), &st), 0);
  EXPECT_GE(static_cast<uint64_t>(st.st_blocks) * 512, options_.capacity_bytes);
  store_.reset();
  const auto size = std::filesystem::file_size(file());
  std::filesystem::resize_file(file(), 0);
  std::filesystem::resize_file(file(), size);  // the size was made, the headers were not
  open();
  put("a", pattern(1000, 1));
  EXPECT_EQ(read_all(*store_, "a"), pattern(1000, 1));
}

TEST_F(LocalStoreTest, ReadOnlyWritesNothing) {
  open();
  put("a", pattern(1000, 1));
  store_.reset();
  const auto size = std::filesystem::file_size(file());
  const Bytes before = bytes_at(0, size);
  StoreOptions reader;
  reader.read_only = true;
  {
    auto store = std::move(*try_open(reader));
    EXPECT_EQ(read_all(*store, "a"), pattern(1000, 1));
    EXPECT_EQ(code_of(store->begin()), Code::read_only);
    EXPECT_EQ(code_of(store->snapshot("s").wait()), Code::read_only);
    EXPECT_FALSE(store->info().read_only.empty());
  }
  EXPECT_EQ(bytes_at(0, size), before);
  EXPECT_EQ(fsck().problems.size(), 0U);
  EXPECT_EQ(bytes_at(0, size), before);
}

TEST_F(LocalStoreTest, CommitCostsOneFlushAVolumeAndOneRecordInTwoPlaces) {
  for (const size_t count : {size_t{1}, size_t{2}}) {
    store_.reset();
    volumes_.clear();
    for (size_t i = 0; i < count; ++i) volumes_.push_back(root_ + "/" + std::to_string(count) + std::to_string(i));
    open();
    put("warm", pattern(10, 1));
    const auto idle = store_->info().volumes;
    auto change = std::move(*store_->begin());
    Bytes bytes = pattern(4 * 64 * kKiB, 1);
    ASSERT_OK(change->resize("w", bytes.size()));
    std::vector<Future<void>> writes;
    for (size_t i = 0; i < 4; ++i) writes.push_back(change->write("w", i * 64 * kKiB, slice_of(bytes).sub(i * 64 * kKiB, 64 * kKiB)));
    for (auto& write : writes) ASSERT_OK(write.wait());
    const IoCounters& io = runtime_->loop().counters();
    const uint64_t writes_before = io.writes.get(), syncs_before = io.syncs.get(), bytes_before = io.written_bytes.get();
    ASSERT_OK(change->commit(Durability::durable).wait());
    EXPECT_EQ(io.writes.get() - writes_before, 2U) << "the record, in two places";
    EXPECT_EQ(io.written_bytes.get() - bytes_before, 2 * 4096U);
    const auto moved = store_->info().volumes;
    size_t touched = 0;  // one alone, where it is so much quicker
    for (size_t i = 0; i < count; ++i) touched += moved[i].written_bytes > idle[i].written_bytes ? 1 : 0;
    EXPECT_GE(touched, 1U);
    EXPECT_EQ(io.syncs.get() - syncs_before, touched + count) << "of the data on each volume that it went to, of the journal on each that has a copy";
  }
}

TEST_F(LocalStoreTest, DeferredCommitsCostNothingUntilADurableOne) {
  open();
  const IoCounters& io = runtime_->loop().counters();
  const uint64_t writes_before = io.writes.get(), syncs_before = io.syncs.get();
  for (int i = 0; i < 5; ++i) put("d" + std::to_string(i), pattern(100, 1), Durability::deferred);
  EXPECT_EQ(io.writes.get() - writes_before, 5U);  // the data alone
  EXPECT_EQ(io.syncs.get() - syncs_before, 0U);
  put("durable", pattern(100, 1));
  EXPECT_EQ(io.writes.get() - writes_before, 5U + 1U + 2U);
  EXPECT_EQ(io.syncs.get() - syncs_before, 2U);
  EXPECT_EQ(store_->info().durable, 6U);
}

TEST_F(LocalStoreTest, CommitsThatWaitTogetherShareARecord) {
  open();
  put("warm", pattern(10, 1));
  std::vector<std::unique_ptr<Transaction>> changes;
  for (int i = 0; i < 8; ++i) {
    changes.push_back(std::move(*store_->begin()));
    ASSERT_OK(changes.back()->resize("k" + std::to_string(i), 1));
  }
  const uint64_t syncs_before = runtime_->loop().counters().syncs.get();
  std::vector<Future<Version>> commits;
  for (auto& change : changes) commits.push_back(change->commit(Durability::durable));
  for (size_t i = 0; i < commits.size(); ++i) EXPECT_EQ(*commits[i].wait(), i + 2);
  EXPECT_LE(runtime_->loop().counters().syncs.get() - syncs_before, 8U);  // nothing to flush but records; fewer where they met
}

TEST_F(LocalStoreTest, WholeChunksMoveAsTheyAreAndAdjacentOnesTogether) {
  open();
  auto change = std::move(*store_->begin());
  const AlignedBytes bytes(8 * 64 * kKiB);
  std::memset(bytes.data(), 7, bytes.size());
  ASSERT_OK(change->resize("w", bytes.size()));
  const IoCounters& io = runtime_->loop().counters();
  const uint64_t writes_before = io.writes.get(), written_before = io.written_bytes.get();
  ASSERT_OK(change->write("w", 0, bytes.slice()).wait());
  EXPECT_EQ(io.writes.get() - writes_before, 1U);
  EXPECT_EQ(io.written_bytes.get() - written_before, bytes.size());
  ASSERT_OK(change->commit(Durability::durable).wait());
  const uint64_t reads_before = io.reads.get(), read_before = io.read_bytes.get();
  ASSERT_OK(store_->read("w", 0, bytes.slice(), {}).wait());
  EXPECT_EQ(io.reads.get() - reads_before, 1U);
  EXPECT_EQ(io.read_bytes.get() - read_before, bytes.size());
}

TEST_F(LocalStoreTest, AnObjectWrittenChunkByChunkBesideOthersLiesInOnePiece) {
  options_.capacity_bytes = 32 * kMiB;
  open();
  auto change = std::move(*store_->begin());
  const AlignedBytes chunk(64 * kKiB);
  std::memset(chunk.data(), 7, chunk.size());
  for (const char* key : {"w", "m", "v"}) ASSERT_OK(change->resize(key, 16 * chunk.size()));
  for (size_t i = 0; i < 16; ++i) {
    for (const char* key : {"w", "m", "v"}) ASSERT_OK(change->write(key, i * chunk.size(), chunk.slice()).wait());
  }
  ASSERT_OK(change->commit(Durability::durable).wait());
  const AlignedBytes all(16 * chunk.size());
  for (const char* key : {"w", "m", "v"}) {
    const uint64_t reads_before = runtime_->loop().counters().reads.get();
    ASSERT_OK(store_->read(key, 0, all.slice(), {}).wait());
    EXPECT_EQ(runtime_->loop().counters().reads.get() - reads_before, 1U) << key;
  }
}

TEST_F(LocalStoreTest, SmallObjectsTakeOnlyTheirBlocksAndSparseOnesNothing) {
  open();
  put("small", pattern(5000, 1));
  EXPECT_EQ(store_->info().used_bytes, 8192U);
  auto change = std::move(*store_->begin());
  ASSERT_OK(change->resize("sparse", 50 * kMiB, kMiB));
  ASSERT_OK(change->commit(Durability::durable).wait());
  EXPECT_EQ(store_->info().used_bytes, 8192U);
  const uint64_t reads_before = runtime_->loop().counters().reads.get();
  EXPECT_EQ(read_all(*store_, "sparse"), Bytes(50 * kMiB));
  EXPECT_EQ(runtime_->loop().counters().reads.get(), reads_before);
}

TEST_F(LocalStoreTest, SpaceComesBackOnlyWhenTheCommitIsDurable) {
  options_.capacity_bytes = 256 * kKiB;
  open();
  put("a", pattern(192 * kKiB, 1));
  {
    auto change = std::move(*store_->begin());
    ASSERT_OK(change->remove("a"));
    ASSERT_OK(change->commit(Durability::deferred).wait());
  }
  {
    auto change = std::move(*store_->begin());
    Bytes bytes = pattern(128 * kKiB, 2);
    ASSERT_OK(change->resize("b", bytes.size()));
    const auto full = change->write("b", 0, slice_of(bytes)).wait();
    EXPECT_EQ(code_of(full), Code::out_of_space);
    EXPECT_NE(full.error().what.find("after the next durable commit"), std::string::npos) << full.error().what;
  }
  ASSERT_OK((*store_->begin())->commit(Durability::durable).wait());
  put("b", pattern(256 * kKiB, 2));
  EXPECT_EQ(read_all(*store_, "b"), pattern(256 * kKiB, 2));
}

TEST_F(LocalStoreTest, SnapshotsHoldTheirBytesAndDroppingFreesThem) {
  options_.capacity_bytes = 512 * kKiB;
  open();
  put("a", pattern(128 * kKiB, 1));
  ASSERT_OK(store_->snapshot("one").wait());
  put("a", pattern(128 * kKiB, 2));
  ASSERT_OK(store_->snapshot("two").wait());
  put("a", pattern(128 * kKiB, 3));
  EXPECT_EQ(store_->info().used_bytes, 384 * kKiB);
  open();
  EXPECT_EQ(read_all(*store_, "a", "one"), pattern(128 * kKiB, 1));
  EXPECT_EQ(read_all(*store_, "a", "two"), pattern(128 * kKiB, 2));
  ASSERT_OK(store_->drop("two").wait());
  EXPECT_EQ(store_->info().used_bytes, 256 * kKiB);
  open();
  EXPECT_EQ(store_->info().used_bytes, 256 * kKiB);
  EXPECT_EQ(read_all(*store_, "a", "one"), pattern(128 * kKiB, 1));
  ASSERT_OK(store_->drop("one").wait());
  EXPECT_EQ(store_->info().used_bytes, 128 * kKiB);
  EXPECT_EQ(read_all(*store_, "a"), pattern(128 * kKiB, 3));
}

TEST_F(LocalStoreTest, TheJournalTurnsAreasForeverAndSurvivesEveryReopening) {
  open();
  const uint64_t area = header().area_bytes;
  const int commits = static_cast<int>(2 * area / 4096) + 50;  // more than both areas hold
  for (int i = 0; i < commits; ++i) {
    put("k" + std::to_string(i % 7), pattern(100, static_cast<uint64_t>(i)), i % 5 == 4 ? Durability::deferred : Durability::durable);
    if (i % 97 == 0) {
      put("last", pattern(1, 1));
      open();
    }
  }
  put("last", pattern(1, 1));
  open();
  for (int i = commits - 7; i < commits; ++i) EXPECT_EQ(read_all(*store_, "k" + std::to_string(i % 7)), pattern(100, static_cast<uint64_t>(i)));
  store_.reset();
  EXPECT_TRUE(fsck().problems.empty());
}

TEST_F(LocalStoreTest, AMapThatOutgrowsTheJournalIsRefusedAndTheStoreStaysUsable) {
  options_.objects_max = 0;
  options_.capacity_bytes = 256 * kKiB;
  open();
  Status status;
  int made = 0;
  for (; status && made < 5000; ++made) {
    auto change = std::move(*store_->begin());
    ASSERT_OK(change->resize("object/" + std::to_string(made), 1));
    if (const auto done = change->commit(Durability::durable).wait(); !done) status = done.error();
  }
  EXPECT_EQ(code_of(status), Code::out_of_space);
  EXPECT_NE(status.error().what.find("objects_max"), std::string::npos);
  open();
  EXPECT_EQ(store_->list("object/")->size(), static_cast<size_t>(made - 1));
  auto change = std::move(*store_->begin());
  for (int i = 0; i < 10; ++i) ASSERT_OK(change->remove("object/" + std::to_string(i)));
  EXPECT_OK(change->commit(Durability::durable).wait());
  change = std::move(*store_->begin());
  ASSERT_OK(change->resize("instead", 1));
  EXPECT_OK(change->commit(Durability::durable).wait());
}

TEST_F(LocalStoreTest, ObjectsOfTooManyChunksAreRefusedAlsoWhereCommitsShareARecord) {
  open();
  const uint64_t bytes = uint64_t{30'000} * 64 * kKiB;
  std::vector<std::unique_ptr<Transaction>> changes;
  std::vector<Future<Version>> commits;
  for (const char* key : {"x", "y", "z"}) {
    changes.push_back(std::move(*store_->begin()));
    ASSERT_OK(changes.back()->resize(key, bytes));
  }
  for (auto& change : changes) commits.push_back(change->commit(Durability::durable));
  EXPECT_OK(commits[0].wait());
  EXPECT_OK(commits[1].wait());
  EXPECT_EQ(code_of(commits[2].wait()), Code::out_of_space);
  changes.clear();
  auto change = std::move(*store_->begin());
  ASSERT_OK(change->resize("a", 2 * bytes));  // comes before what it replaces
  for (const char* key : {"x", "y"}) ASSERT_OK(change->remove(key));
  ASSERT_OK(change->commit(Durability::durable).wait());
  change.reset();
  open();
  EXPECT_EQ(store_->list("")->size(), 1U);
}

TEST_F(LocalStoreTest, AFlippedDataBitNamesKeyAndChunkAndTheSnapshotStillReads) {
  open();
  put("a", pattern(200'000, 1));
  ASSERT_OK(store_->snapshot("good").wait());
  auto change = std::move(*store_->begin());
  Bytes bytes(64 * kKiB, std::byte{0x99});
  ASSERT_OK(change->write("a", 128 * kKiB, slice_of(bytes)).wait());
  ASSERT_OK(change->commit(Durability::durable).wait());
  change.reset();
  store_.reset();
  const auto head = header();
  const Bytes data = bytes_at(head.data_at, head.data_bytes);
  const auto found = std::search(data.begin(), data.end(), bytes.begin(), bytes.end());
  ASSERT_NE(found, data.end());
  flip(head.data_at + static_cast<uint64_t>(found - data.begin()) + 777);
  open();
  Bytes into(200'000);
  const auto read = store_->read("a", 0, slice_of(into), {}).wait();
  EXPECT_EQ(code_of(read), Code::corruption);
  EXPECT_NE(read.error().what.find("chunk 2 of 'a'"), std::string::npos) << read.error().what;
  EXPECT_NE(read.error().what.find("snapshot 'good' has an earlier form of it"), std::string::npos) << read.error().what;
  EXPECT_OK(store_->read("a", 0, {into.data(), 128 * kKiB}, {}).wait());
  EXPECT_EQ(read_all(*store_, "a", "good"), pattern(200'000, 1));
  // A part of a chunk is merged with verified bytes only.
  change = std::move(*store_->begin());
  EXPECT_EQ(code_of(change->write("a", 128 * kKiB + 5, {into.data(), 10}).wait()), Code::corruption);
  EXPECT_EQ(code_of(change->commit(Durability::durable).wait()), Code::corruption);
  change.reset();
  store_.reset();
  const auto report = fsck();
  ASSERT_EQ(report.problems.size(), 1U);
  EXPECT_NE(report.problems[0].find("chunk 2 of 'a'"), std::string::npos);
  ASSERT_EQ(report.advice.size(), 1U);
  EXPECT_NE(report.advice[0].find("snapshot 'good' is whole"), std::string::npos) << report.advice[0];
  EXPECT_TRUE(fsck({.quick = true, .repair_map = false, .progress = {}}).problems.empty());
}

TEST_F(LocalStoreTest, AFlippedBitInAnyFrameOfTheJournalIsMendedFromTheOtherCopy) {
  open();
  for (uint64_t i = 0; i < 5; ++i) put("k" + std::to_string(i), pattern(1000, i));
  store_.reset();
  const size_t frames = newest_frames(0).size();
  ASSERT_EQ(frames, 3U + 5U);  // image, its end, seal, records
  for (size_t frame = 0; frame < frames; ++frame) {
    for (size_t copy = 0; copy < 2; ++copy) {
      for (const uint64_t within : {0, 30, 70, 2000}) {  // magic, generation, payload, padding
        const auto offsets = newest_frames(copy);
        const uint64_t at = header().journal_at[copy] + offsets[frame] + within;
        flip(at);
        SCOPED_TRACE("frame " + std::to_string(frame) + " of copy " + std::to_string(copy) + " at " + std::to_string(within));
        const auto report = fsck();
        EXPECT_EQ(report.problems.empty(), frame + 1 == frames) << "the last one could as well be cut short: a note";
        EXPECT_EQ(report.notes.empty(), frame + 1 != frames);
        EXPECT_EQ(report.committed, 5U);
        StoreOptions reader;
        reader.read_only = true;
        auto store = try_open(reader);
        ASSERT_OK(store);
        for (uint64_t i = 0; i < 5; ++i) EXPECT_EQ(read_all(**store, "k" + std::to_string(i)), pattern(1000, i));
        store->reset();
        flip(at);
      }
    }
  }
  flip(header().journal_at[1] + newest_frames(1)[4] + 70);
  const auto repaired = fsck({.quick = false, .repair_map = true, .progress = {}});
  EXPECT_TRUE(repaired.repaired);
  EXPECT_TRUE(repaired.problems.empty());
  EXPECT_TRUE(fsck().problems.empty());
  open();
  for (uint64_t i = 0; i < 5; ++i) EXPECT_EQ(read_all(*store_, "k" + std::to_string(i)), pattern(1000, i));
}

TEST_F(LocalStoreTest, ARecordDamagedInBothCopiesIsCorruptionAndNeverTheEnd) {
  open();
  for (uint64_t i = 0; i < 5; ++i) put("k" + std::to_string(i), pattern(1000, i));
  store_.reset();
  for (size_t frame : {size_t{0}, size_t{1}, size_t{4}}) {  // of the image, its end, a record in the middle
    const uint64_t at[] = {header().journal_at[0] + newest_frames(0)[frame], header().journal_at[1] + newest_frames(1)[frame]};
    for (const uint64_t each : at) flip(each + 70);
    const auto store = try_open();
    EXPECT_EQ(code_of(store), Code::corruption) << frame;
    for (const uint64_t each : at) flip(each + 70);
  }
  // Different frames in the two copies: together they are whole.
  flip(header().journal_at[0] + newest_frames(0)[3] + 70);
  flip(header().journal_at[1] + newest_frames(1)[5] + 70);
  open();
  for (uint64_t i = 0; i < 5; ++i) EXPECT_EQ(read_all(*store_, "k" + std::to_string(i)), pattern(1000, i));
}

TEST_F(LocalStoreTest, ADamagedHeaderIsTakenFromItsOtherCopyAndMended) {
  open();
  put("a", pattern(1000, 1));
  store_.reset();
  for (const uint64_t copy : local::kHeaderAt) {
    flip(copy + 20);
    EXPECT_EQ(fsck().problems.size(), 1U);
    open();
    EXPECT_EQ(read_all(*store_, "a"), pattern(1000, 1));
    store_.reset();
    EXPECT_TRUE(fsck().problems.empty());
  }
  for (const uint64_t copy : local::kHeaderAt) flip(copy + 20);
  EXPECT_EQ(code_of(try_open()), Code::mismatch);  // and it is not made anew
}

TEST_F(LocalStoreTest, ATruncatedVolumeIsSaidToBe) {
  open();
  put("a", pattern(1000, 1));
  store_.reset();
  std::filesystem::resize_file(file(), std::filesystem::file_size(file()) - 4096);
  const auto store = try_open();
  EXPECT_EQ(code_of(store), Code::corruption);
  EXPECT_NE(store.error().what.find("cut short"), std::string::npos);
}

TEST_F(LocalStoreTest, VolumesOfOtherStoresAndMissingOnesAreRefusedInAnyOrderTheyOpen) {
  volumes_ = {root_ + "/a", root_ + "/b"};
  open();
  put("x", pattern(500'000, 1));
  store_.reset();
  std::swap(volumes_[0], volumes_[1]);
  open();
  EXPECT_EQ(read_all(*store_, "x"), pattern(500'000, 1));
  store_.reset();
  volumes_ = {root_ + "/a"};
  EXPECT_EQ(code_of(try_open()), Code::mismatch);
  volumes_ = {root_ + "/a", root_ + "/new"};
  EXPECT_EQ(code_of(try_open()), Code::mismatch);
  EXPECT_FALSE(std::filesystem::exists(root_ + "/new/stoker.volume")) << "what was made in vain is taken away";
  volumes_ = {root_ + "/c", root_ + "/d"};
  open();
  store_.reset();
  volumes_ = {root_ + "/a", root_ + "/d"};
  EXPECT_EQ(code_of(try_open()), Code::mismatch);
}

TEST_F(LocalStoreTest, TwoVolumesShareTheDataAndTheJournalCopies) {
  volumes_ = {root_ + "/a", root_ + "/b"};
  open();
  put("x", pattern(1'000'000, 1));
  store_.reset();
  EXPECT_NE(header(0).journal_at[0], 0U);
  EXPECT_EQ(header(0).journal_at[1], 0U);
  EXPECT_NE(header(1).journal_at[1], 0U);
  for (size_t volume = 0; volume < 2; ++volume) {
    const Bytes data = bytes_at(header(volume).data_at, header(volume).data_bytes, volume);
    EXPECT_NE(data, Bytes(data.size())) << "volume " << volume << " holds nothing";
  }
}

TEST_F(LocalStoreTest, FsckTellsTheCommittedStep) {
  open();
  const std::string state = R"({"step": 41, "more": [1, 2]})";
  Bytes bytes(state.size());
  std::memcpy(bytes.data(), state.data(), state.size());
  put("meta/state", bytes);
  auto unfinished = std::move(*store_->begin());
  Bytes other = pattern(1000, 1);
  ASSERT_OK(unfinished->resize("half", 1000));
  ASSERT_OK(unfinished->write("half", 0, slice_of(other)).wait());
  unfinished.reset();
  store_.reset();
  const auto report = fsck();
  EXPECT_TRUE(report.problems.empty());
  EXPECT_EQ(report.committed_step, 41U);
}

// The specification's example, read out of the page.
std::vector<std::byte> hex_block(const std::string& page, const std::string& name, size_t bytes) {
  std::vector<std::byte> out(bytes);
  const size_t from = page.find("```hex " + name + "\n");
  EXPECT_NE(from, std::string::npos) << name;
  std::istringstream lines(page.substr(from, page.find("\n```", from) - from));
  std::string line;
  std::getline(lines, line);
  while (std::getline(lines, line)) {
    std::istringstream fields(line);
    size_t at = 0;
    unsigned byte = 0;
    fields >> std::hex >> at;
    while (fields >> byte) out.at(at++) = static_cast<std::byte>(byte);
  }
  return out;
}

TEST(LocalStoreFormat, TheExampleInTheSpecificationIsWhatWeReadAndWrite) {
  std::ifstream file(STOKER_SOURCE_DIR "/docs/formats/local_store.md");
  const std::string page((std::istreambuf_iterator<char>(file)), {});
  const auto sector = hex_block(page, "header", local::kHeaderBytes);
  const auto header = local::decode_header(sector);
  ASSERT_OK(header);
  ASSERT_TRUE(header->has_value());
  EXPECT_EQ((*header)->state, local::VolumeState::ready);
  EXPECT_EQ((*header)->data_bytes, 1 * kMiB);
  EXPECT_EQ((*header)->area_bytes, 73'728U);
  EXPECT_EQ((*header)->journal_at[0], local::kHeaderRegion);
  EXPECT_EQ(local::encode_header(**header), std::string(reinterpret_cast<const char*>(sector.data()), sector.size()));

  std::vector<std::byte> area;
  for (const char* frame : {"frame 0", "frame 1", "frame 2", "frame 3"}) {
    const auto block = hex_block(page, frame, 4096);
    area.insert(area.end(), block.begin(), block.end());
  }
  local::MapLimits limits{{{(*header)->data_at / 4096, ((*header)->data_at + (*header)->data_bytes) / 4096}}, 100};
  local::Map map(limits);
  local::FrameReader reader(map);
  MemoryLogSource source(area);
  LogScan scan(source, {(*header)->store, (uint64_t{1} << 32) | 0x5EED});
  for (auto item = *scan.next(); item; item = *scan.next()) ASSERT_OK(reader.apply(std::get<LogRecord>(*item).payload));
  EXPECT_EQ(scan.cursor().sequence, 4U);
  EXPECT_TRUE(reader.image_complete());
  EXPECT_TRUE(reader.sealed());
  EXPECT_EQ(map.version(), 1U);
  const auto& object = *map.current().at("w");
  EXPECT_EQ(object.bytes, 70'000U);
  ASSERT_EQ(object.chunks.size(), 2U);
  const Bytes content(65'536, std::byte{0x42});
  EXPECT_EQ(object.chunks[0].crc, crc32c(content.data(), content.size()));
  EXPECT_EQ(object.chunks[1].stored, 4464U);
  EXPECT_EQ(object.chunks[1].crc, crc32c(content.data(), 4464));
  EXPECT_EQ(local::block_of(object.chunks[1].place), (*header)->data_at / 4096 + 16);
}

uint64_t status_kib(const char* field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field, 0) == 0) return std::stoull(line.substr(line.find(':') + 1));
  }
  return 0;
}

// A map of 1 Mi chunks of 1 MiB, written through the journal; the data is never there. Memory is counted; the time is told.
TEST_F(LocalStoreTest, AStoreOfOneTebibyteOpensInLittleMemory) {
  constexpr uint64_t capacity = uint64_t{1} << 40;
  volumes_ = {root_ + "/sparse"};
  std::filesystem::create_directories(root_);
  { std::ofstream make(volumes_[0]); }
  if (truncate(volumes_[0].c_str(), static_cast<off_t>(capacity + (uint64_t{4} << 30))) != 0) GTEST_SKIP() << "the file system allows no such file";
  options_.capacity_bytes = capacity;
  options_.chunk_bytes = kMiB;
  options_.objects_max = 1 << 16;
  open();
  store_.reset();
  {
    auto volumes = local::VolumeSet::open(volumes_, runtime_->loop(), {}, {});
    ASSERT_OK(volumes);
    local::Journal journal(runtime_->loop(), *volumes);
    ASSERT_OK(journal.recover(volumes->limits()));
    local::Map map(volumes->limits());
    std::vector<local::Extent> freed;
    uint64_t block = volumes->limits().volumes[0].begin;
    for (int object = 0; object < 1024; ++object) {
      ByteWriter items;
      local::put_version(items, static_cast<Version>(object) + 1);
      local::put_object(items, "plane/" + std::to_string(object), kGiB, kMiB, static_cast<Version>(object) + 1);
      std::vector<local::Chunk> chunks(1024);
      for (auto& chunk : chunks) {
        chunk = {local::make_place(0, block), static_cast<Version>(object) + 1, 0, kMiB, kMiB, 0};
        block += kMiB / 4096;
      }
      local::put_chunks(items, 0, chunks);
      const std::string bytes = items.take();
      ASSERT_OK(map.apply(std::as_bytes(std::span(bytes)), freed));
    }
    ASSERT_OK(journal.begin(map));
  }
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts from here
  const uint64_t before_kib = status_kib("VmRSS");
  const uint64_t start_ns = Clock::real().now_ns();
  options_.create = false;
  open();
  const double seconds = static_cast<double>(Clock::real().now_ns() - start_ns) / 1e9;
  const uint64_t peak_kib = status_kib("VmHWM") - before_kib;
  EXPECT_EQ(store_->info().committed, 1024U);
  EXPECT_EQ(store_->info().used_bytes, capacity);
  std::printf("1 TiB, 1 Mi chunks: opened in %.2f s, peak memory %.1f MiB, map %.1f MiB\n", seconds, static_cast<double>(peak_kib) / 1024, static_cast<double>(store_->info().map_bytes) / kMiB);
  EXPECT_LE(store_->info().map_bytes, 33 * kMiB);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LE(peak_kib, 64 * 1024U);
#endif
}

}  // namespace
}  // namespace stoker
