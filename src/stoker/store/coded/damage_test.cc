// Sectors that cannot be read and blocks that cannot be decoded: nothing that is intact is given up
// for them, and what is lost is told.
#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include "stoker/store/coded/coded_store.h"
#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

// One stripe, coded 2+1, that was folded into twice; closed.
class Damaged {
 public:
  Damaged() : world_(quiet(2, 1)) {
    auto store = std::move(*world_.open_small());
    content_ = put(*store, "a", 120'000, 1);
    for (uint64_t seed = 2; seed < 4; ++seed) {
      update(*store, "a", content_, 8192, 8192, seed);
      update(*store, "a", content_, 81'920, 4096, seed + 10);
      EXPECT_OK(store->fold_all().wait());
    }
    store.reset();
    keep();
    find_chunks();
  }

  struct Chunk {
    std::string path;
    uint64_t pages_at = 0, blocks_at = 0;
    std::array<uint64_t, 2> counters{};  // of the copies of its page
    uint64_t newest() const { return pages_at + (counters[1] > counters[0] ? kBlock : 0); }
    uint64_t other() const { return pages_at + (counters[1] > counters[0] ? 0 : kBlock); }
  };
  const Chunk& chunk(size_t position) const { return chunks_[position]; }
  static constexpr size_t kParity = 2;

  // As it was closed, or kept.
  void keep() { images_ = images_of(world_); }
  void reset() {
    world_.disk().heal();
    put_back(world_, images_);
  }
  void lose(size_t position) { world_.disk().remove(chunk(position).path); }
  void bring_back(size_t position) {
    world_.disk().put(chunk(position).path, images_.at(chunk(position).path));
  }
  void spoil_pages(size_t position) {
    for (const uint64_t at : {chunk(position).newest(), chunk(position).other()})
      world_.disk().spoil(chunk(position).path, at);
  }
  void flip(size_t position, size_t row) {
    world_.disk().flip(chunk(position).path, chunk(position).blocks_at + row * kBlock + 77, 2);
  }
  std::unique_ptr<CodedStore> open() { return std::move(*world_.open_small()); }
  static ScrubReport scrub(CodedStore& store) {
    const auto report = std::make_shared<ScrubReport>();
    EXPECT_OK(store.scrub(report).wait());
    return *report;
  }
  Result<RepairReport> repair(const RepairOptions& options) {
    CodedOptions coded;
    coded.files = false;
    return repair_coded_store({2, 1, world_.paths()}, world_.runtime().runtime(), options, coded);
  }
  CodedWorld& world() { return world_; }
  const Bytes& content() const { return content_; }

 private:
  void find_chunks() {
    for (const std::string& path : world_.paths()) {
      const SimImage& image = images_.at(path);
      Bytes bytes(kBlock);
      image.read(0, bytes);
      const Shape shape = (**decode_superblock(bytes)).shape;
      ASSERT_EQ(shape.pages(), 1U);
      for (size_t slot = 0; slot < shape.slots; ++slot) {
        Chunk found{path, shape.slot_at(slot), shape.block_at(slot, 0), {}};
        size_t position = SIZE_MAX;
        for (const size_t copy : {0, 1}) {
          image.read(found.pages_at + copy * kBlock, bytes);
          if (std::memcmp(bytes.data(), "SKH1", 4) != 0) continue;
          std::memcpy(&found.counters[copy], bytes.data() + 16, 8);
          position = static_cast<size_t>(bytes[24]);
        }
        if (position < chunks_.size()) chunks_[position] = found;
      }
    }
    for (const Chunk& each : chunks_) ASSERT_GT(each.counters[0] + each.counters[1], 2U);
  }

  CodedWorld world_;
  Bytes content_;
  std::map<std::string, SimImage> images_;
  std::array<Chunk, 3> chunks_;
};

TEST(CodedDamage, HealthTellsOnWhichDiskReadsWentWrong) {
  Damaged run;
  run.flip(0, 3);
  run.world().disk().spoil(run.chunk(1).path, run.chunk(1).blocks_at + 5 * kBlock);
  auto store = run.open();
  EXPECT_EQ(read_all(*store, "a"), run.content());
  const Health health = store->health();
  ASSERT_EQ(health.disks.size(), 3U);
  for (const auto& [path, disk] : health.disks) {
    EXPECT_EQ(disk.wrong_blocks, path == run.chunk(0).path ? 1U : 0U) << path;
    EXPECT_EQ(disk.failed_reads > 0, path == run.chunk(1).path) << path;
    EXPECT_EQ(disk.failed_puts, 0U) << path;
    EXPECT_EQ(disk.last.empty(), path == run.chunk(Damaged::kParity).path) << path;
  }
}

// With the parity away, one sector of a data chunk's header pages cannot be read: the one that does
// not matter.
TEST(CodedDamage, AnUnreadableCopyOfAHeaderPageTakesNothingWithIt) {
  Damaged run;
  for (const size_t position : {0U, 1U}) {
    for (const bool logs : {false, true}) {
      run.reset();
      Bytes content = run.content();
      if (logs) {  // so that opening for writing reads the headers
        auto store = run.open();
        update(*store, "a", content, 4096, 4096, 30);
        update(*store, "a", content, 70'000, 4096, 31);
      }
      run.lose(Damaged::kParity);
      run.world().disk().spoil(run.chunk(position).path, run.chunk(position).other());
      {
        auto store = run.open();
        EXPECT_EQ(read_all(*store, "a"), content);
        EXPECT_TRUE(Damaged::scrub(*store).lost.empty());
        EXPECT_EQ(read_all(*store, "a"), content);
      }
      {
        auto store = run.open();
        EXPECT_EQ(read_all(*store, "a"), content);
      }
      run.bring_back(Damaged::kParity);
      {
        auto store = run.open();
        ASSERT_OK(store->repair().wait());
        EXPECT_EQ(read_all(*store, "a"), content);
      }
      run.lose(position);
      EXPECT_EQ(read_all(*run.open(), "a"), content);
    }
  }
}

// The headers were not to be read for a while, and are in memory as unknown. What is on the disk is
// believed once it can be read.
TEST(CodedDamage, HeadersThatCanBeReadAgainAreAdopted) {
  Damaged run;
  {
    auto store = run.open();
    Bytes other = put(*store, "b", 120'000, 70);
    write_logs_anew(*store, "b", other);
  }
  run.keep();
  for (const size_t away : {2U, 0U}) {
    for (const size_t position : {0U, 1U, 2U}) {
      if (position == away) continue;
      run.reset();
      run.lose(away);
      {
        auto store = run.open();
        run.spoil_pages(position);
        Bytes into(run.content().size());
        const auto read = store->read("a", 0, slice_of(into), {}).wait();
        if (read) {
          EXPECT_EQ(into, run.content());
        } else {
          EXPECT_EQ(read.error().code, Code::corruption);
        }
        run.world().disk().heal();
        EXPECT_TRUE(Damaged::scrub(*store).lost.empty());
        EXPECT_EQ(read_all(*store, "a"), run.content()) << position << " without " << away;
      }
      EXPECT_EQ(read_all(*run.open(), "a"), run.content());
      run.bring_back(away);
      auto store = run.open();
      ASSERT_OK(store->repair().wait());
      EXPECT_EQ(read_all(*store, "a"), run.content());
      EXPECT_EQ(Damaged::scrub(*store).found(), 0U);
    }
  }
}

// Neither copy of a page could be read, and then a fold writes it: over the older one, or the newer
// one would count again.
TEST(CodedDamage, AFoldAfterHeadersCouldNotBeReadForAMomentIsWhatCounts) {
  Damaged run;
  Bytes content = run.content();
  Bytes other;
  {
    auto store = run.open();
    other = put(*store, "b", 120'000, 70);
    write_logs_anew(*store, "b", other);
  }
  {
    auto store = run.open();
    run.spoil_pages(0);
    EXPECT_EQ(read_all(*store, "a"), content);
    run.world().disk().heal();
    update(*store, "a", content, 8192, 4096, 60);
    ASSERT_OK(store->fold_all().wait());
    write_logs_anew(*store, "b", other);
  }
  run.lose(Damaged::kParity);
  EXPECT_EQ(read_all(*run.open(), "a"), content);
}

// With all else away it is what a row is decoded from, once anything in the background had a look
// at it.
TEST(CodedDamage, AParityWhoseHeadersCouldNotBeReadForAMomentStillCounts) {
  Damaged run;
  {
    auto store = run.open();
    Bytes other = put(*store, "b", 120'000, 70);
    write_logs_anew(*store, "b", other);
  }
  auto store = run.open();
  run.spoil_pages(Damaged::kParity);
  EXPECT_EQ(read_all(*store, "a"), run.content());
  run.world().disk().heal();
  ASSERT_OK(store->repair().wait());  // as the background does by itself
  run.world().disk().fail_nth(Op::Kind::write, 1, EIO, run.chunk(0).path);
  put(*store, "c", 8192, 5);
  ASSERT_EQ(store->health().troubles.size(), 1U);
  EXPECT_EQ(read_all(*store, "a"), run.content());
}

// As any shard that cannot be written.
TEST(CodedDamage, AShardThatCannotBeMendedIsLeftOutAndBroughtBack) {
  Damaged run;
  run.flip(0, 2);
  {
    auto store = run.open();
    EXPECT_EQ(read_all(*store, "a"), run.content());
    const uint64_t epoch = store->health().epoch;
    run.world().disk().fail_nth(Op::Kind::write, 1, EIO, run.chunk(0).path);
    ASSERT_OK(store->repair().wait());
    EXPECT_EQ(store->health().epoch, epoch + 2);
    EXPECT_EQ(store->health().lost_chunks, 0U);
    EXPECT_TRUE(store->health().troubles.empty());
  }
  run.lose(1);
  EXPECT_EQ(read_all(*run.open(), "a"), run.content());
}

TEST(CodedDamage, ARepairThatCouldNotRebuildAllSaysSo) {
  Damaged run;
  run.flip(0, 2);
  run.lose(Damaged::kParity);
  RepairOptions options;
  options.replace = {run.chunk(Damaged::kParity).path};
  const auto report = run.repair(options);
  ASSERT_OK(report);
  ASSERT_EQ(report->problems.size(), 1U);
  EXPECT_NE(report->problems[0].find("could not be rebuilt in full"), std::string::npos)
      << report->problems[0];
  EXPECT_FALSE(report->advice.empty());
  run.flip(0, 2);  // it can be read again
  EXPECT_EQ(read_all(*run.open(), "a"), run.content());
  options = {};
  options.scrub = true;
  const auto again = run.repair(options);
  ASSERT_OK(again);
  EXPECT_TRUE(again->problems.empty());
  run.lose(1);
  EXPECT_EQ(read_all(*run.open(), "a"), run.content());
}

// What could not be rebuilt of one disk is rebuilt when another came back; and what is in the log
// of such a stripe is folded then.
TEST(CodedDamage, WhatCouldNotBeDecodedIsTriedAgainWhenAShardCameBack) {
  Damaged run;
  run.lose(Damaged::kParity);
  run.flip(0, 2);
  Bytes content = run.content();
  {
    auto store = run.open();
    // row 2 of the other chunk: its parity needs what was flipped
    update(*store, "a", content, 65'536 + 8192, 4096, 40);
  }
  RepairOptions options;
  options.replace = {run.chunk(Damaged::kParity).path};
  auto report = run.repair(options);
  ASSERT_OK(report);
  ASSERT_FALSE(report->problems.empty());
  run.flip(0, 2);
  options = {};
  options.scrub = true;
  report = run.repair(options);
  ASSERT_OK(report);
  EXPECT_TRUE(report->problems.empty()) << report->problems[0];
  run.lose(0);
  EXPECT_EQ(read_all(*run.open(), "a"), content);
}

// The parity of a row is wrong and cannot be made anew: its header still says what it should be,
// and so it counts once it is right again.
TEST(CodedDamage, AParityThatCannotBeDecodedKeepsItsEntry) {
  Damaged run;
  run.flip(0, 2);
  run.flip(Damaged::kParity, 2);
  auto store = run.open();
  EXPECT_EQ(Damaged::scrub(*store).lost.size(), 2U);
  store.reset();
  run.flip(Damaged::kParity, 2);
  store = run.open();
  EXPECT_EQ(read_all(*store, "a"), run.content());
  EXPECT_TRUE(Damaged::scrub(*store).lost.empty());
}

// Written anew, a stripe needs what is not overwritten; into the log it goes without.
TEST(CodedDamage, AClassMakesNoCommitFail) {
  for (const Class each : {Class::read_only, Class::write_only, Class::read_write}) {
    Damaged run;
    run.lose(Damaged::kParity);
    run.flip(0, 2);
    auto store = run.open();
    auto change = std::move(*store->begin());
    ASSERT_OK(change->expect("a", each));
    ASSERT_OK(change->commit(Durability::durable).wait());
    Bytes content = run.content();
    ASSERT_NO_FATAL_FAILURE(update(*store, "a", content, 12'288, 65'536, 40))
        << static_cast<int>(each);
    Bytes into(65'536);
    ASSERT_OK(store->read("a", 12'288, slice_of(into), {}).wait());
    EXPECT_EQ(std::memcmp(into.data(), content.data() + 12'288, into.size()), 0);
    run.flip(0, 2);  // it can be read again
    EXPECT_EQ(read_all(*store, "a"), content);
  }
}

// Of two stripes the one with more bad chunks, whatever is read or rewritten more.
TEST(CodedDamage, WhatHasLostMostIsMendedFirst) {
  CodedWorld world(quiet(4, 2));
  auto store = std::move(*world.open_small());
  struct At {
    std::string path;
    uint64_t offset;
  };
  std::map<std::string, std::vector<At>> chunks;
  for (const std::string key : {"rewritten", "read"}) {
    world.disk().start_recording();
    const Bytes content = put(*store, key, 4 * 64 * kKiB, key.size());
    const auto events = world.disk().stop_recording();
    for (size_t chunk = 0; chunk < 4; ++chunk) {
      for (const SimEvent& event : events) {
        if (event.kind == SimEvent::Kind::write && event.bytes->size() == 64 * kKiB &&
            std::memcmp(event.bytes->data(), content.data() + chunk * 64 * kKiB, 64 * kKiB) == 0)
          chunks[key].push_back({event.path, event.offset});
      }
    }
    ASSERT_EQ(chunks[key].size(), 4U);
    auto change = std::move(*store->begin());
    ASSERT_OK(change->expect(key, key == "read" ? Class::read_only : Class::read_write));
    ASSERT_OK(change->commit(Durability::durable).wait());
  }
  world.disk().flip(chunks["rewritten"][0].path, chunks["rewritten"][0].offset + 99, 1);
  for (const size_t chunk : {1U, 2U})
    world.disk().flip(chunks["read"][chunk].path, chunks["read"][chunk].offset + 99, 1);
  for (const char* key : {"read", "rewritten"}) read_all(*store, key);
  world.disk().start_recording();
  ASSERT_OK(store->repair().wait());
  std::vector<std::string> order;
  for (const SimEvent& event : world.disk().stop_recording()) {
    for (const auto& [key, places] : chunks) {
      for (const At& at : places) {
        if (event.kind == SimEvent::Kind::write && event.path == at.path &&
            event.offset == at.offset)
          order.push_back(key);
      }
    }
  }
  EXPECT_EQ(order, (std::vector<std::string>{"read", "read", "rewritten"}));
  EXPECT_EQ(store->health().mended_blocks, 3U);
}

// Sectors of the logs of all shards: each is left out and comes back before the next.
TEST(CodedDamage, LogsThatCannotBeReadAreMadeAnewOneAfterTheOther) {
  Damaged run;
  Bytes content = run.content();
  auto store = run.open();
  update(*store, "a", content, 0, 4096, 50);
  Bytes head(kBlock);
  run.world().disk().image(run.chunk(0).path).read(0, head);
  const Shape shape = (**decode_superblock(head)).shape;
  for (const std::string& path : run.world().paths())
    run.world().disk().spoil(path, shape.segment_at(5) + 3 * kBlock);
  run.flip(1, 3);
  const ScrubReport report = Damaged::scrub(*store);
  EXPECT_TRUE(report.lost.empty()) << report.lost[0];
  EXPECT_EQ(report.records, 3U);
  EXPECT_EQ(report.blocks, 1U) << "mended while all shards were there";
  EXPECT_TRUE(store->health().troubles.empty());
  EXPECT_EQ(read_all(*store, "a"), content);
  EXPECT_EQ(Damaged::scrub(*store).found(), 0U);
}

// Somebody wrote over the beginning of a disk. It counts as lost like any other, and what stands
// there now may be all that somebody has: only who takes it away by hand may have the shard made
// anew.
TEST(CodedDamage, AShardWhoseHeadWasWrittenOverIsMissingAndNeverWrittenTo) {
  CodedWorld world(quiet(4, 2));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 300'000, 1);
  }
  const auto images = images_of(world);
  const auto spoil = [&](const std::string& path) {
    SimImage image = world.disk().image(path);
    image.write(0, Bytes(kHeadBytes, std::byte{'x'}));
    world.disk().put(path, image);
  };
  const std::string& path = world.paths()[2];
  spoil(path);
  const SimImage spoilt = world.disk().image(path);
  EXPECT_EQ(read_all(**world.open_small(true), "a"), content);
  {
    auto store = std::move(*world.open_small());
    ASSERT_EQ(store->health().troubles.size(), 1U);
    EXPECT_NE(store->health().troubles[0].find("'d2' holds something that is not a shard"),
              std::string::npos)
        << store->health().troubles[0];
    update(*store, "a", content, 8192, 8192, 2);
    ASSERT_OK(store->repair().wait());
    EXPECT_EQ(store->health().troubles.size(), 1U);
  }
  StoreOptions options;
  options.replace = {path};
  const auto over = world.open_coded(options);
  ASSERT_FALSE(over);
  EXPECT_EQ(over.error().code, Code::mismatch);
  EXPECT_NE(over.error().what.find("move it away"), std::string::npos) << over.error().what;
  Bytes now(spoilt.bytes());
  Bytes then(spoilt.bytes());
  world.disk().image(path).read(0, now);
  spoilt.read(0, then);
  EXPECT_EQ(now, then);
  // As the sentence says.
  world.disk().remove(path);
  {
    auto store = std::move(*world.open_coded(options));
    ASSERT_OK(store->repair().wait());
    EXPECT_TRUE(store->health().troubles.empty());
  }
  for (const size_t lost : {0U, 5U}) world.disk().remove(world.paths()[lost]);
  EXPECT_EQ(read_all(**world.open_small(true), "a"), content) << "with the new one";
  // With too few left nothing is served, and it is told of each why it is missing.
  put_back(world, images);
  for (size_t i = 0; i < 4; ++i) spoil(world.paths()[i]);
  const auto few = world.open_small(true);
  ASSERT_FALSE(few);
  EXPECT_EQ(few.error().code, Code::not_found);
  EXPECT_NE(few.error().what.find("'d3' holds something"), std::string::npos) << few.error().what;
}

// One disk, and opening has too much to put into its log again.
TEST(CodedDamage, ALogThatLostMostOfItsFramesKeepsNoStoreClosed) {
  CodedWorldOptions options = quiet(1, 2);  // all logs are alike
  options.segment_bytes = 256 << 10;
  options.segments = 5;
  CodedWorld world(options);
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 1 << 20, 1);
    for (uint64_t i = 0; i < 34; ++i) update(*store, "a", content, i * 16'384, 16'384, 10 + i);
    ASSERT_EQ(store->health().awaited_folds, 0U);
  }
  const std::string& path = world.paths()[2];
  const SimImage image = world.disk().image(path);
  Bytes block(kBlock);
  image.read(0, block);
  const Shape shape = (**decode_superblock(block)).shape;
  for (size_t segment = 0; segment < shape.segments; ++segment) {
    // all frames but the first
    for (uint64_t at = kBlock; at < shape.segment_bytes; at += kBlock) {
      image.read(shape.segment_at(segment) + at, block);
      if (std::memcmp(block.data(), "SKL1", 4) == 0)
        world.disk().flip(path, shape.segment_at(segment) + at + 70, 1);
    }
  }
  {
    auto opened = world.open_small();
    ASSERT_OK(opened);
    EXPECT_EQ(read_all(**opened, "a"), content);
    ASSERT_EQ((*opened)->health().troubles.size(), 1U);
    EXPECT_NE((*opened)->health().troubles[0].find("more than it has room for"), std::string::npos)
        << (*opened)->health().troubles[0];
    ASSERT_OK((*opened)->repair().wait());
    EXPECT_TRUE((*opened)->health().troubles.empty());
  }
  world.disk().remove(world.paths()[0]);
  EXPECT_EQ(read_all(**world.open_small(), "a"), content);
}

// What an opening cannot write is of a disk that failed, and it is not taken for whole.
TEST(CodedDamage, AParityThatCannotBeWrittenAtOpeningIsBroughtUpToDate) {
  Damaged run;
  size_t failed = 0;
  // behind the superblocks of the new epoch: blocks, pages, the table image
  for (uint64_t nth = 5; nth < 16; ++nth) {
    run.reset();
    Bytes content = run.content();
    {
      auto store = run.open();
      update(*store, "a", content, 4096, 4096, 30);  // so that opening looks at the stripe
    }
    const auto& parity = run.chunk(Damaged::kParity);
    for (const uint64_t at : {parity.newest(), parity.other()})
      run.world().disk().flip(parity.path, at + 100, 1);
    run.world().disk().fail_nth(Op::Kind::write, nth, EIO, parity.path);
    {
      auto store = run.open();
      run.world().disk().restore_power();
      failed += store->health().troubles.size();
      EXPECT_EQ(read_all(*store, "a"), content);
      ASSERT_OK(store->repair().wait());
      EXPECT_TRUE(store->health().troubles.empty());
      EXPECT_EQ(Damaged::scrub(*store).found(), 0U) << nth;
    }
    run.lose(0);
    EXPECT_EQ(read_all(*run.open(), "a"), content) << nth;
    run.bring_back(0);
  }
  EXPECT_GT(failed, 4U);
}

}  // namespace
}  // namespace stoker::coded
