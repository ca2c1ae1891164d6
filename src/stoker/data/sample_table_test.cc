#include "stoker/data/sample_table.h"

#include <gtest/gtest.h>

#include <vector>

namespace stoker::data {
namespace {

std::vector<Piece> pieces(const SampleTable& table, uint64_t sample, uint64_t into = 0) {
  std::vector<Piece> all;
  table.append(sample, into, all);
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

TEST(SampleTable, RangesMayBeOfAnyNumberAndLength) {
  const auto table =
      SampleTable::ranges({"a"}, {0, 2, 2, 3}, {{0, 5, 2, 0}, {0, 9, 1, 0}, {0, 0, 4, 0}}).value();
  EXPECT_EQ(table.samples(), 3);
  EXPECT_EQ(pieces(table, 1).size(), 0);
  const auto first = pieces(table, 0, 20);
  ASSERT_EQ(first.size(), 2);
  EXPECT_EQ(first[1].into, 22);
}

TEST(SampleTable, RefusesWhatCannotBe) {
  EXPECT_FALSE(SampleTable::equal({"a"}, {{1, 1, 0}}, 1, 1));
  EXPECT_FALSE(SampleTable::equal({"a"}, {{0, 1, 0}}, 1, 0));
  EXPECT_FALSE(SampleTable::equal({"a"}, {{0, ~uint64_t{0} / 4, 0}}, 1 << 20, 1));
  EXPECT_FALSE(SampleTable::equal({"a"}, {{0, 1, ~uint64_t{0}}}, 1, 1));
  EXPECT_FALSE(SampleTable::ranges({"a"}, {}, {}));
  EXPECT_FALSE(SampleTable::ranges({"a"}, {0, 2}, {{0, 0, 1, 0}}));
  EXPECT_FALSE(SampleTable::ranges({"a"}, {0, 2, 1, 2}, {{0, 0, 1, 0}, {0, 0, 1, 0}}));
  EXPECT_FALSE(SampleTable::ranges({"a"}, {0, 1}, {{1, 0, 1, 0}}));
}

}  // namespace
}  // namespace stoker::data
