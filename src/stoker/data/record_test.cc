#include "stoker/data/record.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace stoker::data {
namespace {

// As a writer of shards does it. sizes: of each column's bytes.
std::vector<std::byte> record(const RecordLayout& layout, const std::vector<uint64_t>& sizes) {
  std::vector<std::byte> made;
  for (size_t i = 0; i < layout.size(); ++i) {
    if (layout[i] != 0) continue;
    const auto size = static_cast<uint32_t>(sizes[i]);
    made.resize(made.size() + sizeof(size));
    std::memcpy(made.data() + made.size() - sizeof(size), &size, sizeof(size));
  }
  for (const uint64_t size : sizes) made.resize(made.size() + size, std::byte{0xff});
  return made;
}

TEST(Record, ColumnsOfFixedAndOfOwnSizesFollowOneAnother) {
  const RecordLayout layout{0, 8, 0};
  std::vector<Place> places{{1, 2}};
  ASSERT_TRUE(split_record(layout, record(layout, {3, 8, 0}), places));
  ASSERT_EQ(places.size(), 4);
  EXPECT_EQ(places[1].offset, 8);
  EXPECT_EQ(places[1].bytes, 3);
  EXPECT_EQ(places[2].offset, 11);
  EXPECT_EQ(places[2].bytes, 8);
  EXPECT_EQ(places[3].offset, 19);
  EXPECT_EQ(places[3].bytes, 0);
}

// Property: what was written is found again, and no other length of the record is taken.
TEST(Record, EveryOtherLengthIsRefused) {
  std::mt19937_64 random(20261124);
  for (int round = 0; round < 200; ++round) {
    RecordLayout layout;
    std::vector<uint64_t> sizes;
    for (size_t columns = 1 + random() % 5; columns > 0; --columns) {
      const bool fixed = random() % 2 == 0;
      sizes.push_back(fixed ? 1 + random() % 9 : random() % 20);
      layout.push_back(fixed ? sizes.back() : 0);
    }
    const std::vector<std::byte> whole = record(layout, sizes);
    std::vector<Place> places;
    ASSERT_TRUE(split_record(layout, whole, places));
    ASSERT_EQ(places.size(), sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) EXPECT_EQ(places[i].bytes, sizes[i]);
    EXPECT_EQ(places.back().offset + places.back().bytes, whole.size());
    std::vector<std::byte> other = whole;
    other.resize(whole.size() + 3);
    for (size_t size = 0; size <= other.size(); ++size) {
      std::vector<Place> none;
      EXPECT_EQ(split_record(layout, {other.data(), size}, none), size == whole.size()) << size;
      if (size != whole.size()) {
        EXPECT_TRUE(none.empty());
      }
    }
  }
}

// Any bytes: places stay inside of the record, and fill it behind the sizes.
TEST(Record, AnyBytesAreBorne) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 20000; ++round) {
    RecordLayout layout(random() % 4 + 1);
    for (uint64_t& each : layout) each = random() % 3 == 0 ? random() % 8 : 0;
    if (random() % 50 == 0) layout[0] = ~uint64_t{0};
    std::vector<std::byte> bytes(random() % 40);
    for (std::byte& each : bytes) each = static_cast<std::byte>(random() % 4 == 0 ? random() : 0);
    std::vector<Place> places;
    if (!split_record(layout, bytes, places)) {
      EXPECT_TRUE(places.empty());
      continue;
    }
    uint64_t end = places.front().offset;
    for (const Place& place : places) {
      EXPECT_EQ(place.offset, end);
      end += place.bytes;
    }
    EXPECT_EQ(end, bytes.size());
  }
}

}  // namespace
}  // namespace stoker::data
