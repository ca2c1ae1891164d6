// Private segments grow with what a stripe is updated with, shrink when that stops, and go when nothing needs them.
#include "stoker/curm/reserves.h"

#include <gtest/gtest.h>

namespace stoker::curm {
namespace {

constexpr Reserves::Limits kLimits{1 << 20, 64 << 10, 256 << 10};

// A window in which `stripe` takes `bytes` and others the rest, each little.
void window(Reserves& reserves, uint64_t stripe, uint64_t bytes, uint64_t& cold) {
  for (uint64_t taken = 0; taken < bytes; taken += 4096) reserves.take(stripe, 4096);
  for (uint64_t left = kLimits.window_bytes - bytes; left > 0; left -= 4096) EXPECT_FALSE(reserves.take(++cold, 4096));
}

TEST(Reserves, FollowTheMeasuredRateWithHysteresis) {
  Reserves reserves(kLimits);
  uint64_t cold = 1000;
  window(reserves, 1, 64 << 10, cold);
  EXPECT_EQ(reserves.bytes(), 0U) << "once is not enough";
  window(reserves, 1, 64 << 10, cold);
  EXPECT_EQ(reserves.bytes(1), 256U << 10);
  EXPECT_EQ(reserves.bytes(), 256U << 10) << "and nobody else has one";
  EXPECT_TRUE(reserves.take(1, 128 << 10));
  EXPECT_TRUE(reserves.take(1, 128 << 10));
  EXPECT_FALSE(reserves.take(1, 4096)) << "it is full";
  window(reserves, 1, 32 << 10, cold);  // neither hot nor calm: as it is
  window(reserves, 1, 32 << 10, cold);
  EXPECT_EQ(reserves.bytes(1), 256U << 10);
  for (int i = 0; i < 8; ++i) window(reserves, 1, 0, cold);
  EXPECT_EQ(reserves.bytes(1), 256U << 10) << "what is used stays";
  reserves.folded(1);
  for (int i = 0; i < 4; ++i) window(reserves, 1, 0, cold);
  EXPECT_EQ(reserves.bytes(1), 128U << 10);
  for (int i = 0; i < 4; ++i) window(reserves, 1, 0, cold);
  EXPECT_EQ(reserves.bytes(1), 64U << 10);
  for (int i = 0; i < 4; ++i) window(reserves, 1, 0, cold);
  EXPECT_EQ(reserves.bytes(), 0U);
  EXPECT_EQ(reserves.peak_bytes(), 256U << 10);
}

}  // namespace
}  // namespace stoker::curm
