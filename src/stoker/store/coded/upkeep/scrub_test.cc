// Scrub: one bit flipped in any kind of place is found in one pass and made right from the others;
// more than that never changes what was acknowledged.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "stoker/base/crc32c.h"
#include "stoker/store/coded/coded_store.h"
#include "stoker/store/coded/recovery/look.h"
#include "stoker/store/coded/recovery/recovery.h"
#include "stoker/store/local/fsck.h"
#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

enum class Kind : uint8_t { superblock, table, record, page, older_page, data, parity };
constexpr std::array<const char*, 7> kNames = {"superblock", "table", "record", "page",
                                               "older_page", "data",  "parity"};

struct Spot {
  Kind kind;
  std::string path;
  uint64_t offset;
};

// A store with bases that were folded into, and blocks that are newer in the logs; opened and at
// rest.
class Scrubbed {
 public:
  Scrubbed() : world_(options()) {
    store_ = std::move(*world_.open_small());
    content_ = put(*store_, "a", 300'000, 1);
    other_ = put(*store_, "b", 90'000, 2);
    update(*store_, "a", content_, 8192, 8192, 3);
    update(*store_, "b", other_, 0, 4096, 4);
    EXPECT_OK(store_->fold_all().wait());
    folded_ = store_->info().committed;
    update(*store_, "a", content_, 12'288, 8192, 5);
    update(*store_, "a", content_, 200'000, 10'000, 6);
    auto both = std::move(*store_->begin());  // of a COMMIT
    Bytes bytes = pattern(4096, 7);
    EXPECT_OK(both->write("a", 0, slice_of(bytes)).wait());
    EXPECT_OK(both->write("b", 40'960, slice_of(bytes)).wait());
    EXPECT_OK(both->commit(Durability::durable).wait());
    std::memcpy(content_.data(), bytes.data(), 4096);
    std::memcpy(other_.data() + 40'960, bytes.data(), 4096);
    images_ = images_of(world_);
    find_spots();
  }

  ScrubReport scrub() {
    const auto report = std::make_shared<ScrubReport>();
    EXPECT_OK(store_->scrub(report).wait());
    return *report;
  }
  // As it was: the disks, and the store opened anew without a look at them (nothing that a flip
  // would spoil is in memory but headers).
  void flip(const Spot& spot, unsigned bit) { world_.disk().flip(spot.path, spot.offset, bit); }
  bool whole() { return read_all(*store_, "a") == content_ && read_all(*store_, "b") == other_; }
  const std::vector<Spot>& spots() const { return spots_; }
  // Closed, and opened again as a store that works by itself, and scrubs at this rate.
  void go_on_alone(uint64_t scrub_rate) {
    store_.reset();
    world_.begin_background(scrub_rate);
    store_ = std::move(*world_.open_small());
  }
  // So many passes that began after now have ended.
  bool await_passes(uint64_t count) {
    const uint64_t until = store_->health().patrol.passes + count + 1;
    for (const auto begun = std::chrono::steady_clock::now();
         store_->health().patrol.passes < until;) {
      if (!store_->health().patrol.stopped.empty() ||
          std::chrono::steady_clock::now() - begun > std::chrono::minutes(5))
        return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }
  void look_again() {
    images_ = images_of(world_);
    spots_.clear();
    find_spots();
  }
  void close() { store_.reset(); }
  FsckReport fsck() {
    auto report = coded::fsck(world_, 4, 2);
    EXPECT_OK(report);
    return report ? *report : FsckReport();
  }
  void change(size_t offset, size_t bytes, uint64_t seed) {
    update(*store_, "a", content_, offset, bytes, seed);
  }
  CodedStore& store() { return *store_; }
  CodedWorld& world() { return world_; }
  const Bytes& content() const { return content_; }
  Bytes block(const Spot& spot) const {
    Bytes bytes(4096);
    images_.at(spot.path).read(align_down(spot.offset, 4096), bytes);
    return bytes;
  }

 private:
  static CodedWorldOptions options() {
    CodedWorldOptions options = quiet(4, 2);
    options.segment_bytes = 256 << 10;
    options.segments = 4;
    return options;
  }
  void find_spots() {
    for (const std::string& path : world_.paths()) {
      const SimImage& image = images_.at(path);
      Bytes head(4096);
      image.read(0, head);
      const Superblock super = **decode_superblock(head);
      const Shape& shape = super.shape;
      for (const uint64_t at : kSuperblockAt) spots_.push_back({Kind::superblock, path, at + 60});
      Stamp newest = 0;
      uint64_t newest_at = 0;
      for (size_t area = 0; area < 2; ++area) {
        Bytes bytes(shape.area_bytes);
        image.read(shape.area_at(area), bytes);
        const auto found = read_table_image(super.store, bytes);
        if (found && found->stamp > newest) newest_at = shape.area_at(area);
        if (found) newest = std::max(newest, found->stamp);
      }
      spots_.push_back({Kind::table, path, newest_at + 75});
      for (size_t segment = 0; segment < shape.segments; ++segment) {
        Bytes bytes(shape.segment_bytes);
        image.read(shape.segment_at(segment), bytes);
        read_segment(
            shape, super.store, super.shard, segment, super.log_floor, bytes,
            [&](uint64_t at, const FrameContent& frame) {
              for (const Item& item : frame.items) {
                const auto* val = std::get_if<ValItem>(&item);
                const auto* commit = std::get_if<CommitItem>(&item);
                if (!(val && number_of(val->stamp) > folded_) &&
                    !(commit && commit->stamp > newest))
                  continue;
                spots_.push_back({Kind::record, path, shape.segment_at(segment) + at + 70});
                if (val)
                  spots_.push_back(
                      {Kind::record, path,
                       shape.segment_at(segment) + at + frame.blocks_at + val->at * 4096 + 99});
              }
            });
      }
      for (size_t slot = 0; slot < shape.slots; ++slot) {
        size_t chunk = SIZE_MAX;
        for (size_t page = 0; page < shape.pages(); ++page) {
          std::array<uint64_t, 2> counter{};
          for (const size_t copy : {0, 1}) {
            Bytes bytes(4096);
            image.read(shape.slot_at(slot) + (2 * page + copy) * 4096, bytes);
            if (std::memcmp(bytes.data(), "SKH1", 4) != 0) continue;
            std::memcpy(&counter[copy], bytes.data() + 16, 8);
            chunk = static_cast<size_t>(bytes[24]);
          }
          for (const size_t copy : {0, 1}) {
            if (counter[copy] == 0) continue;
            const Kind kind = counter[copy] > counter[1 - copy] ? Kind::page : Kind::older_page;
            spots_.push_back({kind, path, shape.slot_at(slot) + (2 * page + copy) * 4096 + 64 + 7});
          }
        }
        if (chunk == SIZE_MAX) continue;
        for (size_t row = 0; row < shape.rows(); ++row) {
          Bytes bytes(4096);
          image.read(shape.block_at(slot, row), bytes);
          if (std::all_of(bytes.begin(), bytes.end(),
                          [](std::byte byte) { return byte == std::byte{0}; }))
            continue;
          spots_.push_back({chunk < shape.k ? Kind::data : Kind::parity, path,
                            shape.block_at(slot, row) + 1234});
        }
      }
    }
  }

  CodedWorld world_;
  std::unique_ptr<CodedStore> store_;
  Bytes content_, other_;
  Version folded_ = 0;
  std::map<std::string, SimImage> images_;
  std::vector<Spot> spots_;
};

uint64_t of_kind(const ScrubReport& report, Kind kind) {
  switch (kind) {
    case Kind::superblock:
      return report.superblocks;
    case Kind::table:
      return report.tables;
    case Kind::record:
      return report.records;
    case Kind::page:
    case Kind::older_page:
      return report.pages;
    default:
      return report.blocks;
  }
}

TEST(CodedScrub, FindsNothingWhereNothingIsWrong) {
  Scrubbed run;
  const ScrubReport report = run.scrub();
  EXPECT_EQ(report.found(), 0U);
  EXPECT_GT(report.chunks, 10U);
  EXPECT_TRUE(run.whole());
}

TEST(CodedScrub, OneFlippedBitInEveryKindOfPlaceIsFoundAndMended) {
  std::map<Kind, size_t> tried;
  std::mt19937_64 random(5);
  Scrubbed run;
  for (const Spot& spot : run.spots()) {
    // Blocks are many and alike.
    if ((spot.kind == Kind::data || spot.kind == Kind::parity) && random() % 4 != 0) continue;
    Scrubbed fresh;
    ASSERT_EQ(fresh.spots().size(), run.spots().size());
    const auto nth = static_cast<size_t>(&spot - run.spots().data());
    const std::string what = std::string(kNames[static_cast<size_t>(spot.kind)]) + " on " +
                             spot.path + " at " + std::to_string(spot.offset);
    // Another store of the same story: stamps and places are the same, identities are not.
    fresh.flip(fresh.spots()[nth], static_cast<unsigned>(random() % 8));
    const ScrubReport report = fresh.scrub();
    ASSERT_GE(of_kind(report, spot.kind), 1U) << what;
    ASSERT_TRUE(report.lost.empty()) << what;
    ASSERT_TRUE(fresh.whole()) << what;
    ASSERT_EQ(fresh.scrub().found(), 0U) << what << ": a second scrub finds nothing";
    ++tried[spot.kind];
  }
  for (size_t kind = 0; kind < kNames.size(); ++kind) {
    EXPECT_GE(tried[static_cast<Kind>(kind)], 4U) << kNames[kind];
    RecordProperty(kNames[kind], static_cast<int>(tried[static_cast<Kind>(kind)]));
  }
}

// Up to m wrong blocks of a row are mended; what was never wrong is not touched by that.
TEST(CodedScrub, TwoFlippedBitsNeverChangeWhatWasAcknowledged) {
  std::mt19937_64 random(17);
  for (int i = 0; i < 40; ++i) {
    Scrubbed run;
    const Spot& first = run.spots()[random() % run.spots().size()];
    const Spot& second = run.spots()[random() % run.spots().size()];
    run.flip(first, 1);
    run.flip(second, 2);
    const std::string what = std::string(kNames[static_cast<size_t>(first.kind)]) + " on " +
                             first.path + " at " + std::to_string(first.offset) + ", " +
                             kNames[static_cast<size_t>(second.kind)] + " on " + second.path +
                             " at " + std::to_string(second.offset);
    const ScrubReport report = run.scrub();
    ASSERT_TRUE(report.lost.empty()) << what;
    ASSERT_GE(report.found(), 1U) << what;
    ASSERT_TRUE(run.whole()) << what;
    ASSERT_EQ(run.scrub().found(), 0U) << what;
  }
}

// More of a row is wrong than can be decoded: nothing is made up. Once the bits are right again (a
// better copy of the disk, say), so is everything.
TEST(CodedScrub, WhatCannotBeDecodedIsToldAndLeftAsItIs) {
  Scrubbed run;
  std::vector<Spot> row;
  for (const Spot& spot : run.spots()) {
    if (spot.kind != Kind::data && spot.kind != Kind::parity) continue;
    // Of one row: the first spot of each of three shards that hold the same row of the first
    // stripe, which stands in the first slot.
    const bool shard_seen = std::any_of(row.begin(), row.end(),
                                        [&](const Spot& each) { return each.path == spot.path; });
    if (!shard_seen && row.size() < 3 && (row.empty() || spot.offset == row[0].offset))
      row.push_back(spot);
  }
  ASSERT_EQ(row.size(), 3U);
  for (const Spot& spot : row) run.flip(spot, 3);
  const ScrubReport report = run.scrub();
  EXPECT_FALSE(report.lost.empty());
  EXPECT_NE(report.lost[0].find("cannot be decoded"), std::string::npos) << report.lost[0];
  for (const char* key : {"a", "b"}) {
    const auto info = run.store().stat(key, "");
    Bytes into(info->bytes);
    const auto read = run.store().read(key, 0, slice_of(into), {}).wait();
    EXPECT_TRUE(read || read.error().code == Code::corruption);
  }
  for (const Spot& spot : row) run.flip(spot, 3);
  EXPECT_TRUE(run.whole());
  const ScrubReport again = run.scrub();
  EXPECT_TRUE(again.lost.empty());
}

// Any number of bits anywhere: what is read is what was acknowledged, or an error; before the
// scrub, after it, and after it was opened again.
TEST(CodedScrub, ManyFlippedBitsNeverPassForData) {
  std::mt19937_64 random(23);
  size_t lost = 0;
  for (int i = 0; i < 25; ++i) {
    Scrubbed run;
    const size_t flips = 3 + random() % 40;
    for (size_t n = 0; n < flips; ++n) {
      const Spot& spot = run.spots()[random() % run.spots().size()];
      if (spot.kind != Kind::superblock) run.flip(spot, static_cast<unsigned>(random() % 8));
    }
    const ScrubReport report = run.scrub();
    lost += report.lost.size();
    Bytes into(run.content().size());
    const auto read = run.store().read("a", 0, slice_of(into), {}).wait();
    if (read) {
      ASSERT_EQ(into, run.content()) << i;
    } else {
      ASSERT_EQ(read.error().code, Code::corruption);
    }
    if (report.lost.empty()) {
      ASSERT_TRUE(run.whole()) << i;
    }
  }
  EXPECT_GT(lost, 0U);
}

// It goes on while the store is written to, and while a shard fails under it.
TEST(CodedScrub, GoesOnBesideCommitsAndWithoutAShardThatFails) {
  Scrubbed run;
  Bytes bytes = pattern(4096, 50);
  const auto report = std::make_shared<ScrubReport>();
  const auto commit = [&](const std::vector<uint64_t>& at) {
    auto change = std::move(*run.store().begin());
    for (const uint64_t offset : at) EXPECT_OK(change->write("a", offset, slice_of(bytes)).wait());
    return change->commit(Durability::durable);
  };
  Future<void> done;
  Future<Version> first;
  {
    const auto held = run.world().disk().hold();  // it cannot come to an end before the shard fails
    done = run.store().scrub(report);
    run.world().disk().fail_nth(Op::Kind::write, 1, EIO, run.world().paths()[2]);
    // whole blocks (nothing is read) in two chunks: its COMMIT goes to all shards
    first = commit({0, 98'304});
  }
  ASSERT_OK(first.wait());
  for (uint64_t i = 0; i < 20; ++i) ASSERT_OK(commit({i * 4096}).wait());
  ASSERT_OK(done.wait());
  EXPECT_TRUE(report->lost.empty());
  EXPECT_TRUE(run.store().health().troubles.empty()) << "the shard that failed was brought back";
  EXPECT_EQ(run.scrub().found(), 0U);
}

// A reader of every stripe would fill the memory with their headers; a scrub leaves it as it was.
TEST(CodedScrub, KeepsNoHeadersThatItLoaded) {
  CodedWorld world(quiet(4, 2));
  {
    auto store = std::move(*world.open_small());
    for (uint64_t i = 0; i < 8; ++i) put(*store, std::to_string(i), 200'000, i);
  }
  auto store = std::move(*world.open_small());
  read_all(*store, "3");
  const uint64_t before = world.runtime().budget().used();
  const uint64_t outside = store->info().map_bytes;
  const auto report = std::make_shared<ScrubReport>();
  ASSERT_OK(store->scrub(report).wait());
  EXPECT_EQ(report->chunks, 48U);
  EXPECT_EQ(world.runtime().budget().used(), before);
  EXPECT_EQ(store->info().map_bytes, outside);
}

// What is on its way has its memory: the chunks of a stripe, and those of the next one.
TEST(CodedScrub, ReadsTheNextStripeBesideTheOneThatItLooksAt) {
  CodedWorld world(quiet(4, 2));
  auto store = std::move(*world.open_small());
  for (uint64_t i = 0; i < 4; ++i) put(*store, std::to_string(i), 4096, i);
  const Budget& budget = world.runtime().budget();
  const uint64_t stripes = budget.used() + 2 * 6 * store->shape().chunk_bytes;
  ASSERT_LT(budget.peak(), stripes);
  const auto report = std::make_shared<ScrubReport>();
  ASSERT_OK(store->scrub(report).wait());
  EXPECT_EQ(report->chunks, 24U);
  EXPECT_GE(budget.peak(), stripes);
  EXPECT_EQ(report->found(), 0U);
}

// Objects with ever higher names come as fast as it goes on.
TEST(CodedScrub, EndsAlthoughThereIsMoreAndMoreToLookAt) {
  CodedWorld world(quiet(4, 2));
  auto store = std::move(*world.open_small());
  const auto name = [](uint64_t i) { return std::to_string(1'000'000 + i); };
  Bytes bytes = pattern(40'000, 1);
  uint64_t named = 0;
  for (; named < 8; ++named) put(*store, name(named), bytes.size(), named);
  const auto report = std::make_shared<ScrubReport>();
  const auto done = store->scrub(report);
  while (!done.wait_for(std::chrono::milliseconds(0)) && named < 1500) {
    auto change = std::move(*store->begin());
    ASSERT_OK(change->remove(name(named - 8)));
    ASSERT_OK(change->resize(name(named), bytes.size()));
    ASSERT_OK(change->write(name(named), 0, slice_of(bytes)).wait());
    ASSERT_OK(change->commit(Durability::durable).wait());
    ++named;
  }
  EXPECT_LT(named, 1500U);
  ASSERT_OK(done.wait());
  EXPECT_LE(report->chunks, 48U);
  EXPECT_EQ(report->found(), 0U);
}

// Mending a log, the disk fails: it is left out and brought back, and the pass goes on.
TEST(CodedScrub, GoesOnWithoutAShardWhoseLogCannotBeMended) {
  for (size_t nth = 0; nth < 6; ++nth) {
    Scrubbed run;
    std::vector<Spot> records = run.spots();
    std::erase_if(records, [](const Spot& spot) { return spot.kind != Kind::record; });
    const Spot spot = records[nth * records.size() / 6];
    run.flip(spot, 1);
    run.world().disk().fail_nth(Op::Kind::write, 1, EIO, spot.path);
    const ScrubReport report = run.scrub();
    EXPECT_TRUE(report.lost.empty());
    EXPECT_GT(report.chunks, 0U);
    EXPECT_TRUE(run.store().health().troubles.empty());
    EXPECT_TRUE(run.whole());
    EXPECT_EQ(run.scrub().found(), 0U);
  }
}

// One read that fails, and not again, is no reason to go without a disk.
TEST(CodedScrub, DropsNoShardForWhatCanBeReadTheSecondTime) {
  for (uint64_t nth = 3; nth < 9; ++nth) {  // the first two are of superblocks
    Scrubbed run;
    const uint64_t epoch = run.store().health().epoch;
    run.world().disk().fail_nth(Op::Kind::read, nth, EIO, run.world().paths()[1]);
    const ScrubReport report = run.scrub();
    EXPECT_TRUE(report.lost.empty());
    EXPECT_EQ(report.found(), 0U);
    EXPECT_EQ(run.store().health().epoch, epoch) << nth;
  }
}

// One of its reads is late, be it of header pages, and the others came long ago. Meanwhile a scrub
// loads them too, the stripe is folded between two steps of it, and the scrub lets them go: what
// the reader has is older than the fold.
TEST(CodedScrub, AReaderThatWasLateBringsNoOldHeadersBack) {
  for (size_t late = 0; late < 3; ++late) {
    VirtualClock clock;
    clock.advance_to(1'000'000'000);
    CodedWorldOptions options = quiet(2, 1);
    options.segment_bytes = 256 << 10;
    options.segments = 4;
    options.repair_rate = 1 << 20;
    options.clock = &clock;
    CodedWorld world(options);
    auto store = std::move(*world.open_small());
    Bytes content = put(*store, "a", 120'000, 1);
    Bytes other = put(*store, "b", 120'000, 2);
    for (uint64_t i = 0; i < 80; ++i) {  // over what is in the logs of "a"
      update(*store, "b", other, i % 2 * 65'536, 53'248, i);
      ASSERT_OK(store->fold_all().wait());
    }
    store.reset();
    store = std::move(*world.open_small());
    const std::string& path = world.paths()[late];
    for (const std::string& each : world.paths()) world.disk().hold_reads(each);
    const auto held = [&] {
      size_t reads = 0;
      for (const std::string& each : world.paths()) reads += world.disk().held(each);
      return reads;
    };
    Bytes into(content.size());
    const auto read = store->read("a", 0, slice_of(into), {});
    const auto begun = std::chrono::steady_clock::now();
    while (held() < 3 && std::chrono::steady_clock::now() - begun < std::chrono::minutes(1))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const size_t all = held();
    for (const std::string& each : world.paths()) {
      if (each != path || all != 3) world.disk().let_go(each);
    }
    ASSERT_EQ(all, 3U) << "header pages of the parity, and the blocks of two chunks";
    world.disk().fail_nth(Op::Kind::write, 1, EIO, path);  // nobody else asks it, then
    put(*store, "c", 8192, 5);
    ASSERT_EQ(store->health().troubles.size(), 1U);
    const auto scrubbed = store->scrub(std::make_shared<ScrubReport>());
    // Each chance is for one step, and a chunk takes the time of some.
    const auto scrub_until = [&](size_t chunks) {
      for (int i = 0; store->health().doing.done < chunks; ++i) {
        ASSERT_LT(i, 5000) << "it does not go on";
        clock.advance_to(clock.now_ns() + 20'000'000);
        for (uint64_t chance = 0; chance < 2; ++chance) update(*store, "b", other, 0, 4096, chance);
      }
    };
    ASSERT_NO_FATAL_FAILURE(scrub_until(1));
    ASSERT_EQ(store->health().doing.done, 1U);
    update(*store, "a", content, 8192, 4096, 6);
    ASSERT_OK(store->fold_all().wait());
    ASSERT_NO_FATAL_FAILURE(scrub_until(3));
    world.disk().let_go(path);
    EXPECT_OK(read.wait());
    EXPECT_EQ(into, content) << late;
    Bytes again(content.size());
    EXPECT_OK(store->read("a", 0, slice_of(again), {}).wait());
    EXPECT_EQ(again, content) << late;
  }
}

// Fsck changes nothing, and looks at every copy: what a reader would not notice is a problem too,
// or a note where a crash may have left it so.
TEST(CodedFsck, TellsOfOneFlippedBitInEveryKindOfPlace) {
  std::mt19937_64 random(41);
  Scrubbed run;
  run.close();
  const FsckReport before = run.fsck();
  ASSERT_TRUE(before.problems.empty()) << before.problems[0];
  std::map<Kind, size_t> problems;
  for (size_t turn = 0; turn < 6 * kNames.size(); ++turn) {
    std::vector<Spot> spots = run.spots();
    std::erase_if(spots, [&](const Spot& spot) {
      return static_cast<size_t>(spot.kind) != turn % kNames.size();
    });
    ASSERT_FALSE(spots.empty());
    const Spot spot = spots[random() % spots.size()];
    const auto bit = static_cast<unsigned>(random() % 8);
    const auto changes = run.world().disk().image(spot.path);
    run.flip(spot, bit);
    const FsckReport report = run.fsck();
    const std::string what = std::string(kNames[static_cast<size_t>(spot.kind)]) + " on " +
                             spot.path + " at " + std::to_string(spot.offset);
    ASSERT_GT(report.problems.size() + report.notes.size(), before.notes.size()) << what;
    problems[spot.kind] += report.problems.empty() ? 0 : 1;
    if (!report.problems.empty()) {
      ASSERT_FALSE(report.advice.empty()) << what;
    }
    Bytes now(4096), then(4096);
    run.world().disk().image(spot.path).read(align_down(spot.offset, 4096), now);
    changes.read(align_down(spot.offset, 4096), then);
    ASSERT_NE(now, then) << "nothing was mended";
    run.flip(spot, bit);
  }
  for (const Kind kind : {Kind::superblock, Kind::table, Kind::page, Kind::data, Kind::parity})
    EXPECT_EQ(problems[kind], 6U) << kNames[static_cast<size_t>(kind)];
  EXPECT_GE(problems[Kind::record], 1U)
      << "of the last one in a log it is not told from one that a crash left out";
  EXPECT_EQ(problems[Kind::older_page], 0U) << "the other copy suffices: a note";
}

// Each of what is wrong has its advice: damage beside a shard that is away is mended by a scrub all
// the same, while there are enough to write to.
TEST(CodedFsck, AdvisesAScrubForDamageAlsoWhereAShardIsAway) {
  Scrubbed run;
  run.close();
  const auto advises = [&](const std::string& what) {
    const FsckReport report = run.fsck();
    return std::any_of(report.advice.begin(), report.advice.end(), [&](const std::string& each) {
      return each.find(what) != std::string::npos;
    });
  };
  const Spot spot = *std::find_if(run.spots().begin(), run.spots().end(),
                                  [](const Spot& each) { return each.kind == Kind::data; });
  std::vector<std::string> others = run.world().paths();
  std::erase(others, spot.path);
  run.world().disk().remove(others[0]);
  EXPECT_TRUE(advises("missing disks"));
  EXPECT_FALSE(advises("`stoker scrub`"));
  run.flip(spot, 3);
  EXPECT_TRUE(advises("missing disks"));
  EXPECT_TRUE(advises("`stoker scrub`"));
  for (const size_t lost : {1U, 2U}) run.world().disk().remove(others[lost]);
  EXPECT_TRUE(advises("missing disks"));
  EXPECT_FALSE(advises("`stoker scrub`")) << "nothing can be written";
}

// All is folded, the newest image says all there is: what differs from the other shards' by a bit
// was not left so by a crash.
TEST(CodedFsck, TellsAFlippedBitOfTheTableFromACrash) {
  Scrubbed run;
  ASSERT_OK(run.store().fold_all().wait());
  run.look_again();
  std::vector<Spot> tables = run.spots();
  std::erase_if(tables, [](const Spot& spot) { return spot.kind != Kind::table; });
  run.close();
  ASSERT_TRUE(run.fsck().problems.empty());
  for (const Spot& spot : tables) {
    run.flip(spot, 3);
    const FsckReport report = run.fsck();
    ASSERT_EQ(report.problems.size(), 1U) << spot.path;
    EXPECT_NE(report.problems[0].find("object table"), std::string::npos);
    EXPECT_FALSE(report.advice.empty());
    run.flip(spot, 3);
  }
  // A torn write: what was there before stands in the area still.
  SimImage image = run.world().disk().image(tables[0].path);
  image.write(align_down(tables[0].offset, 4096), pattern(4096, 9));
  run.world().disk().put(tables[0].path, image);
  EXPECT_TRUE(run.fsck().problems.empty());
}

constexpr uint64_t kFast = uint64_t{1} << 30;

// Nobody asks for it: within a pass it is found and made right again.
TEST(CodedPatrol, OneFlippedBitInEveryKindOfPlaceIsMendedWithoutBeingAskedFor) {
  std::mt19937_64 random(31);
  Scrubbed run;
  run.go_on_alone(kFast);
  std::map<Kind, size_t> tried;
  uint64_t found = 0;
  for (size_t turn = 0; turn < 3 * kNames.size(); ++turn) {
    if (turn % kNames.size() == static_cast<size_t>(Kind::table) && turn > kNames.size()) {
      // else both areas may hold an image of the same moment, and one of them suffices
      run.change(0, 4096, 300 + turn);
      ASSERT_OK(run.store().fold_all().wait());
    }
    ASSERT_TRUE(run.await_passes(1)) << run.store().health().patrol.stopped;
    ASSERT_EQ(run.store().health().patrol.last.found(), 0U) << "nothing is wrong any more";
    run.look_again();
    std::vector<Spot> spots = run.spots();
    std::erase_if(spots, [&](const Spot& spot) {
      return static_cast<size_t>(spot.kind) != turn % kNames.size();
    });
    // Once: what was mended of a log is there twice afterwards, and one of them is not needed.
    if (turn % kNames.size() == static_cast<size_t>(Kind::record) && turn > kNames.size()) continue;
    ASSERT_FALSE(spots.empty());
    const Spot spot = spots[random() % spots.size()];
    run.flip(spot, static_cast<unsigned>(random() % 8));
    const std::string what = std::string(kNames[static_cast<size_t>(spot.kind)]) + " on " +
                             spot.path + " at " + std::to_string(spot.offset);
    ASSERT_TRUE(run.await_passes(1)) << what << ": " << run.store().health().patrol.stopped;
    const Patrol patrol = run.store().health().patrol;
    ASSERT_GT(patrol.found, found) << what;
    ASSERT_TRUE(patrol.last.lost.empty()) << what;
    ASSERT_GT(run.store().health().scrubbed.ended_at, 1'600'000'000U) << what;
    ASSERT_TRUE(run.whole()) << what;
    found = patrol.found;
    ++tried[spot.kind];
  }
  EXPECT_EQ(run.scrub().found(), 0U) << "asked for, it finds what the other left: nothing";
  for (size_t kind = 0; kind < kNames.size(); ++kind) {
    EXPECT_EQ(tried[static_cast<Kind>(kind)], static_cast<Kind>(kind) == Kind::record ? 1U : 3U)
        << kNames[kind];
  }
}

TEST(CodedPatrol, GoesOnBesideCommitsAndEndsWithTheStore) {
  Scrubbed run;
  run.go_on_alone(kFast);
  for (uint64_t i = 0; i < 100; ++i) run.change(i % 70 * 4096, 4096, 200 + i);
  EXPECT_TRUE(run.whole());
  ASSERT_TRUE(run.await_passes(1));
  EXPECT_EQ(run.store().health().patrol.found, 0U);
  // So slow that its first pass, once begun, does not come to an end before the store does.
  run.go_on_alone(4096);
  for (int i = 0; i < 10'000 && run.store().health().patrol.doing.what.empty(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  ASSERT_FALSE(run.store().health().patrol.doing.what.empty());
  run.change(0, 4096, 400);
  EXPECT_EQ(run.store().health().patrol.passes, 0U);
  run.go_on_alone(kFast);
  EXPECT_TRUE(run.whole());
  ASSERT_TRUE(run.await_passes(1));
}

// With one parity, a disk that was left out to be written anew would leave the rest to luck: nobody
// asked for that.
TEST(CodedPatrol, LeavesNoShardOutThatIsTheLastSpare) {
  CodedWorld world(quiet(2, 1));
  { put(**world.open_small(), "a", 120'000, 1); }
  Bytes head(4096);
  world.disk().image(world.paths()[1]).read(0, head);
  const Shape shape = (**decode_superblock(head)).shape;
  world.begin_background(kFast);
  auto store = std::move(*world.open_small());
  const uint64_t epoch = store->health().epoch;
  world.disk().spoil(world.paths()[1], shape.segment_at(5) + 3 * kBlock);
  const auto begun = std::chrono::steady_clock::now();
  while (store->health().patrol.last.lost.empty() && store->health().epoch == epoch &&
         std::chrono::steady_clock::now() - begun < std::chrono::minutes(2))
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  const Health health = store->health();
  EXPECT_EQ(health.epoch, epoch);
  ASSERT_EQ(health.patrol.last.lost.size(), 1U);
  EXPECT_NE(health.patrol.last.lost[0].find(world.paths()[1]), std::string::npos)
      << health.patrol.last.lost[0];
  // Asked for, it is made readable.
  const auto report = std::make_shared<ScrubReport>();
  ASSERT_OK(store->scrub(report).wait());
  EXPECT_TRUE(report->lost.empty());
  EXPECT_TRUE(store->health().troubles.empty());
}

// Its memory may be larger, in large pages: what lies behind the area is not read for it.
TEST(CodedScrub, AnAreaIsReadToItsEndAndNoFurther) {
  CodedWorld world(quiet(2, 1));
  { ASSERT_OK(world.open_small()); }
  CodedOptions coded;
  coded.files = false;
  auto shards =
      std::move(*Shards::open({2, 1, world.paths()}, world.runtime().runtime(), {}, coded));
  constexpr size_t kBytes = 2 * kMiB + 64 * kKiB;
  PiecewiseRead read(*shards, 0, 0, kBytes, {});
  size_t moved = 0;
  while (!read.done()) moved += read.step(3);
  EXPECT_EQ(moved, kBytes);
  EXPECT_EQ(read.bytes().size(), kBytes);
  // of the same memory, a smaller one
  PiecewiseRead again(*shards, 0, 0, kMiB, read.take_memory());
  for (moved = 0; !again.done();) moved += again.step(3);
  EXPECT_EQ(moved, kMiB);
}

TEST(CodedPatrol, WithoutARateThereIsNone) {
  Scrubbed run;
  run.go_on_alone(0);
  // longer than the background waits before it works
  std::this_thread::sleep_for(std::chrono::milliseconds(250));
  const Patrol patrol = run.store().health().patrol;
  EXPECT_EQ(patrol.passes, 0U);
  EXPECT_TRUE(patrol.doing.what.empty());
}

}  // namespace
}  // namespace stoker::coded
