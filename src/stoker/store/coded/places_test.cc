// One place of one shard is damaged, in every way there is: whatever is borne as a wrong checksum
// is borne as a sector that cannot be read, as zeros and as a file that ends there.
#include <algorithm>
#include <cstring>
#include <functional>

#include "stoker/base/crc32c.h"
#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

enum class Damage { wrong_checksum, unreadable, zeros, short_file };
constexpr Damage kDamages[] = {Damage::wrong_checksum, Damage::unreadable, Damage::zeros,
                               Damage::short_file};

void damage(CodedWorld& world, const std::string& path, uint64_t at, Damage how) {
  const SimImage whole = world.disk().image(path);
  if (how == Damage::unreadable) return world.disk().spoil(path, at);
  if (how == Damage::wrong_checksum) return world.disk().flip(path, at + 70, 3);
  SimImage image(how == Damage::zeros ? whole.bytes() : at);
  for (uint64_t block = 0; block < image.bytes(); block += kBlock) {
    Bytes bytes(kBlock);
    whole.read(block, bytes);
    if (block != at) image.write(block, bytes);
  }
  world.disk().put(path, image);
}

Shape shape_on(CodedWorld& world, size_t shard) {
  Bytes head(kBlock);
  world.disk().image(world.paths()[shard]).read(0, head);
  return (**decode_superblock(head)).shape;
}

// All that lies on a shard: heads, both tables, a segment in use, one that is free, the pages and
// blocks of a slot.
std::vector<uint64_t> places_of(CodedWorld& world) {
  const Shape shape = shape_on(world, 0);
  std::vector<uint64_t> places = {0, 8192, 32'768, 40'960};
  for (size_t area = 0; area < 2; ++area) {
    for (const uint64_t block : {0, 1, 2}) places.push_back(shape.area_at(area) + block * kBlock);
  }
  for (uint64_t block = 0; block < 6; ++block)
    places.push_back(shape.segment_at(0) + block * kBlock);
  places.push_back(shape.segment_at(3) + 5 * kBlock);
  for (const uint64_t copy : {0, 1}) places.push_back(shape.page_at(0, 0, copy));
  places.push_back(shape.block_at(0, 0));
  return places;
}

TEST(CodedPlaces, AnyDamageOfOnePlaceIsBorne) {
  CodedWorld world(quiet(2, 1));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 120'000, 1);
    update(*store, "a", content, 8192, 8192, 2);
    ASSERT_OK(store->fold_all().wait());
    update(*store, "a", content, 4096, 8192, 3);
    update(*store, "a", content, 81'920, 4096, 4);
    update(*store, "a", content, 20'480, 4096, 5);
  }
  const auto images = images_of(world);
  for (const uint64_t at : places_of(world)) {
    for (const Damage how : kDamages) {
      SCOPED_TRACE("at " + std::to_string(at) + ", damage " +
                   std::to_string(static_cast<int>(how)));
      world.disk().heal();
      put_back(world, images);
      damage(world, world.paths()[0], at, how);
      const size_t left = how == Damage::short_file ? 2 : 3;
      {
        auto store = world.open_small(true);
        ASSERT_OK(store);
        EXPECT_EQ(read_all(**store, "a"), content);
        EXPECT_EQ((*store)->health().live.size(), left);
      }
      const auto report = fsck(world, 2, 1);
      ASSERT_OK(report);
      const Shape shape = shape_on(world, 1);
      const bool areas = at >= shape.area_at(0) && at < shape.slot_at(0);
      if (how == Damage::short_file || (how == Damage::unreadable && areas)) {
        EXPECT_FALSE(report->problems.empty());
      }
      {
        auto store = world.open_small();
        ASSERT_OK(store);
        EXPECT_EQ((*store)->info().read_only, "");
        EXPECT_EQ((*store)->health().live.size(), left);
        Bytes now = content;
        update(**store, "a", now, 12'288, 4096, 6);
        EXPECT_EQ(read_all(**store, "a"), now);
      }
      EXPECT_OK(world.open_small());
    }
  }
}

// Nothing in the logs is needed any more, and as many shards as may be are lost: a bad place in a
// log or table takes no shard with it.
TEST(CodedPlaces, BesideLostShardsABadSectorOfALogTakesNoShardWithIt) {
  CodedWorld world(quiet(4, 2));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 300'000, 1);
    update(*store, "a", content, 8192, 8192, 2);
    ASSERT_OK(store->fold_all().wait());
  }
  { auto store = std::move(*world.open_small()); }
  const auto images = images_of(world);
  const Shape shape = shape_on(world, 0);
  std::vector<uint64_t> places = {0,
                                  32'768,
                                  shape.area_at(0),
                                  shape.area_at(1),
                                  shape.segment_at(0) + kBlock,
                                  shape.segment_at(3)};
  for (const uint64_t at : places) {
    for (const Damage how : {Damage::wrong_checksum, Damage::unreadable, Damage::zeros}) {
      SCOPED_TRACE("at " + std::to_string(at) + ", damage " +
                   std::to_string(static_cast<int>(how)));
      world.disk().heal();
      put_back(world, images);
      for (const size_t lost : {4U, 5U}) world.disk().remove(world.paths()[lost]);
      damage(world, world.paths()[0], at, how);
      for (const bool read_only : {true, false}) {
        auto store = world.open_small(read_only);
        ASSERT_OK(store);
        EXPECT_EQ((*store)->health().live.size(), 4U);
        EXPECT_EQ(read_all(**store, "a"), content);
        // What cannot be read now may be read again, and be the last copy of something: nothing is
        // written over it.
        if (!read_only && how == Damage::unreadable && at >= shape.area_at(0)) {
          EXPECT_NE((*store)->info().read_only.find("'d0' cannot be read"), std::string::npos)
              << (*store)->info().read_only;
        } else if (!read_only) {
          EXPECT_EQ((*store)->info().read_only, "");
        }
      }
      EXPECT_OK(fsck(world, 4, 2));
    }
  }
}

// Its records were not seen when the store was opened, and the others went on: they must not come
// back with the sector.
TEST(CodedPlaces, WhatCouldNotBeReadIsNotSeenLater) {
  CodedWorld world(quiet(2, 1));
  {
    auto store = std::move(*world.open_small());
    put(*store, "a", 4096, 1);
  }
  const uint64_t at = shape_on(world, 0).segment_at(0);
  Bytes before(kBlock), after(kBlock);
  world.disk().image(world.paths()[0]).read(at, before);
  world.disk().spoil(world.paths()[0], at);
  EXPECT_OK(world.open_small());
  world.disk().heal();
  world.disk().image(world.paths()[0]).read(at, after);
  EXPECT_NE(after, before);
}

// Its checksum is right: it is of a newer program, of a bug, or says of the store what the others
// do not.
TEST(CodedPlaces, OneImpossibleSuperblockKeepsNoStoreClosed) {
  CodedWorld world(quiet(2, 1));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 120'000, 1);
  }
  const auto images = images_of(world);
  struct Case {
    std::function<void(Superblock&)> change;
    const char* said;
  };
  const Case cases[] = {
      {[](Superblock& super) { super.shape.segments = 1; },
       "'d1' has a superblock that is intact and says what cannot be"},
      {[](Superblock& super) { super.confirmed.number = 77; },
       "'d1' has a superblock that is intact and says what cannot be"},
      {[](Superblock& super) { super.confirmed.live = super.proposed.live = 255; },
       "'d1' has a superblock that is intact and says what cannot be"},
      {[](Superblock& super) { super.shape.slots += 1; }, "'d1' has a superblock of another shape"},
      {nullptr, "'d1' has a superblock of format version 99"},
  };
  for (const Case& each : cases) {
    put_back(world, images);
    SimImage image = images.at("d1");
    Bytes sector(kSuperblockBytes);
    for (const uint64_t at : kSuperblockAt) {
      image.read(at, sector);
      std::string bytes;
      if (each.change) {
        Superblock super = **decode_superblock(sector);
        each.change(super);
        bytes = encode_superblock(super);
      } else {
        sector[8] = std::byte{99};
        const uint32_t crc = crc32c(sector.data(), sector.size() - 4);
        std::memcpy(sector.data() + sector.size() - 4, &crc, 4);
        bytes.assign(reinterpret_cast<const char*>(sector.data()), sector.size());
      }
      image.write(at, std::as_bytes(std::span(bytes)));
    }
    world.disk().put("d1", image);
    for (const bool read_only : {true, false}) {
      auto store = world.open_small(read_only);
      ASSERT_OK(store) << each.said;
      EXPECT_EQ(read_all(**store, "a"), content);
      ASSERT_EQ((*store)->health().troubles.size(), 1U) << each.said;
      EXPECT_NE((*store)->health().troubles[0].find(each.said), std::string::npos)
          << (*store)->health().troubles[0];
    }
    Bytes now(kHeadBytes), then(kHeadBytes);
    world.disk().image("d1").read(0, now);
    image.read(0, then);
    EXPECT_EQ(now, then) << "it is never written to";
    // All of them are: it says so, of one of them.
    if (each.change) continue;
    for (const std::string& path : world.paths()) world.disk().put(path, image);
    const auto none = world.open_small();
    ASSERT_FALSE(none);
    EXPECT_EQ(none.error().code, Code::mismatch);
    EXPECT_NE(none.error().what.find("'d0' has a superblock of format version 99"),
              std::string::npos)
        << none.error().what;
  }
}

TEST(CodedPlaces, AFewBytesThatAreNoShardAreNotBlank) {
  for (const size_t bytes : {512U, 4096U, 65'024U}) {
    CodedWorld world(quiet(2, 1));
    Bytes content;
    {
      auto store = std::move(*world.open_small());
      content = put(*store, "a", 120'000, 1);
    }
    SimImage image(bytes);
    image.write(bytes - 5, Bytes(3, std::byte{'x'}));
    world.disk().put("d2", image);
    auto store = std::move(*world.open_small());
    EXPECT_EQ(read_all(*store, "a"), content);
    ASSERT_EQ(store->health().troubles.size(), 1U);
    EXPECT_NE(store->health().troubles[0].find("'d2' holds " + std::to_string(bytes) +
                                               " bytes that are not a shard"),
              std::string::npos)
        << store->health().troubles[0];
    store.reset();
    StoreOptions options;
    options.replace = {"d2"};
    const auto over = world.open_coded(options);
    ASSERT_FALSE(over);
    EXPECT_EQ(over.error().code, Code::mismatch);
    if (bytes != kBlock) continue;            // other sizes are read in full from files only
    world.disk().put("d2", SimImage(bytes));  // zeros are blank
    EXPECT_OK(world.open_coded(options));
  }
}

TEST(CodedPlaces, AFullStoreSaysWhichOne) {
  CodedWorld world(quiet(2, 1));
  auto store = std::move(*world.open_small());
  const auto add = [&store](const std::string& key) -> Status {
    Bytes bytes = pattern(1 << 20, 1);
    STOKER_ASSIGN(auto change, store->begin());
    STOKER_TRY(change->resize(key, bytes.size()));
    STOKER_TRY(change->write(key, 0, slice_of(bytes)).wait());
    const auto done = change->commit(Durability::durable).wait();
    return done ? Status() : Status(done.error());
  };
  for (size_t i = 0; i < 100; ++i) {
    const Status done = add("k" + std::to_string(i));
    if (done) continue;
    EXPECT_EQ(done.error().code, Code::out_of_space);
    EXPECT_NE(done.error().what.find("d0,d1,d2"), std::string::npos) << done.error().what;
    return;
  }
  FAIL() << "it was never full";
}

}  // namespace
}  // namespace stoker::coded
