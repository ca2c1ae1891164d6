#include "stoker/data/sample_table.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace stoker::data {
namespace {

std::vector<Piece> pieces(const SampleTable& table, uint64_t sample, uint64_t into = 0) {
  std::vector<Piece> all;
  EXPECT_TRUE(table.append(sample, into, all));
  return all;
}

TEST(SampleTable, EqualSamplesAreNumberedThroughTheRuns) {
  const auto table =
      SampleTable::equal({"a", "b"}, {{0, 3, 100}, {1, 0, 0}, {1, 2, 10}}, 8, 10).value();
  EXPECT_EQ(table.samples(), 5);
  const auto third = pieces(table, 2, 7);
  ASSERT_EQ(third.size(), 1);
  EXPECT_EQ(third[0].object, 0);
  EXPECT_EQ(third[0].offset, 116);
  EXPECT_EQ(third[0].bytes, 10);
  EXPECT_EQ(third[0].into, 7);
  const auto last = pieces(table, 4);
  EXPECT_EQ(last[0].object, 1);
  EXPECT_EQ(last[0].offset, 18);
}

// Arrays that live as long as the table.
struct Owned {
  std::vector<uint64_t> starts;
  std::vector<uint32_t> objects;
  std::vector<uint64_t> offsets, bytes;
  std::vector<uint32_t> crcs;
};
RangeArrays arrays(Owned all) {
  const auto owned = std::make_shared<const Owned>(std::move(all));
  return {owned->starts, owned->objects, owned->offsets, owned->bytes, owned->crcs, owned};
}

TEST(SampleTable, RowsOfSeveralArraysAreNumberedThroughTheRuns) {
  const auto table =
      SampleTable::rows({"a", "b"}, {{0, 3, {100, 200}}, {1, 0, {0, 0}}, {1, 2, {8, 0}}}, {4, 1})
          .value();
  EXPECT_EQ(table.samples(), 5);
  EXPECT_EQ(table.equal_bytes(), 0);
  const auto third = pieces(table, 2, 7);
  ASSERT_EQ(third.size(), 2);
  EXPECT_EQ(third[0].offset, 108);
  EXPECT_EQ(third[0].into, 7);
  EXPECT_EQ(third[1].offset, 202);
  EXPECT_EQ(third[1].into, 11);
  const auto last = pieces(table, 4);
  EXPECT_EQ(last[0].object, 1);
  EXPECT_EQ(last[0].offset, 12);
  EXPECT_EQ(last[1].offset, 1);
  EXPECT_TRUE(table.plan().value().empty());
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_FALSE(SampleTable::rows({"a"}, {{1, 1, {0}}}, {1}));
  EXPECT_FALSE(SampleTable::rows({"a"}, {{0, 1, {0, 0}}}, {1}));
  EXPECT_FALSE(SampleTable::rows({"a"}, {{0, 1, {0}}}, {0}));
  EXPECT_FALSE(SampleTable::rows({"a"}, {{0, kMost / 4 + 1, {0}}}, {4}));
  EXPECT_FALSE(SampleTable::rows({"a"}, {{0, kMost, {0}}, {0, 1, {0}}}, {1}));
}

TEST(SampleTable, RangesMayBeOfAnyNumberAndLength) {
  const auto table =
      SampleTable::ranges({"a"}, {10}, arrays({{0, 2, 2, 3}, {0, 0, 0}, {5, 9, 0}, {2, 1, 4}, {}}))
          .value();
  EXPECT_EQ(table.samples(), 3);
  EXPECT_EQ(pieces(table, 1).size(), 0);
  const auto first = pieces(table, 0, 20);
  ASSERT_EQ(first.size(), 2);
  EXPECT_EQ(first[1].into, 22);
}

TEST(SampleTable, WhatAnIndexSaysIsLookedAtSampleBySample) {
  const auto table =
      SampleTable::ranges(
          {"a"}, {10}, arrays({{0, 1, 5, 2, 3, 4}, {1, 0, 0, 0}, {0, 9, 8, 2}, {1, 2, 2, 1}, {}}))
          .value();
  std::vector<Piece> all;
  EXPECT_EQ(table.append(0, 0, all).error().code, Code::corruption);  // object 1
  EXPECT_EQ(table.append(1, 0, all).error().code, Code::corruption);  // five parts of four
  EXPECT_EQ(table.append(2, 0, all).error().code, Code::corruption);  // the starts fall
  EXPECT_TRUE(table.append(3, 0, all));
  EXPECT_TRUE(table.append(4, 0, all));
}

TEST(SampleTable, APlanHasEachSampleAsAnItem) {
  const auto equal =
      SampleTable::equal({"a", "b"}, {{0, 3, 100}, {1, 0, 0}, {1, 2, 10}}, 8, 10).value();
  const auto runs = equal.plan().value();
  ASSERT_EQ(runs.size(), 2);
  EXPECT_EQ(runs[1].object, 1);
  EXPECT_EQ(runs[1].items, 2);
  EXPECT_EQ(runs[1].stride, 8);
  const auto parts =
      SampleTable::ranges({"a"}, {10}, arrays({{0, 2, 2, 3}, {0, 0, 0}, {9, 5, 0}, {1, 2, 4}, {}}))
          .value();
  const auto items = parts.plan().value();
  ASSERT_EQ(items.size(), 2);  // the second sample has no bytes
  EXPECT_EQ(items[0].offset, 5);
  EXPECT_EQ(items[0].bytes, 5);
  const auto wide =
      SampleTable::ranges({"a", "b"}, {10, 10}, arrays({{0, 2}, {0, 1}, {0, 0}, {1, 1}, {}}))
          .value();
  EXPECT_TRUE(wide.plan().value().empty());
}

TEST(SampleTable, ADamagedPartNamesItsSample) {
  const std::string text = "123456789";
  const auto table =
      SampleTable::ranges({"a"}, {9}, arrays({{0, 1}, {0}, {0}, {9}, {0xe3069283}})).value();
  const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
  EXPECT_TRUE(table.has_crcs());
  EXPECT_TRUE(table.verify(0, 0, {bytes, 9}));
  EXPECT_NE(table.verify(0, 0, {bytes, 8}).error().what.find("sample 0"), std::string::npos);
}

TEST(SampleTable, RefusesWhatCannotBe) {
  EXPECT_FALSE(SampleTable::equal({"a"}, {{1, 1, 0}}, 1, 1));
  EXPECT_FALSE(SampleTable::equal({"a"}, {{0, 1, 0}}, 1, 0));
  EXPECT_FALSE(SampleTable::equal({"a"}, {{0, ~uint64_t{0} / 4, 0}}, 1 << 20, 1));
  EXPECT_FALSE(SampleTable::equal({"a"}, {{0, 1, ~uint64_t{0}}}, 1, 1));
  EXPECT_FALSE(SampleTable::ranges({"a"}, {1}, {}));
  EXPECT_FALSE(SampleTable::ranges({"a"}, {}, arrays({{0, 1}, {0}, {0}, {1}, {}})));
  EXPECT_FALSE(SampleTable::ranges({"a"}, {1}, arrays({{0, 2}, {0}, {0}, {1}, {}})));
  EXPECT_FALSE(SampleTable::ranges({"a"}, {1}, arrays({{0, 1}, {0}, {0}, {1}, {1, 2}})));
}

}  // namespace
}  // namespace stoker::data
