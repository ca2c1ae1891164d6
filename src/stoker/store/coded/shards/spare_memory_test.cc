#include "stoker/store/coded/shards/spare_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace stoker::coded {
namespace {

constexpr uint64_t kCap = 64 * kMiB;    // so 4 MiB are kept
constexpr size_t kPiece = kMiB - 8192;  // of which none fill a large page

class Spare : public ::testing::Test {
 protected:
  Budget budget_{kCap};
  SpareMemory spare_{budget_};
};

TEST_F(Spare, APieceIsUsedAgain) {
  std::byte* first = nullptr;
  {
    const SparePiece piece = spare_.take(kPiece);
    first = piece.data();
    EXPECT_GE(piece.size(), kPiece);
    EXPECT_EQ(spare_.kept_bytes(), 0U);
  }
  EXPECT_EQ(spare_.kept_bytes(), kPiece);
  const SparePiece again = spare_.take_sparse(kPiece);
  EXPECT_EQ(again.data(), first);
  EXPECT_EQ(spare_.kept_bytes(), 0U);
}

// What the heap has used before lies in small pages, which would be cut into many transfers.
TEST(AlignedBytes, LargeOnesLieInFreshPages) {
  constexpr size_t kBytes = 4 * kMiB;
  std::free(std::malloc(8 * kBytes));  // from here on the heap has room for such itself
  for (int i = 0; i < 4; ++i) {
    auto* used = static_cast<unsigned char*>(std::malloc(2 * kBytes));
    std::memset(used, 7, 2 * kBytes);
    std::free(used);
    const AlignedBytes memory = AlignedBytes::faulted(kBytes);
    EXPECT_TRUE(std::all_of(memory.span().begin(), memory.span().end(),
                            [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST_F(Spare, PiecesOfALargePageShareIt) {
  constexpr size_t kPage = 2 * kMiB;
  for (const size_t bytes : {kMiB, size_t{512 * kKiB}, SpareMemory::kLeast}) {
    Budget budget{kCap};
    SpareMemory spare(budget);
    std::vector<SparePiece> pieces;
    for (size_t i = 0; i < kPage / bytes; ++i) {
      pieces.push_back(spare.take(bytes));
      EXPECT_EQ(pieces.back().size(), bytes);
      const auto page = [](const SparePiece& piece) {
        return reinterpret_cast<uintptr_t>(piece.data()) / kPage;
      };
      EXPECT_EQ(page(pieces.back()), page(pieces.front()));
      EXPECT_EQ(spare.kept_bytes(), kPage - (i + 1) * bytes);
    }
    pieces.clear();
    EXPECT_EQ(spare.kept_bytes(), kPage);
  }
}

// A part of a page that is not kept is given to the kernel, also while others use the page.
TEST_F(Spare, WhatIsLeftOfAPageIsNotKeptBeyondTheShare) {
  const SparePiece piece = spare_.take(kMiB);
  std::byte* other = nullptr;
  {
    const SparePiece second = spare_.take(kMiB);
    other = second.data();
    std::memset(other, 1, kMiB);
  }
  EXPECT_EQ(*other, std::byte{1});
  { const SparePiece all = spare_.take(4 * kMiB); }
  EXPECT_EQ(spare_.kept_bytes(), 4 * kMiB);
  EXPECT_EQ(*other, std::byte{0}) << "the page is there, as it is in use, and this part is empty";
}

TEST_F(Spare, AnotherSizeIsAnotherPiece) {
  { const SparePiece piece = spare_.take(kPiece); }
  const SparePiece larger = spare_.take(kPiece + 4096);
  const SparePiece smaller = spare_.take(kPiece - 4096);
  EXPECT_EQ(spare_.kept_bytes(), kPiece);
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
  SparePiece piece = spare_.take(kPiece);
  piece = spare_.take(kPiece);
  EXPECT_EQ(spare_.kept_bytes(), kPiece);
  SparePiece other = std::move(piece);
  piece = SparePiece();
  EXPECT_EQ(spare_.kept_bytes(), kPiece);
  other = SparePiece();
  EXPECT_EQ(spare_.kept_bytes(), 2 * kPiece);
}

TEST(AlignedBytes, WhatWasMovedFromIsEmpty) {
  AlignedBytes first(5000);
  EXPECT_EQ(first.size(), 8192U);
  AlignedBytes second = std::move(first);
  EXPECT_EQ(second.size(), 8192U);
  EXPECT_EQ(first.size(), 0U);
  EXPECT_TRUE(first.span().empty());
  EXPECT_EQ(first.slice().size, 0U);
  first = std::move(second);
  EXPECT_EQ(first.size(), 8192U);
  EXPECT_EQ(second.size(), 0U);
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
