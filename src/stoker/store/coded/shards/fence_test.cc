// Opening to write fences the shards before it reads what counts, and ends the writer before it.
#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "stoker/base/crc32c.h"
#include "stoker/codec/erasure.h"
#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

// That is stored on it, in both copies alike.
Fence fence_on(CodedWorld& world, const std::string& path) {
  std::set<std::pair<uint64_t, uint64_t>> found;
  for (const uint64_t at : kFenceAt) {
    Bytes block(kBlock);
    world.disk().image(path).read(at, block);
    const auto fence = decode_fence(block);
    if (fence) found.insert({fence->number, fence->writer});
    if (!fence) found.insert({0, 0});
  }
  EXPECT_EQ(found.size(), 1U) << path;
  return {found.begin()->first, found.begin()->second};
}

// The higher of its copies, after a crash.
uint64_t higher_on(CodedWorld& world, const std::string& path) {
  uint64_t highest = 0;
  for (const uint64_t at : kFenceAt) {
    Bytes block(kBlock);
    world.disk().image(path).read(at, block);
    if (const auto fence = decode_fence(block)) highest = std::max(highest, fence->number);
  }
  return highest;
}

// As a program left it that knew no fence.
void make_old(CodedWorld& world, const std::string& path) {
  SimImage image = world.disk().image(path);
  for (const uint64_t at : kFenceAt) image.write(at, Bytes(kBlock));
  for (const uint64_t at : kSuperblockAt) {
    Bytes sector(kSuperblockBytes);
    image.read(at, sector);
    sector[8] = std::byte{3};
    const uint32_t crc = crc32c(sector.data(), kSuperblockBytes - 4);
    std::memcpy(sector.data() + kSuperblockBytes - 4, &crc, 4);
    image.write(at, sector);
  }
  world.disk().put(path, image);
}

TEST(CodedFence, EachWriterFencesAllShardsByOneMore) {
  CodedWorld world(quiet(2, 1));
  Bytes content;
  std::set<uint64_t> writers;
  for (uint64_t opened = 1; opened <= 3; ++opened) {
    auto store = std::move(*world.open_small());
    if (opened == 1) content = put(*store, "a", 120'000, 1);
    EXPECT_EQ(read_all(*store, "a"), content);
    for (const std::string& path : world.paths()) {
      EXPECT_EQ(fence_on(world, path).number, opened);
      writers.insert(fence_on(world, path).writer);
    }
    EXPECT_EQ(writers.size(), opened);
  }
  EXPECT_EQ(read_all(**world.open_small(true), "a"), content);
  EXPECT_EQ(fence_on(world, world.paths()[0]).number, 3U) << "a reader fences nobody";
}

TEST(CodedFence, AStoreOfAProgramWithoutFencesGetsItsFirst) {
  CodedWorld world(quiet(2, 1));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 120'000, 1);
  }
  for (const std::string& path : world.paths()) make_old(world, path);
  EXPECT_EQ(read_all(**world.open_small(true), "a"), content);
  auto store = std::move(*world.open_small());
  EXPECT_EQ(read_all(*store, "a"), content);
  update(*store, "a", content, 4096, 4096, 2);
  for (const std::string& path : world.paths()) {
    EXPECT_EQ(fence_on(world, path).number, 1U);
    for (const uint64_t at : kSuperblockAt) {
      Bytes sector(kSuperblockBytes);
      world.disk().image(path).read(at, sector);
      EXPECT_EQ(sector[8], std::byte{4}) << "a program that knows no fence refuses it";
    }
  }
}

// One that was away counts for the fences as soon as it is back, and one whose copies are damaged
// does without.
TEST(CodedFence, TheHighestOfAllThatAreThereCounts) {
  CodedWorld world(quiet(2, 1));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 120'000, 1);
  }
  AlignedBytes high(kBlock);
  encode_fence({77, 5}, high.span());
  SimImage image = world.disk().image("d1");
  image.write(kFenceAt[1], high.span());
  world.disk().put("d1", image);
  world.disk().flip("d2", kFenceAt[0] + 9, 3);
  world.disk().spoil("d2", kFenceAt[1]);
  auto store = std::move(*world.open_small());
  EXPECT_EQ(read_all(*store, "a"), content);
  EXPECT_TRUE(store->health().troubles.empty());
  for (const std::string& path : world.paths()) EXPECT_EQ(fence_on(world, path).number, 78U);
}

TEST(CodedFence, AShardThatCannotBeFencedIsMissing) {
  CodedWorld world(quiet(2, 1));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 120'000, 1);
  }
  world.disk().fail_nth(Op::Kind::write, 1, EIO, "d1");
  auto store = std::move(*world.open_small());
  EXPECT_EQ(read_all(*store, "a"), content);
  ASSERT_EQ(store->health().troubles.size(), 1U);
  EXPECT_NE(store->health().troubles[0].find("'d1' cannot be fenced"), std::string::npos)
      << store->health().troubles[0];
  EXPECT_EQ(fence_on(world, "d0").number, 2U);
}

// Two of three disks can only be read: a writer gets no store, a reader gets all.
TEST(CodedFence, DisksThatTakeNoWritesAreStillRead) {
  CodedWorld world(quiet(2, 1));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 120'000, 1);
  }
  for (const std::string path : {"d0", "d1"})
    world.disk().fail_nth(Op::Kind::write, 1, EROFS, path);
  const auto refused = world.open_small();
  ASSERT_FALSE(refused);
  const std::string& why = refused.error().what;
  for (const std::string told : {"open it read-only", "'d0' cannot be fenced", "'d1' cannot be"})
    EXPECT_NE(why.find(told), std::string::npos) << why;
  EXPECT_EQ(why.find("'d2'"), std::string::npos) << why;
  EXPECT_EQ(read_all(**world.open_small(true), "a"), content);
  auto store = std::move(*world.open_small());
  EXPECT_EQ(read_all(*store, "a"), content);
  EXPECT_TRUE(store->health().troubles.empty());
  EXPECT_EQ(fence_on(world, "d0").number, 3U);
}

// What was read before the fences may be older than what a writer left by then.
TEST(CodedFence, SuperblocksAreReadAgainBehindTheFences) {
  CodedWorld world(quiet(2, 1));
  const Bytes content = put(**world.open_small(), "a", 120'000, 1);
  Bytes older(kBlock);
  world.disk().image("d1").read(kSuperblockAt[0], older);
  { ASSERT_OK(world.open_small()); }
  SimImage image = world.disk().image("d1");
  image.write(kSuperblockAt[0], older);
  world.disk().put("d1", image);
  // Its first look sees that copy alone: a reader takes the shard for one that was left behind.
  constexpr uint64_t kNewer = 1 + kSuperblockAt[1] / kBlock;
  world.disk().fail_nth(Op::Kind::read, kNewer, EIO, "d1");
  EXPECT_FALSE((*world.open_small(true))->health().troubles.empty());
  world.disk().fail_nth(Op::Kind::read, kNewer, EIO, "d1");
  auto store = std::move(*world.open_small());
  EXPECT_TRUE(store->health().troubles.empty());
  EXPECT_EQ(read_all(*store, "a"), content);
}

// Wherever a crash comes between the first fence and the first commit, the next opening goes on.
TEST(CodedFence, ACrashWhileItOpensIsBorne) {
  CodedWorld world(quiet(2, 1));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 120'000, 1);
    update(*store, "a", content, 8192, 8192, 2);
  }
  const auto images = images_of(world);
  size_t failed = 0, before_all = 0;
  for (uint64_t changes = 0; changes < 16; ++changes) {
    put_back(world, images);
    world.disk().cut_power_after_changes(changes, changes);
    failed += world.open_small() ? 0 : 1;
    world.disk().cut_power(changes);
    world.disk().restore_power();
    size_t fenced = 0;
    for (const std::string& path : world.paths()) fenced += higher_on(world, path) == 2 ? 1 : 0;
    before_all += fenced > 0 && fenced < world.paths().size() ? 1 : 0;
    auto store = std::move(*world.open_small());
    EXPECT_EQ(read_all(*store, "a"), content) << changes;
    EXPECT_TRUE(store->health().troubles.empty()) << changes;
    for (const std::string& path : world.paths())
      EXPECT_EQ(fence_on(world, path).number, fenced > 0 ? 3U : 2U) << changes;
  }
  EXPECT_GT(failed, 8U);
  EXPECT_GT(before_all, 2U) << "some but not all were fenced";
}

// A store that is made is fenced before it has a superblock: a crash there leaves blank shards.
TEST(CodedFence, ACrashWhileItIsMadeIsBorne) {
  for (uint64_t changes = 0; changes < 12; ++changes) {
    CodedWorld world(quiet(2, 1));
    world.disk().cut_power_after_changes(changes, changes);
    EXPECT_FALSE(world.open_small()) << changes;
    world.disk().cut_power(changes);
    world.disk().restore_power();
    auto opened = world.open_small();
    ASSERT_OK(opened) << changes;
    const Bytes content = put(**opened, "a", 120'000, 1);
    EXPECT_EQ(read_all(**opened, "a"), content) << changes;
  }
}

// Fenced by another, it drops no shard for it and changes no epoch: it writes no more, and says
// why.
TEST(CodedFence, AnotherWritersFenceEndsThisOne) {
  CodedWorld world(quiet(2, 1));
  { ASSERT_OK(world.open_small()); }
  CodedOptions coded;
  coded.files = false;
  const Runtime& runtime = world.runtime().runtime();
  auto shards = std::move(*Shards::open({2, 1, world.paths()}, runtime, {}, coded));
  const auto code = std::move(*codec::ErasureCode::make(2, 1));
  CommittedMap map(shards->shape(), ClassTree::shipped(), runtime.budget, "coded(2+1, d{0..2})");
  SpareMemory spare(runtime.budget);
  Reader reader(map, *shards, code, runtime.budget, spare);
  LogSet logs(map, *shards, reader);
  map.lock()->live = shards->present();
  ASSERT_OK(logs.flush(shards->present()));
  ASSERT_OK((*shards)[1].shard->fence({shards->fence().number + 1, 5}));
  const auto superblocks = [&] {
    Bytes all;
    for (const std::string& path : world.paths()) {
      for (const uint64_t at : kSuperblockAt) {
        Bytes sector(kSuperblockBytes);
        world.disk().image(path).read(at, sector);
        all.insert(all.end(), sector.begin(), sector.end());
      }
    }
    return all;
  };
  const Bytes before = superblocks();
  const Status flushed = logs.flush(shards->present());
  ASSERT_FALSE(flushed);
  EXPECT_NE(flushed.error().what.find("another writer has opened"), std::string::npos)
      << flushed.error().what;
  EXPECT_FALSE(logs.change_epoch(shards->present()));
  EXPECT_EQ(superblocks(), before);
  EXPECT_EQ(map.live(), shards->present());
  ASSERT_TRUE(map.refused());
  EXPECT_EQ(map.refused()->code, Code::read_only);
}

}  // namespace
}  // namespace stoker::coded
