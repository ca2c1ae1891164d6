#include "stoker/store/coded/spare_memory.h"

#include <gtest/gtest.h>

#include <vector>

namespace stoker::coded {
namespace {

constexpr uint64_t kCap = 64 * kMiB;  // so 4 MiB are kept

class Spare : public ::testing::Test {
 protected:
  Budget budget_{kCap};
  SpareMemory spare_{budget_};
};

TEST_F(Spare, APieceIsUsedAgain) {
  std::byte* first = nullptr;
  {
    const SparePiece piece = spare_.take(kMiB);
    first = piece.data();
    EXPECT_GE(piece.size(), kMiB);
    EXPECT_EQ(spare_.kept_bytes(), 0U);
  }
  EXPECT_EQ(spare_.kept_bytes(), kMiB);
  const SparePiece again = spare_.take_sparse(kMiB);
  EXPECT_EQ(again.data(), first);
  EXPECT_EQ(spare_.kept_bytes(), 0U);
}

TEST_F(Spare, AnotherSizeIsAnotherPiece) {
  { const SparePiece piece = spare_.take(kMiB); }
  const SparePiece larger = spare_.take(kMiB + 4096);
  const SparePiece smaller = spare_.take(kMiB - 4096);
  EXPECT_EQ(spare_.kept_bytes(), kMiB);
}

TEST_F(Spare, SmallPiecesAreNotKept) {
  { const SparePiece piece = spare_.take(SpareMemory::kLeast - 4096); }
  EXPECT_EQ(spare_.kept_bytes(), 0U);
}

TEST_F(Spare, WhatWasKeptLongestGoes) {
  {
    std::vector<SparePiece> pieces;
    for (int i = 0; i < 3; ++i) pieces.push_back(spare_.take(kMiB));
  }
  { const SparePiece piece = spare_.take(2 * kMiB); }
  EXPECT_EQ(spare_.kept_bytes(), 4 * kMiB);
  { const SparePiece piece = spare_.take(kCap); }  // more than is kept in all
  EXPECT_EQ(spare_.kept_bytes(), 4 * kMiB);
}

TEST_F(Spare, MovingGivesBackOnce) {
  SparePiece piece = spare_.take(kMiB);
  piece = spare_.take(kMiB);
  EXPECT_EQ(spare_.kept_bytes(), kMiB);
  SparePiece other = std::move(piece);
  piece = SparePiece();
  EXPECT_EQ(spare_.kept_bytes(), kMiB);
  other = SparePiece();
  EXPECT_EQ(spare_.kept_bytes(), 2 * kMiB);
}

TEST_F(Spare, ItsShareIsOfTheCap) {
  EXPECT_EQ(budget_.used(), kCap / 16);
  Budget none{0};
  SpareMemory nothing(none);
  { const SparePiece piece = nothing.take(kMiB); }
  EXPECT_EQ(nothing.kept_bytes(), 0U);
}

}  // namespace
}  // namespace stoker::coded
