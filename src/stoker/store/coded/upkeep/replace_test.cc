// Shards that are made anew in the place of lost ones, and rebuilt.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>

#include "stoker/store/coded/coded_store.h"
#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

Result<std::unique_ptr<CodedStore>> open_replacing(CodedWorld& world,
                                                   const std::vector<size_t>& shards) {
  StoreOptions options;
  for (const size_t shard : shards) options.replace.push_back(world.paths()[shard]);
  return world.open_coded(options);
}

// Three lost for good, three new disks, then any other three lost: all is there.
TEST(CodedReplace, ANewDiskIsRebuiltFromTheOthersAndThenCounts) {
  CodedWorld world(quiet(4, 2));
  Bytes a, b;
  {
    auto store = std::move(*world.open_small());
    a = put(*store, "a", 700'000, 1);
    b = put(*store, "b", 100'000, 2);
    update(*store, "a", a, 70'000, 30'000, 3);
    ASSERT_OK(store->fold_all().wait());
  }
  for (const size_t lost : {1U, 4U}) world.disk().remove(world.paths()[lost]);
  {
    auto store = std::move(*open_replacing(world, {1, 4}));
    EXPECT_EQ(store->health().troubles.size(), 2U) << "new disks do not count yet";
    update(*store, "a", a, 4096, 8192, 4);  // is in the logs when they are admitted
    ASSERT_OK(store->repair().wait());
    EXPECT_TRUE(store->health().troubles.empty());
    EXPECT_GT(store->health().rebuilt_bytes, 200'000U);
    EXPECT_EQ(read_all(*store, "a"), a);
    update(*store, "b", b, 0, 4096, 5);
  }
  for (const size_t lost : {0U, 3U}) world.disk().remove(world.paths()[lost]);
  auto store = std::move(*world.open_small());
  EXPECT_EQ(read_all(*store, "a"), a);
  EXPECT_EQ(read_all(*store, "b"), b);
}

TEST(CodedReplace, NothingIsMadeUnasked) {
  CodedWorld world(quiet(4, 2));
  {
    auto store = std::move(*world.open_small());
    put(*store, "a", 300'000, 1);
  }
  // a blank disk in its place
  world.disk().put(world.paths()[2], SimImage(world.disk().image(world.paths()[2]).bytes()));
  auto store = std::move(*world.open_small());
  ASSERT_OK(store->repair().wait());
  EXPECT_EQ(store->health().troubles.size(), 1U);
  Bytes head(65536);
  world.disk().image(world.paths()[2]).read(0, head);
  EXPECT_TRUE(
      std::all_of(head.begin(), head.end(), [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST(CodedReplace, WhatHoldsDataOrIsNotNamedIsRefused) {
  CodedWorld world(quiet(4, 2));
  {
    auto store = std::move(*world.open_small());
    put(*store, "a", 300'000, 1);
  }
  SimImage image = world.disk().image(world.paths()[2]);
  const SimImage whole = image;
  Bytes zeros(65536);
  image.write(0, zeros);  // a head that is blank, over slots that are not
  world.disk().put(world.paths()[2], image);
  const auto data = open_replacing(world, {2});
  ASSERT_FALSE(data);
  EXPECT_EQ(data.error().code, Code::mismatch);
  EXPECT_NE(data.error().what.find("holds data that is not a shard"), std::string::npos)
      << data.error().what;
  StoreOptions options;
  options.replace = {"elsewhere"};
  const auto other = world.open_coded(options);
  ASSERT_FALSE(other);
  EXPECT_NE(other.error().what.find("not a shard of this store"), std::string::npos)
      << other.error().what;
  // One that is there stays as it is.
  world.disk().put(world.paths()[2], whole);
  auto store = open_replacing(world, {2});
  ASSERT_OK(store);
  EXPECT_EQ((*store)->health().troubles.size(), 1U) << "it missed the epochs of the attempts above";
  ASSERT_OK((*store)->repair().wait());
  EXPECT_TRUE((*store)->health().troubles.empty());
  EXPECT_EQ((*store)->health().rebuilt_bytes, 0U) << "nothing was written meanwhile";
  // Without enough shards nothing is made.
  store->reset();
  for (const size_t lost : {0U, 1U, 3U}) world.disk().remove(world.paths()[lost]);
  const auto few = open_replacing(world, {0});
  ASSERT_FALSE(few);
  EXPECT_EQ(few.error().code, Code::read_only);
  EXPECT_EQ(world.disk().image(world.paths()[0]).bytes(), 0U);
}

// A power cut after any number of transfers of replacing, rebuilding and admitting; what comes next
// goes on, and every acknowledged byte is there without any two shards.
TEST(CodedReplace, APowerCutAtAnyMomentOfItLosesNothing) {
  CodedWorld world(quiet(3, 2));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 400'000, 1);
    update(*store, "a", content, 8192, 8192, 2);
    ASSERT_OK(store->fold_all().wait());
    update(*store, "a", content, 12'288, 8192, 3);
  }
  const auto images = images_of(world);
  size_t cases = 0;
  size_t went_on = 0;
  for (uint64_t transfers = 1;; transfers += 1 + transfers / 24) {
    put_back(world, images);
    world.disk().remove(world.paths()[1]);
    world.disk().cut_power_after(transfers, transfers);
    bool done = false;
    Bytes now = content;
    {
      auto store = open_replacing(world, {1});
      if (store) {
        done = (*store)->repair().wait() && (*store)->health().troubles.empty();
      }
    }
    world.disk().restore_power();
    ++cases;
    {
      // Alone, what was made so far is no reason to serve anything; with the others it is stale or
      // whole.
      auto store = open_replacing(world, {1});
      ASSERT_OK(store) << "after " << transfers;
      ASSERT_EQ(read_all(**store, "a"), now) << "after " << transfers;
      went_on += (*store)->health().troubles.empty() ? 0 : 1;
      update(**store, "a", now, 100'000, 9'000, 40 + transfers);
      ASSERT_OK((*store)->repair().wait());
      ASSERT_TRUE((*store)->health().troubles.empty())
          << transfers << ": " << (*store)->health().troubles[0];
    }
    for (const size_t lost : {transfers % 5, (transfers + 2) % 5}) {
      if (lost != 1) world.disk().remove(world.paths()[lost]);
    }
    auto store = world.open_small();
    ASSERT_OK(store) << transfers;
    ASSERT_EQ(read_all(**store, "a"), now) << "after " << transfers;
    if (done) break;
    ASSERT_LT(transfers, 20'000U);
  }
  EXPECT_GT(cases, 60U);
  EXPECT_GT(went_on, 40U);
  RecordProperty("cases", static_cast<int>(cases));
}

// The same while its file is made: it is not there then, or empty, or blank, and replacing it goes
// on.
TEST(CodedReplace, APowerCutWhileTheFileIsMadeLosesNothing) {
  CodedWorld world(quiet(3, 2));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 400'000, 1);
  }
  const auto images = images_of(world);
  const std::string& path = world.paths()[1];
  const uint64_t whole = images.at(path).bytes();
  std::set<uint64_t> left;
  for (uint64_t step = 0; step < 3; ++step) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      put_back(world, images);
      world.disk().remove(path);
      world.disk().cut_power_after(step, seed, path);
      ASSERT_FALSE(open_replacing(world, {1}));
      world.disk().cut_power(seed);
      world.disk().restore_power();
      left.insert(world.disk().image(path).bytes());
      {
        auto store = std::move(*world.open_small());
        ASSERT_EQ(read_all(*store, "a"), content);
        ASSERT_EQ(store->health().troubles.size(), 1U) << "nobody asked for it this time";
      }
      {
        auto store = open_replacing(world, {1});
        ASSERT_OK(store) << "step " << step << ", seed " << seed;
        ASSERT_OK((*store)->repair().wait());
        ASSERT_TRUE((*store)->health().troubles.empty());
      }
      ASSERT_EQ(world.disk().image(path).bytes(), whole);
      for (const size_t lost : {0U, 3U}) world.disk().remove(world.paths()[lost]);
      auto store = std::move(*world.open_small());
      ASSERT_EQ(read_all(*store, "a"), content);
    }
  }
  EXPECT_EQ(left, (std::set<uint64_t>{0, whole}));  // 0: also where there is none
}

// A new disk that was never admitted knows nothing: it does not help old ones to pass for the
// newest state.
TEST(CodedReplace, ANewDiskIsNoWitness) {
  CodedWorld world(quiet(4, 2));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 300'000, 1);
  }
  const auto old = images_of(world);
  {  // 0 and 1 are away while the others go on
    for (const size_t away : {0U, 1U}) world.disk().remove(world.paths()[away]);
    auto store = std::move(*world.open_small());
    update(*store, "a", content, 0, 50'000, 2);
  }
  // Disk 2 is lost for good just then, and its place made anew by somebody who has all others, up
  // to the first superblock.
  for (const size_t away : {0U, 1U})
    world.disk().put(world.paths()[away], old.at(world.paths()[away]));
  world.disk().remove(world.paths()[2]);
  {
    auto store = open_replacing(world, {2});
    ASSERT_FALSE(store) << "three current shards of six are too few to write to";
  }
  // The same by hand: a superblock of epoch 0 of this store.
  SimImage made(old.at(world.paths()[2]).bytes());
  Bytes head(4096);
  old.at(world.paths()[2]).read(0, head);
  Superblock super = **decode_superblock(head);
  super.confirmed = super.proposed = {};
  super.incarnation ^= 1;
  const std::string bytes = encode_superblock(super);
  made.write(0, std::as_bytes(std::span(bytes)));
  world.disk().put(world.paths()[2], made);
  for (size_t i = 3; i < 6; ++i) world.disk().remove(world.paths()[i]);
  EXPECT_EQ(code_of(world.open_small(true)), Code::not_found)
      << "two old shards and a new one cannot tell what was written last";
}

// Commits go on while a shard is rebuilt, also such that write whole stripes; at the end it has
// them all.
TEST(CodedReplace, WhatIsWrittenMeanwhileIsOnTheNewDiskToo) {
  CodedWorldOptions options = quiet(4, 2);
  options.segments = 6;
  CodedWorld world(options);
  Bytes a, b;
  {
    auto store = std::move(*world.open_small());
    a = put(*store, "a", 1'500'000, 1);
  }
  world.disk().remove(world.paths()[3]);
  {
    auto store = std::move(*open_replacing(world, {3}));
    auto repaired = store->repair();
    for (uint64_t i = 0; i < 60; ++i) {
      update(*store, "a", a, (i * 37 % 300) * 4096, 4096, 100 + i);
      if (i % 10 == 5) b = put(*store, "b", 300'000, i);
    }
    ASSERT_OK(repaired.wait());
    EXPECT_TRUE(store->health().troubles.empty());
  }
  for (const size_t lost : {0U, 5U}) world.disk().remove(world.paths()[lost]);
  auto store = std::move(*world.open_small());
  EXPECT_EQ(read_all(*store, "a"), a);
  EXPECT_EQ(read_all(*store, "b"), b);
}

// Whoever writes so much that the logs are folded all the time does not keep the new disk away for
// ever.
TEST(CodedReplace, FoldsAllTheTimeDoNotKeepANewDiskAway) {
  CodedWorldOptions options = quiet(4, 2);
  options.segment_bytes = 128 << 10;
  options.segments = 4;
  CodedWorld world(options);
  Bytes a;
  {
    auto store = std::move(*world.open_small());
    a = put(*store, "a", 2'621'440, 1);
  }
  world.disk().remove(world.paths()[3]);
  {
    auto store = std::move(*open_replacing(world, {3}));
    auto repaired = store->repair();
    uint64_t updates = 0;
    for (; !repaired.ready() && updates < 3000; ++updates)
      ASSERT_NO_FATAL_FAILURE(
          update(*store, "a", a, updates * 211 % 640 * 4096, 4096, 100 + updates));
    ASSERT_TRUE(repaired.ready()) << "not after " << updates << " updates";
    ASSERT_OK(repaired.wait());
    EXPECT_TRUE(store->health().troubles.empty());
    for (; updates < 600; ++updates)
      ASSERT_NO_FATAL_FAILURE(
          update(*store, "a", a, updates * 211 % 640 * 4096, 4096, 100 + updates));
  }
  for (const size_t lost : {0U, 5U}) world.disk().remove(world.paths()[lost]);
  auto store = std::move(*world.open_small());
  EXPECT_EQ(read_all(*store, "a"), a);
}

// With more shards than chunks the stripes differ in what they have lost: those that have lost most
// come first.
TEST(CodedReplace, WhatHasTheFewestSurvivorsComesFirst) {
  CodedWorldOptions options = quiet(2, 2);
  options.shards = 6;
  CodedWorld world(options);
  {
    auto store = std::move(*world.open_small());
    for (uint64_t i = 0; i < 12; ++i) put(*store, "o" + std::to_string(i), 100'000, i);
  }
  for (const size_t lost : {1U, 4U}) world.disk().remove(world.paths()[lost]);
  auto store = std::move(*open_replacing(world, {1, 4}));
  world.disk().start_recording();
  ASSERT_OK(store->repair().wait());
  // The stripes on both new disks are rebuilt on the first of them before any other: each is told
  // by the id in the first header page that is written.
  std::vector<uint64_t> order;
  std::string first_path;
  for (const SimEvent& event : world.disk().stop_recording()) {
    if (event.kind != SimEvent::Kind::write || event.bytes->size() != 4096 ||
        std::memcmp(event.bytes->data(), "SKH1", 4) != 0)
      continue;
    if (first_path.empty()) first_path = event.path;
    if (event.path != first_path) continue;
    uint64_t id = 0;
    std::memcpy(&id, event.bytes->data() + 8, 8);
    if (std::find(order.begin(), order.end(), id) == order.end()) order.push_back(id);
  }
  Shape shape;
  shape.k = shape.m = 2;
  shape.shards = 6;
  std::vector<bool> both;
  for (const uint64_t id : order) {
    const auto shards = placement(shape, id);
    both.push_back(std::count(shards.begin(), shards.end(), 1) +
                       std::count(shards.begin(), shards.end(), 4) ==
                   2);
  }
  EXPECT_TRUE(std::is_sorted(both.rbegin(), both.rend())) << "those on both disks first";
  EXPECT_GT(std::count(both.begin(), both.end(), true), 0);
  EXPECT_GT(std::count(both.begin(), both.end(), false), 0);
}

// Sectors of log, table, superblock and slots that cannot be read do not keep a shard away for
// good.
TEST(CodedReplace, AShardWithUnreadableSectorsComesBack) {
  for (uint64_t nth = 1; nth <= 40; nth += 2) {
    CodedWorld world(quiet(4, 2));
    Bytes content;
    {
      auto store = std::move(*world.open_small());
      content = put(*store, "a", 300'000, 1);
      update(*store, "a", content, 8192, 8192, 2);
    }
    world.disk().fail_nth(Op::Kind::read, nth, EIO, world.paths()[nth % 6]);
    auto store = std::move(*world.open_small());
    EXPECT_EQ(read_all(*store, "a"), content) << nth;
    ASSERT_OK(store->repair().wait());
    EXPECT_TRUE(store->health().troubles.empty()) << nth;
    world.disk().fail_nth(Op::Kind::read, nth % 5 + 1, EIO, world.paths()[(nth + 1) % 6]);
    update(*store, "a", content, 70'000, 9'000, 3);
    ASSERT_OK(store->repair().wait());
    EXPECT_EQ(read_all(*store, "a"), content) << nth;
  }
}

TEST(CodedPace, WaitsForWhatAStepMovedAndForgetsItWhenNobodyIsKeptWaiting) {
  VirtualClock clock;
  clock.advance_to(1'000'000'000);
  Pace pace(0, 1'000'000, clock);  // 1 MB/s while the store is used
  EXPECT_EQ(pace.wait_ns(), 0U);
  pace.spend(50'000'000);
  EXPECT_EQ(pace.wait_ns(), 0U) << "nobody uses it";
  pace.used();
  EXPECT_EQ(pace.wait_ns(), 0U);
  pace.spend(50'000);
  EXPECT_NEAR(static_cast<double>(pace.wait_ns()), 50e6, 1e3);
  clock.advance_to(1'000'000'000 + 25'000'000);
  EXPECT_NEAR(static_cast<double>(pace.wait_ns()), 25e6, 1e3);
  clock.advance_to(1'000'000'000 + 51'000'000);
  EXPECT_EQ(pace.wait_ns(), 0U);
  pace.spend(10'000'000);
  clock.advance_to(1'000'000'000 + 300'000'000);
  EXPECT_EQ(pace.wait_ns(), 0U) << "not used for a while: at once";
  Pace capped(2'000'000, 1'000'000, clock);
  capped.spend(2'000'000);
  EXPECT_NEAR(static_cast<double>(capped.wait_ns()), 1e9, 1e3);
  capped.used();
  EXPECT_NEAR(static_cast<double>(capped.wait_ns()), 2e9, 1e3);
}

}  // namespace
}  // namespace stoker::coded
