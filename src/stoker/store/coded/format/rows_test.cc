// RowSet without a disk: what it asks for, and how many calls of the codec it makes of it.
#include "stoker/store/coded/format/rows.h"

#include <algorithm>
#include <cstring>

#include "stoker/base/crc32c.h"
#include "stoker/testing/store_harness.h"

namespace stoker::coded {
namespace {

constexpr size_t kRows = 32;

// Rows of a 4+2 stripe, all of them written, and a RowSet over them of which nothing was read yet.
class Rows : public ::testing::Test {
 protected:
  Rows() : code_(std::move(*codec::ErasureCode::make(4, 2))) {
    shape_.k = 4;
    shape_.m = 2;
    shape_.shards = 6;
    shape_.chunk_bytes = kRows * kBlock;
    slots_.emplace(shape_);
    stripe_.emplace(1, std::vector<size_t>{}, std::vector<uint32_t>{}, *slots_);
    truth_ = pattern(6 * kRows * kBlock, 3);
    stripe_->headers = std::make_shared<Headers>(blank_headers(shape_));
    Headers& headers = *stripe_->headers;
    std::fill(headers.versions.begin(), headers.versions.end(), 7);
    std::vector<codec::Source> sources(4);
    std::vector<codec::Target> targets(2);
    for (size_t c = 0; c < 4; ++c) sources[c].bytes = {block(c, 0), kRows * kBlock};
    for (size_t j = 0; j < 2; ++j) targets[j].bytes = {block(4 + j, 0), kRows * kBlock};
    EXPECT_OK(code_.encode(sources, targets));
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t c = 0; c < 6; ++c) headers.crcs[r * 6 + c] = crc32c(block(c, r), kBlock);
    }
    blocks_.resize(truth_.size());
  }
  std::byte* block(size_t c, size_t r) { return truth_.data() + (c * kRows + r) * kBlock; }
  RowsWanted wanted(uint32_t chunks) { return {&*stripe_, 0, kRows, chunks, blocks_}; }
  // As if these chunks had been read, but for one row that was rotten in one of them.
  void read(RowSet& rows, uint32_t chunks, size_t rotten_chunk = 6, size_t rotten_row = 0) {
    for (size_t c = 0; c < 6; ++c) {
      if (!is_set(chunks, c)) continue;
      std::memcpy(rows.at(c, 0), block(c, 0), kRows * kBlock);
      if (c == rotten_chunk) *rows.at(c, rotten_row) ^= std::byte{1};
      rows.took(c, true);
    }
  }
  bool right(size_t c) {
    return std::memcmp(blocks_.data() + c * kRows * kBlock, block(c, 0), kRows * kBlock) == 0;
  }

  Shape shape_;
  codec::ErasureCode code_;
  std::optional<Slots> slots_;
  std::optional<Stripe> stripe_;
  Bytes truth_, blocks_;
};

TEST_F(Rows, AsksForWhatIsWantedThenForEnoughThenForTheRest) {
  RowSet rows(shape_, wanted(0b000011), 0b111111);
  EXPECT_EQ(rows.next(), 0b000011U);
  read(rows, 0b000010);  // chunk 0 did not come
  EXPECT_EQ(rows.next(), 0b011100U) << "three others, data before parity";
  read(rows, 0b011000);
  EXPECT_EQ(rows.next(), 0b100000U);
  read(rows, 0b100000);
  EXPECT_EQ(rows.next(), 0U);
  EXPECT_FALSE(rows.complete(code_).lost);
  EXPECT_TRUE(right(0) && right(1));
}

// What of the wanted ones can be read is most of what decoding the rest takes: nothing twice, and
// all of it at once.
TEST_F(Rows, WhereSomeOfItIsLostAllIsAskedForAtOnce) {
  RowSet rows(shape_, wanted(0b001111), 0b110110, 0, true);
  EXPECT_EQ(rows.next(), 0b110110U) << "two that are wanted, two others; there is no spare one";
  read(rows, 0b110110);
  EXPECT_EQ(rows.next(), 0U);
  EXPECT_EQ(rows.complete(code_).blocks, 2 * kRows);
  EXPECT_TRUE(right(0) && right(1) && right(2) && right(3));
  EXPECT_EQ(rows.wrong(), 0U);
  RowSet rotten(shape_, wanted(0b000011), 0b111110);
  EXPECT_EQ(rotten.next(), 0b011110U);
  read(rotten, 0b011110, 1, 5);
  EXPECT_EQ(rotten.wrong(), 0b000010U);
  EXPECT_EQ(rotten.next(), 0b100000U);
}

TEST_F(Rows, AsksForNothingMoreWhenItIsThere) {
  RowSet rows(shape_, wanted(0b000100), 0b111111);
  EXPECT_EQ(rows.next(), 0b000100U);
  read(rows, 0b000100);
  EXPECT_EQ(rows.next(), 0U);
  const auto done = rows.complete(code_);
  EXPECT_EQ(done.blocks + done.calls, 0U);
  EXPECT_TRUE(right(2));
}

TEST_F(Rows, WithTheSameBlocksAreDecodedByOneCall) {
  RowSet rows(shape_, wanted(0b000001), 0b111110);
  EXPECT_EQ(rows.next(), 0b011110U);
  read(rows, 0b011110);
  EXPECT_EQ(rows.next(), 0U);
  const auto done = rows.complete(code_);
  EXPECT_FALSE(done.lost);
  EXPECT_EQ(done.blocks, kRows);
  EXPECT_EQ(done.calls, 1U);
  EXPECT_TRUE(right(0));
}

TEST_F(Rows, OneThatLacksMoreIsDecodedByItself) {
  RowSet rows(shape_, wanted(0b000001), 0b111110);
  rows.next();
  read(rows, 0b011110, 2, 9);
  EXPECT_EQ(rows.next(), 0b100000U);
  read(rows, 0b100000);
  const auto done = rows.complete(code_);
  EXPECT_FALSE(done.lost);
  EXPECT_EQ(done.blocks, kRows);
  EXPECT_EQ(done.calls, 3U) << "the rows before it, it, and the rows behind it";
  EXPECT_TRUE(right(0));
}

// One more than it takes, and what comes first counts.
TEST_F(Rows, ASpareOneIsReadWhereSomethingIsDecoded) {
  RowSet rows(shape_, wanted(0b000001), 0b111110, 0, true);
  EXPECT_EQ(rows.next(), 0b111110U);
  read(rows, 0b110010);
  EXPECT_FALSE(rows.enough());
  read(rows, 0b000100);
  EXPECT_TRUE(rows.enough());
  EXPECT_EQ(rows.next(), 0U);
  EXPECT_FALSE(rows.complete(code_).lost);
  EXPECT_TRUE(right(0));
  RowSet whole(shape_, wanted(0b000001), 0b111111, 0, true);
  EXPECT_EQ(whole.next(), 0b000001U);
  EXPECT_FALSE(whole.enough());
  read(whole, 0b000001);
  EXPECT_EQ(whole.next(), 0U) << "nothing is decoded";
}

TEST_F(Rows, WhatLagsIsReadWhereItTakesThat) {
  RowSet others(shape_, wanted(0b000001), 0b111110, 0b000010, true);
  EXPECT_EQ(others.next(), 0b111100U) << "no spare one of those";
  read(others, 0b111100, 3, 9);
  EXPECT_FALSE(others.enough());
  EXPECT_EQ(others.next(), 0b000010U) << "in place of what was wrong";
  read(others, 0b000010);
  EXPECT_FALSE(others.complete(code_).lost);
  EXPECT_TRUE(right(0));
  RowSet few(shape_, wanted(0b000001), 0b111110, 0b000110, true);
  EXPECT_EQ(few.next(), 0b111010U);
}

// Zeros that were never written are known without being read; but not while something is read into
// their place.
TEST_F(Rows, ZerosUnderAReadAreNotThere) {
  std::memset(block(1, 7), 0, kBlock);
  stripe_->headers->versions[7 * 4 + 1] = 0;
  std::vector<codec::Source> sources(4);
  std::vector<codec::Target> targets(2);
  for (size_t c = 0; c < 4; ++c) sources[c].bytes = {block(c, 7), kBlock};
  for (size_t j = 0; j < 2; ++j) targets[j].bytes = {block(4 + j, 7), kBlock};
  ASSERT_OK(code_.encode(sources, targets));
  for (size_t c = 0; c < 6; ++c) stripe_->headers->crcs[7 * 6 + c] = crc32c(block(c, 7), kBlock);
  RowSet rows(shape_, wanted(0b000001), 0b111110, 0, true);
  EXPECT_EQ(rows.next(), 0b111110U);
  std::memset(rows.at(1, 7), 0xEE, kBlock);  // a read that is late, of what stands there
  read(rows, 0b111000);
  EXPECT_FALSE(rows.enough());
  EXPECT_EQ(rows.there(7), 3U);
  read(rows, 0b000100);
  EXPECT_TRUE(rows.enough());
  EXPECT_FALSE(rows.complete(code_).lost);
  EXPECT_TRUE(right(0));
  rows.took(1, false);
  EXPECT_EQ(rows.there(7), 5U);
}

// A result that has not the checksum that goes with it is not handed out, and the row is named.
TEST_F(Rows, AWrongResultIsTold) {
  stripe_->headers->crcs[20 * 6] ^= 1;
  RowSet rows(shape_, wanted(0b000001), 0b111110);
  rows.next();
  read(rows, 0b011110);
  EXPECT_EQ(rows.complete(code_).lost, 20U);
  RowSet few(shape_, wanted(0b000001), 0b000110);
  EXPECT_EQ(few.next(), 0b000110U);
  read(few, 0b000110);
  EXPECT_EQ(few.next(), 0U);
  EXPECT_EQ(few.complete(code_).lost, 0U);
  EXPECT_EQ(few.there(0), 2U);
}

}  // namespace
}  // namespace stoker::coded
