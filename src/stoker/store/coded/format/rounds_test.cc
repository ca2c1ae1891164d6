// Records that are damaged in all logs: frames of later rounds tell of them, so nothing older is
// shown in their place, and nobody is told that all is well.
#include "stoker/store/coded/format/rounds.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "stoker/base/crc32c.h"
#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

struct FrameAt {
  size_t shard;
  uint64_t offset;
};

// The frames with a VAL, or the COMMIT, of this commit.
std::vector<FrameAt> frames_of(CodedWorld& world, uint64_t number, bool commits = false) {
  std::vector<FrameAt> found;
  for (size_t shard = 0; shard < world.paths().size(); ++shard) {
    const SimImage image = world.disk().image(world.paths()[shard]);
    if (image.bytes() < kHeadBytes) continue;
    Bytes head(kBlock);
    image.read(0, head);
    const Superblock super = **decode_superblock(head);
    for (size_t segment = 0; segment < super.shape.segments; ++segment) {
      Bytes bytes(super.shape.segment_bytes);
      image.read(super.shape.segment_at(segment), bytes);
      read_segment(super.shape, super.store, shard, segment, super.log_floor, bytes,
                   [&](uint64_t at, const FrameContent& frame) {
                     bool has = false;
                     for (const Item& item : frame.items) {
                       const auto* val = std::get_if<ValItem>(&item);
                       const auto* commit = std::get_if<CommitItem>(&item);
                       has = has ||
                             (!commits && val != nullptr && number_of(val->stamp) == number) ||
                             (commits && commit != nullptr && number_of(commit->stamp) == number);
                     }
                     if (has) found.push_back({shard, super.shape.segment_at(segment) + at});
                   });
    }
  }
  return found;
}

void spoil(CodedWorld& world, const std::vector<FrameAt>& frames,
           const std::set<size_t>& spared = {}) {
  for (const FrameAt& frame : frames) {
    if (!spared.contains(frame.shard))
      world.disk().flip(world.paths()[frame.shard], frame.offset + 90, 3);
  }
}

FsckReport check(CodedWorld& world, size_t k, size_t m) {
  auto report = fsck(world, k, m);
  EXPECT_OK(report);
  return report ? *report : FsckReport();
}

RepairReport repair(CodedWorld& world, size_t k, size_t m) {
  CodedOptions coded;
  coded.files = false;
  auto report = repair_coded_store({k, m, world.paths()}, world.runtime().runtime(), {}, coded);
  EXPECT_OK(report);
  return report ? *report : RepairReport();
}

Status read_block(Store& store, const std::string& key, size_t offset, const Bytes& content) {
  Bytes into(std::min<size_t>(kBlock, content.size() - offset));
  STOKER_TRY(store.read(key, offset, slice_of(into), {}).wait());
  if (std::memcmp(into.data(), content.data() + offset, into.size()) != 0)
    return fail(Code::mismatch, "other bytes than were written");
  return {};
}

// Nothing but `lost` is in the way of reading, and that is an error.
void expect_lost(Store& store, const Bytes& content, const std::set<size_t>& lost) {
  for (size_t at = 0; at < content.size(); at += kBlock) {
    const Status read = read_block(store, "a", at, content);
    if (lost.contains(at)) {
      ASSERT_FALSE(read) << at;
      EXPECT_EQ(read.error().code, Code::corruption) << read.error().message();
    } else {
      EXPECT_OK(read) << at;
    }
  }
}

bool tells(const std::vector<std::string>& problems, const std::string& what) {
  return std::any_of(problems.begin(), problems.end(), [&](const std::string& problem) {
    return problem.find(what) != std::string::npos;
  });
}

// An object, and commits 2 to 4: updates of three chunks.
struct Updated {
  CodedWorld world{quiet(4, 2)};
  Bytes content;
  Updated() {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 250'000, 1);
    update(*store, "a", content, 8192, kBlock, 2);
    update(*store, "a", content, 65'536 + 8192, kBlock, 3);
    update(*store, "a", content, 131'072, kBlock, 4);
  }
};

TEST(CodedRounds, AnUpdateThatIsDamagedInAllLogsIsAnErrorUntilItIsWrittenAgain) {
  Updated run;
  const auto frames = frames_of(run.world, 2);
  ASSERT_EQ(frames.size(), 3U);
  spoil(run.world, frames);
  EXPECT_TRUE(tells(check(run.world, 4, 2).problems,
                    "an update of 'a' that was acknowledged is damaged in all logs"));
  expect_lost(**run.world.open_small(true), run.content, {8192});
  for (int i = 0; i < 3; ++i) {
    auto store = std::move(*run.world.open_small());
    EXPECT_EQ(store->info().read_only, "");
    EXPECT_EQ(store->info().committed, 4U);
    expect_lost(*store, run.content, {8192});
    EXPECT_OK(store->fold_all().wait());
    expect_lost(*store, run.content, {8192});
  }
  EXPECT_FALSE(repair(run.world, 4, 2).problems.empty());
  EXPECT_FALSE(check(run.world, 4, 2).problems.empty());
  {
    auto store = std::move(*run.world.open_small());
    update(*store, "a", run.content, 8192, kBlock, 5);
    EXPECT_EQ(read_all(*store, "a"), run.content);
  }
  auto store = std::move(*run.world.open_small());
  EXPECT_OK(store->fold_all().wait());
  EXPECT_EQ(read_all(*store, "a"), run.content);
  store.reset();
  EXPECT_EQ(check(run.world, 4, 2).problems, std::vector<std::string>());
}

// As many shards are lost as may be, and one bit of the last copy.
TEST(CodedRounds, WithShardsLostOneBitIsEnoughAndIsTold) {
  Updated run;
  const auto images = images_of(run.world);
  const auto frames = frames_of(run.world, 3);
  ASSERT_EQ(frames.size(), 3U);
  for (const FrameAt& last : frames) {
    put_back(run.world, images);
    for (const FrameAt& frame : frames) {
      if (frame.shard != last.shard) run.world.disk().remove(run.world.paths()[frame.shard]);
    }
    spoil(run.world, {last});
    EXPECT_FALSE(check(run.world, 4, 2).problems.empty());
    auto store = std::move(*run.world.open_small());
    expect_lost(*store, run.content, {65'536 + 8192});
  }
}

// While one copy is left nothing is lost.
TEST(CodedRounds, OneCopyIsEnough) {
  Updated run;
  const auto images = images_of(run.world);
  for (const uint64_t number : {2U, 3U, 4U}) {
    const auto frames = frames_of(run.world, number);
    for (const FrameAt& left : frames) {
      put_back(run.world, images);
      spoil(run.world, frames, {left.shard});
      auto store = std::move(*run.world.open_small());
      EXPECT_EQ(store->info().read_only, "");
      EXPECT_TRUE(store->health().gone.empty());
      EXPECT_EQ(read_all(*store, "a"), run.content);
    }
  }
}

// A COMMIT tells of the VALs of its transaction.
TEST(CodedRounds, PartOfATransactionIsNotMissedSilently) {
  CodedWorld world(quiet(4, 2));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 250'000, 1);
    Bytes from = pattern(2 * kBlock, 7);
    auto change = std::move(*store->begin());
    for (const size_t at : {size_t{8192}, size_t{131'072}}) {
      ASSERT_OK(change->write("a", at, slice_of(from)).wait());
      std::memcpy(content.data() + at, from.data(), from.size());
    }
    ASSERT_OK(change->commit(Durability::durable).wait());
  }
  const auto frames = frames_of(world, 2);
  ASSERT_EQ(frames.size(), 4U);  // of two data chunks, and both in each parity's
  spoil(world, frames);
  expect_lost(**world.open_small(), content, {8192, 12'288, 131'072, 135'168});
  EXPECT_FALSE(check(world, 4, 2).problems.empty());
}

// What told of the record is damaged too: nobody knows which block it was.
TEST(CodedRounds, WhereItIsNotKnownWhatIsLostNothingIsWritten) {
  Updated run;
  for (const uint64_t number : {2U, 3U}) spoil(run.world, frames_of(run.world, number));
  auto store = std::move(*run.world.open_small());
  const std::string why = store->info().read_only;
  EXPECT_NE(why.find("records in the logs of"), std::string::npos) << why;
  ASSERT_FALSE(frames_of(run.world, 4).empty());
  EXPECT_NE(why.find("'d"), std::string::npos) << why;
  EXPECT_OK(read_block(*store, "a", 131'072, run.content));
  EXPECT_FALSE(read_block(*store, "a", 65'536 + 8192, run.content));
  store.reset();
  EXPECT_TRUE(tells(check(run.world, 4, 2).problems, "records in the logs of"));
  EXPECT_TRUE(tells(repair(run.world, 4, 2).problems, "records in the logs of"));
}

TEST(CodedRounds, ACommitThatIsDamagedInAllLogsIsTold) {
  CodedWorld world(quiet(2, 1));
  {
    auto store = std::move(*world.open_small());
    put(*store, "a", 120'000, 1);
    put(*store, "b", 120'000, 2);
    put(*store, "c", 120'000, 3);
  }
  const auto frames = frames_of(world, 2, true);
  ASSERT_EQ(frames.size(), 3U);
  spoil(world, frames);
  auto store = world.open_small();
  ASSERT_OK(store);
  EXPECT_NE((*store)->info().read_only.find("commit 2 is damaged in all logs"), std::string::npos)
      << (*store)->info().read_only;
  EXPECT_EQ((*store)->info().committed, 3U);
  store->reset();
  EXPECT_TRUE(tells(check(world, 2, 1).problems, "commit 2 is damaged in all logs"));
}

// Folders that are copied one after the other while a writer is at work: some are older than the
// others.
TEST(CodedRounds, CopiesOfDifferentMomentsAreNoStoreThatIsWhole) {
  CodedWorld world(quiet(4, 2));
  auto store = std::move(*world.open_small());
  Bytes content = put(*store, "a", 250'000, 1);
  update(*store, "a", content, 8192, kBlock, 2);
  const auto early = images_of(world);
  for (uint64_t i = 0; i < 12; ++i)
    update(*store, "a", content, 12'288 + i % 3 * kBlock, kBlock, 3 + i);
  update(*store, "a", content, 131'072, kBlock, 20);
  auto late = images_of(world);
  std::set<size_t> on;
  for (const FrameAt& frame : frames_of(world, 5)) on.insert(frame.shard);
  ASSERT_EQ(on.size(), 3U);
  store.reset();
  for (const size_t shard : on) late[world.paths()[shard]] = early.at(world.paths()[shard]);
  put_back(world, late);
  EXPECT_FALSE(check(world, 4, 2).problems.empty());
  auto opened = world.open_small();
  ASSERT_OK(opened);
  const std::string why = (*opened)->info().read_only;
  EXPECT_NE(why.find("or these are older copies"), std::string::npos) << why;
}

// What programs before the rounds wrote.
TEST(CodedRounds, AStoreOfAnOlderVersionOpensAndIsOfThisOneThen) {
  Updated run;
  for (const std::string& path : run.world.paths()) {
    SimImage image = run.world.disk().image(path);
    for (const uint64_t at : kSuperblockAt) {
      Bytes sector(kSuperblockBytes);
      image.read(at, sector);
      sector[8] = std::byte{2};
      const uint32_t crc = crc32c(sector.data(), sector.size() - 4);
      std::memcpy(sector.data() + sector.size() - 4, &crc, 4);
      image.write(at, sector);
    }
    run.world.disk().put(path, image);
  }
  EXPECT_EQ(read_all(**run.world.open_small(true), "a"), run.content);
  EXPECT_EQ(read_all(**run.world.open_small(), "a"), run.content);
  Bytes sector(kSuperblockBytes);
  run.world.disk().image("d0").read(0, sector);
  EXPECT_EQ(sector[8], std::byte{4});
}

// A log that has no room for all that is to be told at once tells it with the next rounds.
TEST(CodedRounds, NothingIsToldTwiceAndNothingLeftOut) {
  Shape shape;
  shape.segment_bytes = 8 * 1024;
  Rounds rounds;
  std::vector<ValRef> vals;
  for (Stamp stamp = 1; stamp <= 60; ++stamp) {
    vals.push_back(std::make_shared<Val>(Val{stamp, 1, 0, stamp, {7}, {}, {}, nullptr}));
    rounds.add(vals.back());
  }
  vals[3].reset();  // not needed any more
  std::vector<Stamp> told;
  for (int i = 0; i < 10; ++i) {
    EXPECT_LE(rounds.item_bytes(shape), 1024U);
    const RoundItem item = rounds.begin(shape, 5);
    EXPECT_EQ(item.round, static_cast<uint64_t>(i + 1));
    FrameBuilder frame;
    frame.add(item);
    EXPECT_EQ(frame.bytes(), kBlock);
    for (const ValItem& val : item.vals) told.push_back(val.stamp);
    rounds.end({});
  }
  std::vector<Stamp> all;
  for (Stamp stamp = 1; stamp <= 60; ++stamp) {
    if (stamp != 4) all.push_back(stamp);
  }
  EXPECT_EQ(told, all);
  for (const ValRef& val : vals) EXPECT_TRUE(!val || val->told);
}

TEST(CodedRounds, OnlyWhatNobodyTellsOfIsHidden) {
  Shape shape;
  shape.k = 2;
  shape.m = 1;
  shape.shards = 4;
  const std::vector<uint64_t> from(4, 0);
  // Rounds 1, 3 and 5 on shards 0, 1 and 2; 2 and 4 on 1, 2 and 3.
  const auto found = [&](const std::set<std::pair<size_t, uint64_t>>& damaged) {
    FoundRounds rounds;
    for (size_t shard = 0; shard < 4; ++shard) {
      std::vector<FoundRounds::Frame> frames;
      uint64_t nth = 0;
      for (uint64_t round = 1; round <= 5; ++round) {
        const ShardSet on = round % 2 == 1 ? 7 : 14;
        if ((on & shard_bit(shard)) == 0) continue;
        if (!damaged.contains({shard, round})) {
          frames.push_back({nth * kBlock, (nth + 1) * kBlock, nth, round});
          RoundItem item;
          item.round = round;
          for (uint64_t i = 0; i + 1 < round; ++i)
            item.shards[i] = (round - 1 - i) % 2 == 1 ? 7 : 14;
          rounds.tell(item);
        }
        ++nth;
      }
      rounds.take(shard, frames);
    }
    return rounds;
  };
  EXPECT_EQ(found({}).hiding(shape, 15, from), 0U);
  EXPECT_EQ(found({{0, 3}, {1, 3}, {2, 3}}).hiding(shape, 15, from), 0U) << "round 4 tells it";
  EXPECT_EQ(found({{0, 3}, {1, 3}, {2, 3}, {1, 4}, {2, 4}, {3, 4}}).hiding(shape, 15, from), 7U)
      << "round 4 is gone, too";
  EXPECT_EQ(found({{0, 3}, {1, 4}, {2, 4}, {3, 4}}).hiding(shape, 15, from), 0U)
      << "two shards have round 3";
  EXPECT_EQ(found({{1, 4}, {2, 4}, {3, 4}, {0, 5}, {1, 5}, {2, 5}}).hiding(shape, 15, from), 0U)
      << "as if 4 and 5 had never been";
}

}  // namespace
}  // namespace stoker::coded
