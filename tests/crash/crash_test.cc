// Live faults: the power goes while the store works, flushes and writes fail, bits flip, readers
// race with reuse.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <thread>

#include "lab.h"
#include "stoker/store/local/format.h"

namespace stoker {
namespace {

// Commits random changes of a few objects until something fails or `steps` are done.
Status random_work(Recorder& run, std::mt19937_64& random, int steps) {
  static const std::vector<std::pair<std::string, size_t>> sizes = {
      {"a", 150'000}, {"b", 65'536}, {"c", 5'000}};
  for (int i = 0; i < steps; ++i) {
    if (random() % 12 == 0) {
      const bool named = run.now().snapshots.count("s") != 0;
      STOKER_TRY(named ? run.drop("s") : run.snapshot("s"));
      continue;
    }
    const auto& [key, bytes] = sizes[random() % sizes.size()];
    Recorder::Change change{key, bytes, 0, bytes, random()};
    if (run.now().objects.count(key) != 0) {
      const uint64_t kind = random() % 8;
      if (kind == 0) change.bytes = change.written = 0;
      if (kind > 4) {
        change.offset = random() % bytes;
        change.written = random() % (bytes - change.offset) + 1;
      }
    }
    const Status status =
        run.commit({change}, random() % 3 == 0 ? Durability::deferred : Durability::durable);
    // A snapshot or many deferred commits may hold all space: then a durable one and a drop make
    // room.
    if (!status && status.error().code == Code::out_of_space) {
      STOKER_TRY(run.commit({}, Durability::durable));
      if (run.now().snapshots.count("s") != 0) STOKER_TRY(run.drop("s"));
      continue;
    }
    STOKER_TRY(status);
  }
  return {};
}

// Opens the store after a crash, finds its point and makes that the newest of the timeline.
::testing::AssertionResult recovered(Lab& lab, Timeline& timeline, Admissible range) {
  const auto point = lab.recover(timeline, range);
  if (!point) return ::testing::AssertionFailure() << point.error().message();
  timeline = {timeline[*point]};
  return ::testing::AssertionSuccess();
}

// Room for ten chunks, on one volume or on two.
LabOptions small_volumes(uint64_t seed) {
  LabOptions options;
  options.volumes = 1 + seed % 2;
  options.capacity_bytes = 10 * 64 * kKiB;
  return options;
}

// Power goes at a random transfer; on two volumes, at different moments. Then again, also while
// recovering; five times in a row.
TEST(PowerCut, AtAnyMomentOnAnyVolumeAgainAndAgain) {
  uint64_t cuts = 0;
  uint64_t before_open = 0;
  const auto begun = std::chrono::steady_clock::now();
  for (uint64_t seed = 1; seed <= 150 * soak_factor; ++seed) {
    // In CI a slow machine does fewer.
    if (soak_factor == 1 && seed > 50 &&
        std::chrono::steady_clock::now() - begun > std::chrono::seconds(8))
      break;
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    Lab lab(small_volumes(seed), seed);
    Timeline timeline = {std::make_shared<const Point>()};
    lab.blank();
    Admissible range{0, 0};
    for (int round = 0; round < 5; ++round) {
      for (const auto& volume : lab.volumes()) {
        lab.disk().cut_power_after(random() % (random() % 4 == 0 ? 15 : 150), random(), volume);
        // the other volume keeps its power a little longer: until the store stops
        if (random() % 3 == 0) break;
      }
      auto store = lab.open();
      if (store) {
        const auto point = find_point(**store, timeline, range);
        if (!point) {
          // Only a disk without power excuses that: the state is judged when it is back.
          ASSERT_TRUE(point.error().what.find("i/o error") != std::string::npos)
              << point.error().message();
          ++before_open;
        } else {
          timeline = {timeline[*point]};
          Recorder recorder(lab.disk(), **store, timeline);
          recorder.opened();
          const Status status = random_work(recorder, random, 60);
          if (!status) ++cuts;
          range = {recorder.acknowledged_index(), timeline.size() - 1};
        }
        store->reset();
      } else {
        ++before_open;
      }
      lab.disk().cut_power(random());
      lab.disk().restore_power();
    }
    ASSERT_TRUE(recovered(lab, timeline, range));
    ASSERT_OK(lab.works(timeline, 0));
  }
  std::printf("power cuts: %llu while working, %llu while recovering\n",
              static_cast<unsigned long long>(cuts), static_cast<unsigned long long>(before_open));
  EXPECT_GT(cuts, 60U);
  EXPECT_GT(before_open, 10U);
}

// A failed flush: the commit fails, everything after it too, nothing is flushed again, and
// reopening gives a state that was.
TEST(FailingFlush, MakesTheStoreReadOnlyUntilItIsOpenedAgain) {
  for (uint64_t nth = 1; nth <= 12; ++nth) {
    for (const size_t volumes : {size_t{1}, size_t{2}}) {
      SCOPED_TRACE("flush " + std::to_string(nth) + " on " + std::to_string(volumes) + " volumes");
      LabOptions options;
      options.volumes = volumes;
      Lab lab(options, nth);
      Timeline timeline = {std::make_shared<const Point>()};
      auto store = lab.open();
      ASSERT_OK(store);
      Recorder recorder(lab.disk(), **store, timeline);
      ASSERT_OK(recorder.commit({{"a", 150'000, 0, 150'000, 1}, {"b", 65'536, 0, 65'536, 2}},
                                Durability::durable));
      ASSERT_OK(recorder.commit({{"b", 65'536, 0, 65'536, 3}}, Durability::deferred));
      lab.disk().fail_nth(Op::Kind::sync, nth, EIO);
      Status failed;
      for (uint64_t i = 0; i < 12 && failed; ++i)
        failed = recorder.commit({{"a", 150'000, i * 1000, 30'000, 10 + i}}, Durability::durable);
      ASSERT_FALSE(failed);
      EXPECT_EQ(failed.error().code, Code::io);
      EXPECT_FALSE((*store)->info().read_only.empty());
      {
        auto change = (*store)->begin();
        Bytes bytes(10);
        EXPECT_EQ(change ? code_of((*change)->write("a", 0, slice_of(bytes)).wait())
                         : change.error().code,
                  Code::read_only);
      }
      EXPECT_EQ(code_of((*store)->snapshot("s").wait()), Code::read_only);
      Bytes into(65'536);
      EXPECT_OK((*store)->read("b", 0, slice_of(into)).wait());
      store->reset();
      if (nth % 2 == 0) {
        lab.disk().cut_power(nth);
        lab.disk().restore_power();
      }
      ASSERT_TRUE(recovered(lab, timeline, {recorder.acknowledged_index(), timeline.size() - 1}));
      ASSERT_OK(lab.works(timeline, 0));
    }
  }
}

// Any one failing write: of data it fails its commit alone, of the journal it makes the store
// read-only; never a wrong state.
TEST(FailingWrite, LosesNothingThatWasAcknowledged) {
  uint64_t data = 0;
  uint64_t journal = 0;
  for (uint64_t nth = 1; nth <= 60; ++nth) {
    for (const int sys_errno : {EIO, ENOSPC}) {
      SCOPED_TRACE("write " + std::to_string(nth));
      Lab lab({}, nth);
      Timeline timeline = {std::make_shared<const Point>()};
      auto store = lab.open();
      ASSERT_OK(store);
      Recorder recorder(lab.disk(), **store, timeline);
      ASSERT_OK(recorder.commit({{"a", 150'000, 0, 150'000, 1}, {"b", 65'536, 0, 65'536, 2}},
                                Durability::durable));
      lab.disk().fail_nth(Op::Kind::write, nth, sys_errno);
      Status failed;
      for (uint64_t i = 0; i < 30 && failed; ++i)
        failed = recorder.commit({{"a", 150'000, i * 1000, 70'000, 10 + i}}, Durability::durable);
      ASSERT_FALSE(failed);
      if ((*store)->info().read_only.empty()) {
        ++data;
        ASSERT_EQ(recorder.acknowledged_index(), timeline.size() - 1);
        ASSERT_OK(find_point(**store, timeline, {timeline.size() - 1, timeline.size() - 1}))
            << "the failed transaction left something";
        ASSERT_OK(recorder.commit({{"b", 65'536, 0, 65'536, 77}}, Durability::durable));
      } else {
        ++journal;
      }
      store->reset();
      lab.disk().cut_power(nth);
      lab.disk().restore_power();
      ASSERT_TRUE(recovered(lab, timeline, {recorder.acknowledged_index(), timeline.size() - 1}));
      ASSERT_OK(lab.works(timeline, 0));
    }
  }
  EXPECT_GT(data, 10U);
  EXPECT_GT(journal, 10U);
}

// Where the journal of volume `path` lies, by its header.
local::VolumeHeader header_of(Lab& lab, const std::string& path) {
  Bytes sector(local::kHeaderBytes);
  lab.disk().image(path).read(0, sector);
  const auto header = local::decode_header(sector);
  EXPECT_OK(header);
  EXPECT_TRUE(header->has_value());
  return **header;
}

class FlippedBit : public ::testing::Test {
 protected:
  // A store with a history, closed.
  explicit FlippedBit(size_t volumes = 1) : lab_({.volumes = volumes}, 3) {
    auto store = lab_.open();
    EXPECT_OK(store);
    Recorder recorder(lab_.disk(), **store, timeline_);
    EXPECT_OK(recorder.commit({{"a", 150'000, 0, 150'000, 1}, {"b", 65'536, 0, 65'536, 2}},
                              Durability::durable));
    for (uint64_t i = 0; i < 8; ++i)
      EXPECT_OK(recorder.commit({{"c", 5'000, 0, 5'000, i}}, Durability::durable));
    store->reset();
    images_ = lab_.images();
    timeline_ = {timeline_.back()};
  }
  Lab lab_;
  Timeline timeline_ = {std::make_shared<const Point>()};
  Images images_;
};

TEST_F(FlippedBit, InAnyBlockOfTheJournalIsMendedFromTheOtherCopy) {
  std::mt19937_64 random(9);
  const local::VolumeHeader header = header_of(lab_, "v0");
  for (const uint64_t copy : header.journal_at) {
    for (uint64_t at = copy; at < copy + 2 * header.area_bytes; at += local::kBlock) {
      for (int i = 0; i < 6; ++i) {
        lab_.put(images_);
        // The frame's own bytes lie at the block's beginning: both those and the padding are
        // covered by its CRC.
        const uint64_t byte = i < 4 ? random() % 100 : random() % local::kBlock;
        lab_.disk().flip("v0", at + byte, static_cast<unsigned>(random() % 8));
        ASSERT_OK(lab_.recover(timeline_, {0, 0})) << "block " << at << " byte " << byte;
        ASSERT_OK(lab_.recover(timeline_, {0, 0})) << "and once more, after the mending";
      }
    }
  }
}

TEST_F(FlippedBit, InBothCopiesOfARecordIsCorruptionAndNeverTheEndOfTheLog) {
  std::mt19937_64 random(9);
  const local::VolumeHeader header = header_of(lab_, "v0");
  uint64_t corrupt = 0;
  uint64_t unharmed = 0;
  for (uint64_t at = 0; at < 2 * header.area_bytes; at += local::kBlock) {
    lab_.put(images_);
    for (const uint64_t copy : header.journal_at)
      lab_.disk().flip("v0", copy + at + random() % 64, static_cast<unsigned>(random() % 8));
    ++cases_checked;
    auto store = lab_.open();
    if (!store) {
      EXPECT_EQ(store.error().code, Code::corruption) << store.error().message();
      ++corrupt;
      continue;
    }
    const auto point = find_point(**store, timeline_, {0, 0});
    if (point) {
      ++unharmed;
      continue;
    }
    // The one case in which nothing can tell: the newest record, damaged in both copies, looks like
    // one that was never finished.
    EXPECT_EQ((*store)->info().committed, timeline_[0]->version - 1) << point.error().message();
  }
  EXPECT_GT(corrupt, 5U);
  EXPECT_GT(unharmed, 5U);
}

TEST_F(FlippedBit, InAHeaderCopyIsMended) {
  std::mt19937_64 random(4);
  for (const uint64_t copy : local::kHeaderAt) {
    for (int i = 0; i < 40; ++i) {
      lab_.put(images_);
      lab_.disk().flip("v0", copy + random() % local::kHeaderBytes,
                       static_cast<unsigned>(random() % 8));
      ASSERT_OK(lab_.recover(timeline_, {0, 0}));
      ASSERT_OK(lab_.recover(timeline_, {0, 0}));
    }
  }
}

TEST_F(FlippedBit, InDataIsCorruptionThatNamesObjectAndChunk) {
  const local::VolumeHeader header = header_of(lab_, "v0");
  uint64_t found = 0;
  for (uint64_t at = header.data_at; at < header.data_at + header.data_bytes;
       at += 4 * local::kBlock) {
    lab_.put(images_);
    lab_.disk().flip("v0", at + 5, 1);
    auto store = lab_.open();
    ASSERT_OK(store);
    for (const auto& [key, object] : timeline_[0]->objects) {
      Bytes into(object.bytes.size());
      const auto read = (*store)->read(key, 0, slice_of(into)).wait();
      if (read) {
        EXPECT_EQ(into, object.bytes);
        continue;
      }
      ++found;
      EXPECT_EQ(read.error().code, Code::corruption);
      EXPECT_NE(read.error().what.find("'" + key + "'"), std::string::npos) << read.error().what;
      EXPECT_NE(read.error().what.find("chunk"), std::string::npos) << read.error().what;
    }
  }
  EXPECT_GT(found, 5U);
}

// Readers hold on to versions whose extents the writer wants at once: there are only three spare
// ones.
TEST(Race, ReadsNeverSeeAnExtentThatIsReused) {
  for (uint64_t seed = 1; seed <= 4 * soak_factor; ++seed) {
    Lab lab({}, seed);
    auto store = std::move(*lab.open());
    const auto put = [&](uint64_t round) -> Status {
      auto change = std::move(*store->begin());
      Bytes bytes(3 * 65'536, static_cast<std::byte>(round));
      STOKER_TRY(change->resize("a", bytes.size()));
      STOKER_TRY(change->write("a", 0, slice_of(bytes)).wait());
      STOKER_TRY(change->commit(Durability::durable).wait());
      return Status();
    };
    ASSERT_OK(put(1));
    std::atomic<bool> stop{false};
    std::vector<std::thread> readers;
    for (int reader = 0; reader < 3; ++reader) {
      readers.emplace_back([&] {
        while (!stop) {
          Bytes into(3 * 65'536);
          ASSERT_OK(store->read("a", 0, slice_of(into)).wait());
          for (const std::byte each : into) ASSERT_EQ(each, into[0]) << "two versions in one read";
        }
      });
    }
    uint64_t written = 0;
    for (uint64_t round = 2; written < 100; ++round) {
      ASSERT_LT(round, 100'000U) << "readers that come and go must not hold the space for ever";
      const Status status = put(round);
      written += status ? 1U : 0U;
      if (status) continue;
      ASSERT_EQ(status.error().code, Code::out_of_space) << status.error().message();
      // readers hold the space of the version before
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    stop = true;
    for (auto& reader : readers) reader.join();
    ASSERT_OK(put(7)) << "without readers there is room";
  }
}

// Random errors of the disk: whatever fails, what is read is right, and after reopening the state
// is one that was committed.
TEST(BadDisk, NeverReturnsWrongBytes) {
  for (uint64_t seed = 1; seed <= 80 * soak_factor / kLess; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    Lab lab(small_volumes(seed), seed);
    Timeline timeline = {std::make_shared<const Point>()};
    lab.blank();
    auto store = lab.open();
    ASSERT_OK(store);
    Recorder recorder(lab.disk(), **store, timeline);
    SimFaults faults;
    faults.short_transfer = 100'000;
    faults.interrupted = 50'000;
    faults.eio = seed % 4 == 0 ? 0 : 3'000;
    faults.torn = 3'000;
    lab.disk().set_faults(faults);
    for (int i = 0; i < 30; ++i) {
      if (!random_work(recorder, random, 5) && !(*store)->info().read_only.empty()) break;
    }
    store->reset();
    lab.disk().set_faults({});
    lab.disk().cut_power(seed);
    lab.disk().restore_power();
    ASSERT_TRUE(recovered(lab, timeline, {recorder.acknowledged_index(), timeline.size() - 1}));
  }
}

// A write that lands elsewhere may destroy bytes: then reading them must fail, not lie.
TEST(BadDisk, MisdirectedWritesAreNoticed) {
  uint64_t noticed = 0;
  for (uint64_t seed = 1; seed <= 60 * soak_factor; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Lab lab({}, seed);
    Timeline timeline = {std::make_shared<const Point>()};
    auto store = lab.open();
    ASSERT_OK(store);
    Recorder recorder(lab.disk(), **store, timeline);
    SimFaults faults;
    faults.misdirected = 30'000;
    lab.disk().set_faults(faults);
    std::mt19937_64 random(seed);
    static_cast<void>(random_work(recorder, random, 25));
    lab.disk().set_faults({});
    store->reset();
    ++cases_checked;
    store = lab.open();
    if (!store) {
      // Where both copies of the header were hit, nothing tells that there was a store: refused as
      // somebody's data, and left as it is.
      const bool headers =
          store.error().code == Code::mismatch &&
          store.error().what.find("both copies of its header are damaged") != std::string::npos;
      EXPECT_TRUE(headers || store.error().code == Code::corruption) << store.error().message();
      ++noticed;
      continue;
    }
    // Whatever version it is in: what can be read is what was written then.
    const Version version = (*store)->info().committed;
    const auto point = std::find_if(timeline.rbegin(), timeline.rend(),
                                    [&](const auto& each) { return each->version == version; });
    ASSERT_NE(point, timeline.rend());
    for (const auto& [key, object] : (*point)->objects) {
      Bytes into(object.bytes.size());
      const auto read = (*store)->read(key, 0, slice_of(into)).wait();
      if (read) {
        EXPECT_EQ(into, object.bytes) << key;
      } else {
        EXPECT_EQ(read.error().code, Code::corruption) << read.error().message();
        ++noticed;
      }
    }
  }
  EXPECT_GT(noticed, 3U);
}

}  // namespace
}  // namespace stoker
