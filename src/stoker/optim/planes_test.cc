#include "stoker/optim/planes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "stoker/optim/each_target.h"

namespace stoker::optim {
namespace {

bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }
bool payload_low_only(uint32_t bits) { return is_nan(bits) && (bits & 0x7f0000u) == 0; }

// Round to nearest even, as torch's .bfloat16(), for anything but NaN.
uint16_t nearest_even(uint32_t bits) {
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

struct Tally {
  uint64_t ties_off = 0;   // planes that are not the nearest-even value
  uint64_t quietened = 0;  // masters that come back changed
};

// The encoding's promises for one master, given what split made of it and what join made of that.
void check_one(uint32_t master, Halves halves, uint32_t restored, Tally& tally) {
  const uint32_t plane = static_cast<uint32_t>(halves.weight) << 16;
  if (payload_low_only(master)) {
    ++tally.quietened;
    ASSERT_EQ(restored, master | 0x400000u) << std::hex << master;
  } else {
    ASSERT_EQ(restored, master) << std::hex << master;
  }
  ASSERT_EQ(is_nan(plane), is_nan(master)) << std::hex << master;
  if (is_nan(master) || halves.weight == nearest_even(master)) return;
  ++tally.ties_off;
  ASSERT_EQ(master & 0xffffu, 0x8000u) << std::hex << master;
  ASSERT_EQ((master >> 16) & 1u, 1u) << std::hex << master;
  ASSERT_EQ(plane, master & 0xffff0000u) << std::hex << master;
}

// Debug builds, which the sanitizers slow down further, look at every 64th block of masters.
#ifdef NDEBUG
constexpr uint64_t kStride = 1;
#else
constexpr uint64_t kStride = 64;
#endif

constexpr size_t kBlock = 1 << 14;  // fits a cache

// The ordinary case, without branches: restored, nearest even, not NaN.
bool all_ordinary(const uint32_t* masters, const uint16_t* weights, const uint32_t* restored) {
  uint32_t odd = 0;
  for (size_t i = 0; i < kBlock; ++i) {
    const uint32_t wrong =
        (restored[i] ^ masters[i]) | static_cast<uint32_t>(weights[i] ^ nearest_even(masters[i]));
    odd |= wrong | static_cast<uint32_t>(is_nan(masters[i]));
  }
  return odd == 0;
}

TEST(Planes, EveryPatternIsRestored) {
  std::vector<uint32_t> masters(kBlock), restored(kBlock);
  std::vector<uint16_t> weights(kBlock), remainders(kBlock);
  Tally tally;
  for (uint64_t base = 0; base < (uint64_t{1} << 32); base += kBlock * kStride) {
    for (size_t i = 0; i < kBlock; ++i) masters[i] = static_cast<uint32_t>(base + i);
    split(reinterpret_cast<const float*>(masters.data()), weights.data(), remainders.data(),
          kBlock);
    join(weights.data(), remainders.data(), reinterpret_cast<float*>(restored.data()), kBlock);
    if (all_ordinary(masters.data(), weights.data(), restored.data())) continue;
    for (size_t i = 0; i < kBlock; ++i) {
      check_one(masters[i], {weights[i], remainders[i]}, restored[i], tally);
      if (HasFatalFailure()) return;
    }
  }
  if (kStride > 1) return;
  // One tie for each odd high half that is a number: 2 signs * 255 exponents * 64.
  EXPECT_EQ(tally.ties_off, 2u * 255 * 64);
  EXPECT_EQ(tally.quietened, 2u * 65535);
}

// Masters around every boundary of the encoding: all high halves with the low halves where
// something changes.
std::vector<uint32_t> edges() {
  std::vector<uint32_t> masters;
  for (uint32_t high = 0; high < 0x10000; ++high)
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      masters.push_back(high << 16 | low);
  return masters;
}

TEST(Planes, EveryTargetEqualsTheReference) {
  const auto masters = edges();
  const size_t count = masters.size() - 5;  // ends inside a vector
  on_each_target([&] {
    std::vector<uint16_t> weights(count), remainders(count);
    std::vector<uint32_t> restored(count);
    split(reinterpret_cast<const float*>(masters.data()), weights.data(), remainders.data(), count);
    join(weights.data(), remainders.data(), reinterpret_cast<float*>(restored.data()), count);
    for (size_t i = 0; i < count; ++i) {
      const Halves halves = split_bits(masters[i]);
      ASSERT_EQ(weights[i], halves.weight) << std::hex << masters[i];
      ASSERT_EQ(remainders[i], halves.remainder) << std::hex << masters[i];
      ASSERT_EQ(restored[i], join_bits(halves.weight, halves.remainder)) << std::hex << masters[i];
    }
  });
}

TEST(Planes, AMasterThatIsABf16HasNoRemainder) {
  for (uint32_t high = 0; high < 0x10000; ++high) {
    if (is_nan(high << 16)) continue;
    const Halves halves = split_bits(high << 16);
    ASSERT_EQ(halves.weight, high);
    ASSERT_EQ(halves.remainder, 0);
  }
}

TEST(Planes, OverflowRoundsToInfinityAndComesBack) {
  // the largest float32 is nearest to infinity in bf16
  EXPECT_EQ(split_bits(0x7f7fffffu).weight, 0x7f80);
  EXPECT_EQ(join_bits(0x7f80, 0xffff), 0x7f7fffffu);
  EXPECT_EQ(split_bits(0x7f7f8000u).weight, 0x7f7f);  // the tie rounds toward zero
}

}  // namespace
}  // namespace stoker::optim
