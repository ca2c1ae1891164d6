// Classes of objects: where they come from, what they decide, and that nothing but speed depends on
// them.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "stoker/base/crc32c.h"
#include "stoker/store/coded/coded_store.h"
#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

constexpr std::array<Class, 3> kEach = {Class::read_only, Class::write_only, Class::read_write};

void state(Store& store, const std::string& key, Class expected) {
  auto change = std::move(*store.begin());
  ASSERT_OK(change->expect(key, expected));
  ASSERT_OK(change->commit(Durability::durable).wait());
}

std::optional<Class> expected(Store& store, const std::string& key) {
  const auto info = store.stat(key);
  EXPECT_OK(info);
  return info ? info->expected : std::nullopt;
}

// Of so many seconds at most; the background does not say when it is done.
template <typename Condition>
bool comes(Condition condition) {
  for (int i = 0; i < 60'000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return false;
}

TEST(CodedClass, WhatWasStatedIsKept) {
  // says nothing when objects are made
  const auto tree = ClassTree::parse(R"({"nodes": [{"class": "read_write"}]})");
  ASSERT_OK(tree);
  CodedWorldOptions options = quiet(4, 2);
  options.tree = &*tree;
  CodedWorld world(options);
  {
    auto store = std::move(*world.open_small());
    for (const Class each : kEach) {
      const std::string key = "x/" + std::string(kClasses[static_cast<size_t>(each)]);
      put(*store, key, 100'000, 1);
      EXPECT_EQ(expected(*store, key), Class::read_write)
          << "as nothing is known but that it was written";
      state(*store, key, each);
      EXPECT_EQ(expected(*store, key), each);
    }
    put(*store, "y", 100'000, 1);
    auto change = std::move(*store->begin());
    EXPECT_EQ(code_of(change->expect("none", Class::read_only)), Code::not_found);
  }
  {
    auto store = std::move(*world.open_small());  // from a COMMIT, or the image that opening wrote
    for (const Class each : kEach)
      EXPECT_EQ(expected(*store, "x/" + std::string(kClasses[static_cast<size_t>(each)])), each);
    EXPECT_EQ(expected(*store, "y"), std::nullopt);
  }
  auto store = std::move(*world.open_small());
  EXPECT_EQ(expected(*store, "x/read_only"), Class::read_only);
  EXPECT_EQ(store->list("x/", "")->at(0).expected, Class::read_only);
  auto change = std::move(*store->begin());
  ASSERT_OK(change->remove("x/read_only"));
  ASSERT_OK(change->commit(Durability::durable).wait());
  put(*store, "x/read_only", 5'000, 2);
  EXPECT_EQ(expected(*store, "x/read_only"), Class::read_write) << "another object of that name";
}

// The tree says it twice; the image keeps it.
TEST(CodedClass, WhatWasLearntIsKeptWithTheTable) {
  const auto tree = ClassTree::parse(R"({"nodes": [{"class": "read_only"}]})");
  ASSERT_OK(tree);
  CodedWorldOptions options = quiet(2, 1);
  options.tree = &*tree;
  CodedWorld world(options);
  {
    auto store = std::move(*world.open_small());
    put(*store, "a", 100'000, 1);
    Bytes into(4096);
    for (uint64_t i = 0; i < 2 * ClassTable::kWindow; ++i)
      ASSERT_OK(store->read("a", i % 20 * 4096, slice_of(into), {}).wait());
    EXPECT_EQ(expected(*store, "a"), Class::read_only);
    ASSERT_OK(store->fold_all().wait());  // writes an image
  }
  EXPECT_EQ(expected(**world.open_small(), "a"), Class::read_only);
}

// Before anything was done with it: by its name, and by what its folder's objects were for.
TEST(CodedClass, IsSaidWhenAnObjectIsMade) {
  const auto tree = ClassTree::parse(R"({"nodes": [{"class": "read_write"}], "created": [
    {"feature": "name_log", "threshold": 0.5, "left": 1, "right": 2},
      {"feature": "folder_read_only", "threshold": 0.5, "left": 3, "right": 4},
    {"class": "write_only"}, {"class": "read_write"}, {"class": "read_only"}]})");
  ASSERT_OK(tree);
  CodedWorldOptions options = quiet(4, 2);
  options.tree = &*tree;
  CodedWorld world(options);
  {
    auto store = std::move(*world.open_small());
    put(*store, "d/a", 100'000, 1);
    EXPECT_EQ(expected(*store, "d/a"), Class::read_write) << "nothing is known";
    state(*store, "d/a", Class::read_only);
    put(*store, "d/b", 100'000, 2);
    put(*store, "e/b", 100'000, 2);
    put(*store, "e/b.log", 5'000, 2);
    EXPECT_EQ(expected(*store, "d/b"), Class::read_only);
    EXPECT_EQ(expected(*store, "e/b"), Class::read_write);
    EXPECT_EQ(expected(*store, "e/b.log"), Class::write_only);
    state(*store, "e/b.log", Class::read_write);
    EXPECT_EQ(expected(*store, "e/b.log"), Class::read_write) << "whoever knows it says so";
    put(*store, "f/c.log", 5'000, 4);
  }
  EXPECT_EQ(expected(**world.open_small(true), "f/c.log"), Class::write_only)
      << "from its COMMIT: closing writes no image";
  auto store = std::move(*world.open_small());
  put(*store, "d/c", 100'000, 3);
  EXPECT_EQ(expected(*store, "d/c"), Class::read_only)
      << "a folder's history is what the table keeps of its objects";
}

// What a program before there were classes left: the same, but for the number in the superblock.
TEST(CodedClass, AStoreOfTheFirstVersionIsReadAndBecomesOneOfTheNewest) {
  CodedWorld world(quiet(4, 2));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 300'000, 1);
    update(*store, "a", content, 8192, 8192, 2);
  }
  const auto version_of = [&](const std::string& path, uint64_t at) {
    Bytes sector(kSuperblockBytes);
    world.disk().image(path).read(at, sector);
    return static_cast<int>(sector[8]);
  };
  for (const auto& path : world.paths()) {
    SimImage image = world.disk().image(path);
    for (const uint64_t at : kSuperblockAt) {
      Bytes sector(kSuperblockBytes);
      image.read(at, sector);
      EXPECT_EQ(static_cast<int>(sector[8]), 4);
      sector[8] = std::byte{1};
      const uint32_t crc = crc32c(sector.data(), kSuperblockBytes - 4);
      std::memcpy(sector.data() + kSuperblockBytes - 4, &crc, 4);
      image.write(at, sector);
    }
    world.disk().put(path, image);
  }
  EXPECT_EQ(read_all(**world.open_small(true), "a"), content);
  EXPECT_EQ(version_of(world.paths()[0], kSuperblockAt[0]), 1) << "a reader changes nothing";
  auto store = std::move(*world.open_small());
  EXPECT_EQ(expected(*store, "a"), std::nullopt);
  EXPECT_EQ(read_all(*store, "a"), content);
  state(*store, "a", Class::write_only);
  for (const auto& path : world.paths()) {
    for (const uint64_t at : kSuperblockAt) EXPECT_EQ(version_of(path, at), 4);
  }
}

// A chunk's worth of a stripe: logged where it is rewritten, else written anew at once.
TEST(CodedClass, DecidesWhatIsLogged) {
  CodedWorld world(quiet(4, 2));
  auto store = std::move(*world.open_small());
  std::map<Class, uint64_t> logged;
  for (const Class each : kEach) {
    const std::string key(kClasses[static_cast<size_t>(each)]);
    Bytes content = put(*store, key, 4 * 64 * kKiB, 1);
    state(*store, key, each);
    const uint64_t before = store->health().newer_blocks;
    update(*store, key, content, 64 * kKiB, 64 * kKiB, 2);
    logged[each] = store->health().newer_blocks - before;
    EXPECT_EQ(read_all(*store, key), content);
  }
  EXPECT_EQ(logged[Class::read_write], 16U);
  EXPECT_EQ(logged[Class::read_only], 0U);
  EXPECT_EQ(logged[Class::write_only], 0U);
}

TEST(CodedClass, DecidesWhatStaysInTheLog) {
  CodedWorldOptions options;  // with a background
  options.segment_bytes = 128 << 10;
  options.segments = 8;
  CodedWorld world(options);
  auto store = std::move(*world.open_small());
  std::map<std::string, Bytes> content;
  for (const Class each : kEach) {
    const std::string key(kClasses[static_cast<size_t>(each)]);
    content[key] = put(*store, key, 262'144, 1);
    state(*store, key, each);
  }
  // Small enough to be logged whatever it is; the background folds what will not be rewritten, and
  // that only.
  for (auto& [key, bytes] : content) update(*store, key, bytes, 8192, 8192, 2);
  ASSERT_TRUE(comes([&] { return store->health().newer_blocks == 2; }));
  EXPECT_EQ(store->health().folds, 2U);
  // More than half of the log, and needed there: what is rewritten goes, too.
  for (uint64_t i = 0; i < 70; ++i)
    update(*store, "read_write", content["read_write"], i % 64 * 4096, 4096, 10 + i);
  ASSERT_TRUE(comes([&] { return store->health().folds > 2; }));
  for (const auto& [key, bytes] : content) EXPECT_EQ(read_all(*store, key), bytes);
}

// A commit waits for the oldest of the log only, whatever its class: that is what its segments wait
// for.
TEST(CodedClass, AFullLogFoldsTheOldestFirst) {
  CodedWorldOptions options = quiet(2, 1);
  options.segment_bytes = 128 << 10;
  options.segments = 5;
  CodedWorld world(options);
  StoreOptions open;
  open.create = true;
  open.capacity_bytes = 32 << 20;
  open.chunk_bytes = 64 << 10;
  open.objects_max = 256;
  auto store = std::move(*world.open_coded(open));
  Bytes hot = put(*store, "hot", 120'000, 1);
  std::vector<Bytes> cold;
  constexpr size_t kCold = 100;
  for (size_t i = 0; i < kCold; ++i) {
    cold.push_back(put(*store, std::to_string(i), 5'000, i));
    state(*store, std::to_string(i), Class::write_only);
  }
  ASSERT_OK(store->fold_all().wait());
  const uint64_t before = store->health().folds;
  // the first segment; all that follow are of others
  for (uint64_t row = 0; row < 16; ++row) update(*store, "hot", hot, row * 4096, 4096, row);
  size_t updated = 0;
  for (; store->health().folds == before && updated < kCold; ++updated)
    update(*store, std::to_string(updated), cold[updated], 0, 4096, updated);
  EXPECT_GT(updated, 32U);
  EXPECT_LT(updated, kCold);
  EXPECT_LE(store->health().folds - before, 16U) << "one step";
  EXPECT_EQ(read_all(*store, "hot"), hot);
  for (size_t i = 0; i < kCold; ++i) EXPECT_EQ(read_all(*store, std::to_string(i)), cold[i]);
}

// Bounded, however many small writes a transaction has.
TEST(CodedClass, WritesAreRememberedInBoundedMemory) {
  StagedObject object;
  for (uint64_t i = 0; i < 100; ++i) object.wrote(i * 4096, 4096);
  object.wrote(0, 0);
  EXPECT_EQ(object.writes, (std::vector<std::pair<uint64_t, size_t>>{{0, 100 * 4096}}));
  for (uint64_t i = 0; i < 10'000; ++i) object.wrote(i % 2 == 0 ? 0 : 8192, 4096);
  EXPECT_EQ(object.writes.size(), StagedObject::kWritesMax);
  ScrubReport report;
  for (int i = 0; i < 150; ++i) report.lose("this");
  EXPECT_EQ(report.lost.size(), ScrubReport::kListed);
  EXPECT_EQ(report.unlisted, 50U);
}

// Stripes that are written once stand in the order in which they came on each shard, whatever is
// rewritten in between.
TEST(CodedClass, DecidesWhereStripesStand) {
  Shape shape;
  shape.k = 2;
  shape.m = 1;
  shape.shards = 3;
  shape.slots = 64;
  Slots slots(shape);
  const std::vector<size_t> shards = {0, 1, 2};
  for (uint32_t i = 0; i < 16; ++i) {
    EXPECT_EQ(slots.take(shards, i % 2 == 0 ? Class::read_only : Class::write_only),
              (std::vector<uint32_t>(3, 32 + i)));
    EXPECT_EQ(slots.take(shards, Class::read_write), (std::vector<uint32_t>(3, i)));
    slots.give(shards, std::vector<uint32_t>(3, i));  // written anew, as what is rewritten is
  }
  size_t left = 0;
  while (slots.take(shards, Class::read_only)) ++left;
  EXPECT_EQ(left, 64U - 16) << "none is kept for a class";
}

Result<std::unique_ptr<CodedStore>> open_replacing(CodedWorld& world,
                                                   const std::vector<size_t>& shards) {
  StoreOptions options;
  for (const size_t shard : shards) options.replace.push_back(world.paths()[shard]);
  return world.open_coded(options);
}

// The stripes of header pages that were written to a disk, in order.
std::vector<uint64_t> stripes_written(const std::vector<SimEvent>& events, std::string path = "") {
  std::vector<uint64_t> order;
  for (const SimEvent& event : events) {
    if (event.kind != SimEvent::Kind::write) continue;
    for (size_t at = 0; at + 4096 <= event.bytes->size(); at += 4096) {
      if (std::memcmp(event.bytes->data() + at, "SKH1", 4) != 0) continue;
      if (path.empty()) path = event.path;
      if (event.path != path) continue;
      uint64_t id = 0;
      std::memcpy(&id, event.bytes->data() + at + 8, 8);
      if (std::find(order.begin(), order.end(), id) == order.end()) order.push_back(id);
    }
  }
  return order;
}

// Fewest survivors, then class, then what readers had to decode.
TEST(CodedClass, DecidesWhatIsRepairedFirst) {
  CodedWorldOptions options = quiet(2, 2);
  options.shards = 6;
  CodedWorld world(options);
  std::map<uint64_t, std::string> key_of;
  constexpr std::array<size_t, 3> kRank = {1, 0, 2};
  {
    auto store = std::move(*world.open_small());
    for (size_t i = 0; i < 24; ++i) {
      const Class each = kEach[i % 3];
      const std::string key =
          std::to_string(i) + "/" + std::to_string(kRank[static_cast<size_t>(each)]);
      auto change = std::move(*store->begin());
      Bytes content = pattern(100'000, i);
      ASSERT_OK(change->resize(key, content.size()));
      ASSERT_OK(change->expect(key, each));
      ASSERT_OK(change->write(key, 0, slice_of(content)).wait());
      world.disk().start_recording();
      ASSERT_OK(change->commit(Durability::durable).wait());
      const auto written = stripes_written(world.disk().stop_recording());
      ASSERT_EQ(written.size(), 1U);
      key_of[written[0]] = key;
    }
  }
  const std::array<size_t, 2> lost = {1, 4};
  for (const size_t shard : lost) world.disk().remove(world.paths()[shard]);
  auto store = std::move(*open_replacing(world, {1, 4}));
  Shape shape;
  shape.k = shape.m = 2;
  shape.shards = 6;
  const auto is_lost = [&](size_t shard) { return shard == lost[0] || shard == lost[1]; };
  // of a stripe: chunks lost, class, reads that were decoded
  std::map<uint64_t, std::tuple<size_t, int, size_t>> urgency;
  std::mt19937_64 random(3);
  for (const auto& [id, key] : key_of) {
    const size_t reads = random() % 4;
    for (size_t i = 0; i < reads; ++i) read_all(*store, key);
    const auto shards = placement(shape, id);
    urgency[id] = {
        std::count_if(shards.begin(), shards.end(), is_lost), key.back() - '0',
        reads * static_cast<size_t>(std::count_if(shards.begin(), shards.begin() + 2, is_lost))};
  }
  world.disk().start_recording();
  ASSERT_OK(store->repair().wait());
  std::vector<std::tuple<size_t, int, size_t>> order;
  for (const uint64_t id : stripes_written(world.disk().stop_recording()))
    order.push_back(urgency.at(id));
  ASSERT_GT(order.size(), 10U);
  EXPECT_TRUE(std::is_sorted(order.rbegin(), order.rend())) << "the most urgent first";
  EXPECT_GT(std::set(order.begin(), order.end()).size(), 6U);
  EXPECT_TRUE(store->health().troubles.empty());
}

// The same story under trees that say the contrary of each other, and with classes stated that are
// wrong: the same bytes.
TEST(CodedClass, BeingWrongCostsSpeedOnly) {
  const auto wrong = ClassTree::shipped().contrary();
  const auto always = ClassTree::parse(R"({"nodes": [{"class": "write_only"}]})");
  ASSERT_OK(always);
  for (const uint64_t seed : {1U, 2U}) {
    std::map<std::string, Bytes> first;
    for (const ClassTree* tree : {&ClassTree::shipped(), &wrong, &*always}) {
      CodedWorldOptions options = quiet(4, 2);
      options.segment_bytes = 256 << 10;
      options.segments = 5;
      options.tree = tree;
      CodedWorld world(options);
      std::map<std::string, Bytes> content;
      std::mt19937_64 random(seed);
      auto store = std::move(*world.open_small());
      for (const char* key : {"d/a", "d/b", "e/c"})
        content[key] = put(*store, key, 300'000, random());
      for (uint64_t i = 0; i < 900; ++i) {
        auto at = std::next(content.begin(), static_cast<ptrdiff_t>(random() % 3));
        const uint64_t what = random() % 100;
        if (what == 0) {
          state(*store, at->first, kEach[random() % 3]);
        } else if (what == 1) {
          ASSERT_OK(store->fold_all().wait());
        } else if (what == 2) {
          const size_t bytes = 200'000 + random() % 100'000;
          at->second = put(*store, at->first, bytes, random());
        }
        if (what < 60) {
          ASSERT_EQ(read_all(*store, at->first), at->second);
        } else {
          const size_t bytes = 1 + random() % (random() % 8 == 0 ? 90'000 : 9'000);
          ASSERT_NO_FATAL_FAILURE(
              update(*store, at->first, at->second, random() % (200'000 - bytes), bytes, random()));
        }
        if (i % 300 != 299) continue;
        store.reset();
        for (const size_t lost : {i % 6, (i + 1 + random() % 5) % 6})
          world.disk().remove(world.paths()[lost]);
        StoreOptions replace;
        for (const size_t each : {0U, 1U, 2U, 3U, 4U, 5U}) {
          if (world.disk().image(world.paths()[each]).bytes() == 0)
            replace.replace.push_back(world.paths()[each]);
        }
        store = std::move(*world.open_coded(replace));
        ASSERT_OK(store->repair().wait());
        ASSERT_TRUE(store->health().troubles.empty());
      }
      for (const auto& [key, bytes] : content) ASSERT_EQ(read_all(*store, key), bytes) << key;
      if (first.empty()) first = content;
      EXPECT_EQ(content, first);
    }
  }
}

}  // namespace
}  // namespace stoker::coded
