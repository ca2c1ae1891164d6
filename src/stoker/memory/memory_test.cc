#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/memory/arena.h"
#include "stoker/memory/budget.h"

namespace stoker {
namespace {

TEST(Budget, IsAHardCap) {
  Budget budget(100);
  auto first = budget.take(60, "weights");
  ASSERT_TRUE(first);
  const auto refused = budget.take(41, "state");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::over_budget);
  EXPECT_NE(refused.error().what.find("state needs 41 B"), std::string::npos)
      << refused.error().what;
  { Grant gone = std::move(*first); }
  EXPECT_EQ(budget.used(), 0U);
  EXPECT_EQ(budget.peak(), 60U);
  EXPECT_TRUE(budget.take(100, "all"));
}

TEST(Arena, IsAlignedPrefaultedAndSaysItsPages) {
  Budget budget(64 * kMiB);
  auto arena = Arena::make(32 * kMiB, budget);
  ASSERT_TRUE(arena) << arena.error().message();
  EXPECT_EQ(reinterpret_cast<uintptr_t>((*arena)->data()) % (2 * kMiB), 0U);
  EXPECT_EQ((*arena)->pages().total_bytes, 32 * kMiB);
  EXPECT_LE((*arena)->pages().large_bytes, 32 * kMiB);
  EXPECT_EQ(budget.used(), 32 * kMiB);
  EXPECT_FALSE(Arena::make(64 * kMiB, budget));
  arena->reset();
  EXPECT_EQ(budget.used(), 0U);
}

TEST(Arena, IsNotInChildProcesses) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the sanitizer maps memory of its own into the hole";
#endif
  Budget budget{64 << 20};
  auto arena = Arena::make(4 << 20, budget);
  ASSERT_TRUE(arena);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    unsigned char resident = 0;
    // not mapped
    _exit(mincore((*arena)->data(), 4096, &resident) != 0 && errno == ENOMEM ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Arena, NeverHandsOutOverlappingBuffersAndCoalesces) {
  Budget budget(8 * kMiB);
  auto arena = std::move(*Arena::make(8 * kMiB, budget));
  std::mt19937 random(7);
  std::vector<std::pair<Buffer, uint8_t>> live;
  for (int step = 0; step < 3000; ++step) {
    if (random() % 3 != 0) {
      auto buffer = arena->take(1 + random() % (300 * kKiB));
      if (!buffer) {
        EXPECT_EQ(buffer.error().code, Code::over_budget);
        live.clear();
        continue;
      }
      EXPECT_TRUE(is_aligned(reinterpret_cast<uintptr_t>(buffer->data()), kIoAlign));
      const auto mark = static_cast<uint8_t>(random());
      std::memset(buffer->data(), mark, buffer->size());
      live.emplace_back(std::move(*buffer), mark);
    } else if (!live.empty()) {
      std::swap(live[random() % live.size()], live.back());
      for (size_t at = 0; at < live.back().first.size(); at += 512) {
        ASSERT_EQ(static_cast<uint8_t>(live.back().first.data()[at]), live.back().second);
      }
      live.pop_back();
    }
  }
  live.clear();
  EXPECT_EQ(arena->used(), 0U);
  EXPECT_EQ(arena->largest_free(), 8 * kMiB);
}

}  // namespace
}  // namespace stoker
