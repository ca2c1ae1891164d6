// What commits cost, where their bytes go, when space comes back, and what does not fit.
#include <algorithm>
#include <cstring>
#include <set>
#include <thread>

#include "stoker/store/blocking_io.h"
#include "stoker/testing/local_lab.h"

namespace stoker {
namespace {

TEST_F(LocalStoreTest, CommitCostsOneFlushAVolumeAndOneRecordInTwoPlaces) {
  for (const size_t count : {size_t{1}, size_t{2}}) {
    store_.reset();
    volumes_.clear();
    for (size_t i = 0; i < count; ++i)
      volumes_.push_back(root_ + "/" + std::to_string(count) + std::to_string(i));
    open();
    put("warm", pattern(10, 1));
    const auto idle = store_->info().volumes;
    auto change = std::move(*store_->begin());
    Bytes bytes = pattern(4 * 64 * kKiB, 1);
    ASSERT_OK(change->resize("w", bytes.size()));
    std::vector<Future<void>> writes;
    for (size_t i = 0; i < 4; ++i)
      writes.push_back(
          change->write("w", i * 64 * kKiB, slice_of(bytes).sub(i * 64 * kKiB, 64 * kKiB)));
    for (auto& write : writes) ASSERT_OK(write.wait());
    const IoCounters& io = runtime_->loop().counters();
    const uint64_t writes_before = io.writes.get(), syncs_before = io.syncs.get(),
                   bytes_before = io.written_bytes.get();
    ASSERT_OK(change->commit(Durability::durable).wait());
    EXPECT_EQ(io.writes.get() - writes_before, 2U) << "the record, in two places";
    EXPECT_EQ(io.written_bytes.get() - bytes_before, 2 * 4096U);
    const auto moved = store_->info().volumes;
    size_t touched = 0;  // one alone, where it is so much quicker
    for (size_t i = 0; i < count; ++i)
      touched += moved[i].written_bytes > idle[i].written_bytes ? 1 : 0;
    EXPECT_GE(touched, 1U);
    EXPECT_EQ(io.syncs.get() - syncs_before, touched + count)
        << "of the data on each volume that it went to, of the journal on each that has a copy";
  }
}

TEST_F(LocalStoreTest, ANameAndADeferredDropCostNoWriteAndNoFlushOfTheirOwn) {
  open();
  const IoCounters& io = runtime_->loop().counters();
  const auto commit = [&](const std::string& name) {
    auto change = std::move(*store_->begin());
    Bytes bytes = pattern(64 * kKiB, 1);
    EXPECT_OK(change->resize("w", bytes.size()));
    EXPECT_OK(change->write("w", 0, slice_of(bytes)).wait());
    if (!name.empty()) {
      EXPECT_OK(change->name(name));
    }
    const uint64_t writes = io.writes.get(), syncs = io.syncs.get();
    EXPECT_OK(change->commit(Durability::durable).wait());
    return std::pair(io.writes.get() - writes, io.syncs.get() - syncs);
  };
  commit("");
  const auto plain = commit("");
  EXPECT_EQ(commit("one"), plain);
  const uint64_t writes = io.writes.get(), syncs = io.syncs.get();
  ASSERT_OK(store_->drop("one", Durability::deferred).wait());
  EXPECT_EQ(io.writes.get(), writes);
  EXPECT_EQ(io.syncs.get(), syncs);
  EXPECT_EQ(commit("two"), plain);
  open();
  ASSERT_EQ(store_->info().snapshots.size(), 1U) << "the commit behind it carried the drop";
  EXPECT_EQ(store_->info().snapshots[0].name, "two");
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

TEST_F(LocalStoreTest, ADeferredCommitIsDoneWhenItReturnsWhereNothingElseIsUnderWay) {
  open();
  Bytes bytes = pattern(70'000, 1);
  for (Version version = 1; version <= 3; ++version) {
    auto change = std::move(*store_->begin());
    ASSERT_OK(change->resize("a", bytes.size()));
    ASSERT_OK(change->write("a", 0, slice_of(bytes)).wait());
    const auto done = change->commit(Durability::deferred);
    ASSERT_TRUE(done.ready());
    EXPECT_EQ(*done.wait(), version);
  }
  EXPECT_EQ(store_->info().durable, 0U);
}

TEST_F(LocalStoreTest, CommitsOfManyThreadsAndBothKindsKeepTheirOrder) {
  constexpr int threads = 4, rounds = 40;
  options_.capacity_bytes = 16 * kMiB;
  open();
  std::vector<std::vector<Version>> versions(threads);
  std::vector<std::thread> writers;
  for (int thread = 0; thread < threads; ++thread) {
    writers.emplace_back([&, thread] {
      for (int round = 0; round < rounds; ++round) {
        auto change = std::move(*store_->begin());
        Bytes bytes = pattern(5000, static_cast<uint64_t>(thread * rounds + round));
        const std::string key = "k" + std::to_string(thread);
        ASSERT_OK(change->resize(key, bytes.size()));
        const auto written = change->write(key, 0, slice_of(bytes));
        const auto done =
            change->commit((thread + round) % 3 == 0 ? Durability::durable : Durability::deferred);
        ASSERT_OK(written.wait());  // most commits wait for it, some find it done
        ASSERT_OK(done.wait());
        versions[static_cast<size_t>(thread)].push_back(*done.wait());
      }
    });
  }
  for (auto& writer : writers) writer.join();
  std::set<Version> all;
  for (const auto& mine : versions) {
    EXPECT_TRUE(std::is_sorted(mine.begin(), mine.end()));
    all.insert(mine.begin(), mine.end());
  }
  EXPECT_EQ(all.size(), size_t{threads * rounds});
  EXPECT_EQ(*all.rbegin(), Version{threads * rounds});
  ASSERT_OK((*store_->begin())->commit(Durability::durable).wait());
  open();
  for (int thread = 0; thread < threads; ++thread) {
    EXPECT_EQ(read_all(*store_, "k" + std::to_string(thread)),
              pattern(5000, static_cast<uint64_t>(thread * rounds + rounds - 1)));
  }
}

TEST_F(LocalStoreTest, WhatIsWrittenAnewGoesWhereSomethingWasBefore) {
  options_.capacity_bytes = 16 * kMiB;
  open();
  for (uint64_t round = 0; round < 30; ++round) put("a", pattern(512 * kKiB, round + 1));
  store_.reset();
  const auto head = header();
  const Bytes data = bytes_at(head.data_at, head.data_bytes);
  size_t touched = 0;
  for (size_t at = 0; at < data.size(); at += 4096)
    touched += std::any_of(data.begin() + static_cast<ptrdiff_t>(at),
                           data.begin() + static_cast<ptrdiff_t>(at + 4096),
                           [](std::byte byte) { return byte != std::byte{0}; });
  EXPECT_EQ(touched * 4096, 2 * 512 * kKiB) << "one place to be read from and one to write to";
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
  // nothing to flush but records; fewer where they met
  EXPECT_LE(runtime_->loop().counters().syncs.get() - syncs_before, 8U);
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
    for (const char* key : {"w", "m", "v"})
      ASSERT_OK(change->write(key, i * chunk.size(), chunk.slice()).wait());
  }
  ASSERT_OK(change->commit(Durability::durable).wait());
  const AlignedBytes all(16 * chunk.size());
  for (const char* key : {"w", "m", "v"}) {
    const uint64_t reads_before = runtime_->loop().counters().reads.get();
    ASSERT_OK(store_->read(key, 0, all.slice(), {}).wait());
    EXPECT_EQ(runtime_->loop().counters().reads.get() - reads_before, 1U) << key;
  }
}

TEST_F(LocalStoreTest, SpaceComesBackOnlyWhenTheCommitIsDurableAndAWriteThatNeedsItMakesItSo) {
  options_.capacity_bytes = 256 * kKiB;
  open();
  put("a", pattern(192 * kKiB, 1));
  {
    auto change = std::move(*store_->begin());
    ASSERT_OK(change->remove("a"));
    ASSERT_OK(change->commit(Durability::deferred).wait());
  }
  put("little", pattern(10, 3), Durability::deferred);
  EXPECT_EQ(store_->info().durable, 1U) << "there is room yet";
  {
    auto change = std::move(*store_->begin());
    Bytes bytes = pattern(192 * kKiB, 2);
    ASSERT_OK(change->resize("b", bytes.size()));
    // a part of a chunk, and whole ones
    ASSERT_OK(change->write("b", 5, slice_of(bytes).sub(5, bytes.size() - 5)).wait());
    EXPECT_EQ(store_->info().durable, 3U);
    ASSERT_OK(change->commit(Durability::durable).wait());
    EXPECT_EQ(store_->info().durable, 4U) << "what made room was not a commit of its own";
  }
  auto change = std::move(*store_->begin());
  Bytes bytes = pattern(128 * kKiB, 2);
  ASSERT_OK(change->resize("c", bytes.size()));
  EXPECT_EQ(code_of(change->write("c", 0, slice_of(bytes)).wait()), Code::out_of_space)
      << "nothing more comes free";
  change.reset();
  Bytes expected = pattern(192 * kKiB, 2);
  std::fill(expected.begin(), expected.begin() + 5, std::byte{0});
  EXPECT_EQ(read_all(*store_, "b"), expected);
  open();
  EXPECT_EQ(read_all(*store_, "b"), expected);
  EXPECT_EQ(read_all(*store_, "little"), pattern(10, 3));
}

TEST_F(LocalStoreTest, DeferredCommitsNeverWedgeTheStore) {
  options_.objects_max = 0;
  options_.capacity_bytes = 256 * kKiB;
  open();
  const uint64_t area = header().area_bytes;
  // each some 70 bytes: more than both areas hold
  const int commits = static_cast<int>(2 * area / 60);
  for (int i = 0; i < commits; ++i) {
    auto change = std::move(*store_->begin());
    ASSERT_OK(change->resize("object/" + std::to_string(i % 5), static_cast<uint64_t>(i) + 1));
    ASSERT_OK(change->commit(Durability::deferred).wait()) << i;
  }
  EXPECT_EQ(store_->info().durable, 0U);
  ASSERT_OK((*store_->begin())->commit(Durability::durable).wait());
  EXPECT_EQ(store_->info().durable, static_cast<Version>(commits) + 1);
  put("behind", pattern(10, 1), Durability::deferred);
  ASSERT_OK((*store_->begin())->commit(Durability::durable).wait());
  open();
  for (int i = commits - 5; i < commits; ++i) {
    const std::string key = "object/" + std::to_string(i % 5);
    EXPECT_EQ(store_->stat(key)->bytes, static_cast<uint64_t>(i) + 1);
  }
  EXPECT_EQ(read_all(*store_, "behind"), pattern(10, 1));
  store_.reset();
  EXPECT_TRUE(fsck().problems.empty());
}

TEST_F(LocalStoreTest, ACommitThatIsTooMuchForARecordGoesIntoAnImage) {
  options_.objects_max = 0;
  options_.capacity_bytes = 256 * kKiB;
  open();
  // An image of four fifths of what may be; what replaces all of it is more than a record may be.
  const int objects = static_cast<int>((header().area_bytes / 2 - 4 * 4096) * 4 / 5 / (25 + 9));
  const auto name = [](int i, char kind) { return kind + std::to_string(100'000'00 + i); };
  for (const char kind : {'a', 'b', 'c'}) {
    for (const Durability durability : {Durability::deferred, Durability::durable}) {
      auto change = std::move(*store_->begin());
      for (int i = 0; i < objects; ++i) {
        const bool later = durability == Durability::durable;
        if (later || kind != 'a') {
          ASSERT_OK(change->remove(name(i, static_cast<char>(later ? kind : kind - 1))));
        }
        ASSERT_OK(change->resize(name(i, kind), static_cast<uint64_t>(i) + 1));
      }
      ASSERT_OK(change->commit(durability).wait()) << kind;
    }
    const Version version = store_->info().committed;
    open();
    EXPECT_EQ(store_->info().committed, version);
    EXPECT_EQ(store_->list("")->size(), static_cast<size_t>(objects));
    EXPECT_EQ(store_->stat(name(objects - 1, kind))->bytes, static_cast<uint64_t>(objects));
  }
  store_.reset();
  EXPECT_TRUE(fsck().problems.empty());
}

TEST_F(LocalStoreTest, TheJournalTurnsAreasForeverAndSurvivesEveryReopening) {
  open();
  const uint64_t area = header().area_bytes;
  const int commits = static_cast<int>(2 * area / 4096) + 50;  // more than both areas hold
  for (int i = 0; i < commits; ++i) {
    put("k" + std::to_string(i % 7), pattern(100, static_cast<uint64_t>(i)),
        i % 5 == 4 ? Durability::deferred : Durability::durable);
    if (i % 97 == 0) {
      put("last", pattern(1, 1));
      open();
    }
  }
  put("last", pattern(1, 1));
  open();
  for (int i = commits - 7; i < commits; ++i)
    EXPECT_EQ(read_all(*store_, "k" + std::to_string(i % 7)),
              pattern(100, static_cast<uint64_t>(i)));
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

}  // namespace
}  // namespace stoker
