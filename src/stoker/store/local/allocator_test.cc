// Which of the free blocks a volume gives.
#include "stoker/store/local/allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

namespace stoker::local {
namespace {

FreeMap thousand() {
  FreeMap free;
  free.add(0, 1000);
  return free;
}

TEST(FreeMap, GivesWhatWasGivenBackBeforeWhatNobodyEverHad) {
  FreeMap free = thousand();
  EXPECT_EQ(free.take(100), 0U);
  EXPECT_EQ(free.take(100), 100U);
  free.add(0, 100);
  EXPECT_EQ(free.take(100), 0U);
  free.add(100, 100);  // next to the range at the end: one with it, and used first
  EXPECT_EQ(free.take(100), 100U);
  EXPECT_EQ(free.take(50), 200U);
  free.add(0, 100);
  EXPECT_EQ(free.take(101), 250U) << "no other range has room for it";
  EXPECT_EQ(free.take(4), 0U) << "short pieces too";
}

TEST(FreeMap, GivesTheLargestOfWhatCameBackAndForShortPiecesTheSmallest) {
  FreeMap free = thousand();
  EXPECT_EQ(free.take(400), 0U);
  free.add(10, 20);
  free.add(100, 60);
  free.add(200, 30);
  EXPECT_EQ(free.take(16), 100U);
  EXPECT_EQ(free.take(15), 10U);
  EXPECT_EQ(free.take(15), 200U) << "the smallest in which it fits";
  EXPECT_EQ(free.largest(), 600U);
  EXPECT_EQ(free.take(600), 400U);
  EXPECT_FALSE(free.take(600));
}

TEST(FreeMap, WritingAnewNeverGoesBeyondTwiceWhatIsHeld) {
  // Each object is written anew again and again: to a fresh place, and the old one comes back after
  // that.
  FreeMap free = thousand();
  std::vector<std::pair<uint64_t, uint64_t>> objects;
  uint64_t held = 0, end = 0;
  for (const uint64_t blocks : {16, 32, 64, 16}) {
    objects.emplace_back(*free.take(blocks), blocks);
    held += blocks;
  }
  for (int round = 0; round < 100; ++round) {
    for (auto& [at, blocks] : objects) {
      const uint64_t fresh = *free.take(blocks);
      free.add(at, blocks);
      at = fresh;
      end = std::max(end, at + blocks);
    }
  }
  EXPECT_LE(end, 2 * held);
}

TEST(FreeMap, AgreesWithAMapOfBitsWhateverIsTakenAndGivenBack) {
  for (const uint32_t seed : {1U, 2U, 3U}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    FreeMap free = thousand();
    std::vector<bool> used(1000);
    std::vector<std::pair<uint64_t, uint64_t>> taken;
    const auto longest = [&] {
      uint64_t best = 0, run = 0;
      for (const bool bit : used) best = std::max(best, run = bit ? 0 : run + 1);
      return best;
    };
    for (int i = 0; i < 2000; ++i) {
      if (random() % 2 == 0 && !taken.empty()) {
        std::swap(taken[random() % taken.size()], taken.back());
        const auto [at, blocks] = taken.back();
        taken.pop_back();
        std::fill_n(used.begin() + static_cast<std::ptrdiff_t>(at), blocks, false);
        free.add(at, blocks);
      } else {
        const uint64_t blocks = random() % 60 + 1;
        const auto at = free.take(blocks);
        ASSERT_EQ(at.has_value(), blocks <= longest());
        if (!at) continue;
        for (uint64_t block = *at; block < *at + blocks; ++block) {
          ASSERT_FALSE(used.at(block));
          used[block] = true;
        }
        taken.emplace_back(*at, blocks);
      }
      ASSERT_EQ(free.free_blocks(),
                static_cast<uint64_t>(std::count(used.begin(), used.end(), false)));
      ASSERT_EQ(free.largest(), longest());
    }
  }
}

}  // namespace
}  // namespace stoker::local
