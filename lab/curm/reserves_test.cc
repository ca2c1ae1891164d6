// Reserves grow with what a stripe is updated with and shrink when that stops; and what
// curm-reserve does with them when the logs are full.
#include "curm/reserves.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "curm/curm.h"
#include "curm/model.h"

namespace stoker::curm {
namespace {

constexpr Reserves::Limits kLimits{1 << 20, 64 << 10, 256 << 10};

// A window in which `stripe` takes `bytes` and others the rest, each little.
void window(Reserves& reserves, uint64_t stripe, uint64_t bytes, uint64_t& cold) {
  for (uint64_t taken = 0; taken < bytes; taken += 4096) reserves.take(stripe, 4096, true);
  for (uint64_t left = kLimits.window_bytes - bytes; left > 0; left -= 4096)
    reserves.take(++cold, 4096, true);
}

TEST(Reserves, FollowTheMeasuredRateWithHysteresis) {
  Reserves reserves(kLimits);
  uint64_t cold = 1000;
  window(reserves, 1, 64 << 10, cold);
  EXPECT_EQ(reserves.bytes(), 0U) << "once is not enough";
  window(reserves, 1, 0, cold);
  window(reserves, 1, 64 << 10, cold);
  EXPECT_EQ(reserves.bytes(), 0U) << "nor is twice, not in a row";
  window(reserves, 1, 36 << 10, cold);
  EXPECT_EQ(reserves.bytes(), 0U) << "nor half as much";
  window(reserves, 1, 64 << 10, cold);
  window(reserves, 1, 64 << 10, cold);
  EXPECT_EQ(reserves.bytes(1), 256U << 10);
  EXPECT_EQ(reserves.bytes(), 256U << 10) << "and nobody else has one";
  window(reserves, 1, 512 << 10, cold);
  EXPECT_EQ(reserves.bytes(1), 256U << 10) << "the limit";
  for (int i = 0; i < 8; ++i) window(reserves, 1, 32 << 10, cold);
  EXPECT_EQ(reserves.bytes(1), 256U << 10) << "neither hot nor calm: as it is";
  for (const uint64_t left : {128, 64, 0}) {
    for (int i = 0; i < 3; ++i) window(reserves, 1, 0, cold);
    EXPECT_EQ(reserves.bytes(1), left == 0 ? 64U << 10 : 2 * left << 10)
        << "three windows are not enough";
    window(reserves, 1, 0, cold);
    EXPECT_EQ(reserves.bytes(1), left << 10);
  }
  EXPECT_EQ(reserves.bytes(), 0U);
  EXPECT_EQ(reserves.peak_bytes(), 256U << 10);
}

TEST(Reserves, AreForThoseThatMayHaveOne) {
  Reserves reserves(kLimits);
  uint64_t cold = 1000;
  for (int i = 0; i < 4; ++i) {
    for (uint64_t taken = 0; taken < kLimits.window_bytes / 2; taken += 4096)
      reserves.take(1, 4096, false);
    for (uint64_t taken = 0; taken < kLimits.window_bytes / 4; taken += 4096)
      reserves.take(2, 4096, true);
    for (uint64_t taken = 0; taken < kLimits.window_bytes / 4; taken += 4096)
      reserves.take(++cold, 4096, true);
  }
  EXPECT_EQ(reserves.bytes(1), 0U);
  EXPECT_EQ(reserves.bytes(2), 256U << 10);
}

// A scheme on a cluster that only counts; reserves of at most 16 KiB, so windows of 1 MiB.
struct Logs {
  explicit Logs(std::string_view name)
      : scheme(make_scheme(name, {&model,
                                  {2, 1, 3, 64 << 10, 0},
                                  *codec::ErasureCode::make(2, 1),
                                  Form::safe,
                                  16 << 10})) {}
  void write(uint64_t stripe, uint64_t bytes) {
    ASSERT_TRUE(scheme->update({{stripe, 0}, 0, Value::sized(bytes)}));
  }
  // Stripes that are not touched again.
  void scan(uint64_t bytes) {
    for (uint64_t done = 0; done < bytes; done += 64 << 10) write(++cold, 64 << 10);
  }
  std::vector<uint64_t> make_room(uint64_t bytes) {
    const std::vector<uint64_t> stripes = scheme->make_room(bytes);
    for (const uint64_t stripe : stripes) EXPECT_TRUE(scheme->fold(stripe));
    return stripes;
  }
  Model model{kSsd};
  std::unique_ptr<Scheme> scheme;
  uint64_t cold = 1000;
};

constexpr uint64_t kWindow = 1 << 20;

TEST(ReservedCurm, KeepsWhatAHotStripeLoggedWithinItsReserve) {
  for (const std::string_view name : {"curm", "curm-reserve"}) {
    SCOPED_TRACE(name);
    const bool reserves = name == "curm-reserve";
    Logs logs(name);
    for (int i = 0; i < 2; ++i) {
      logs.write(1, 8 << 10);   // within a reserve
      logs.write(2, 32 << 10);  // beyond it
      logs.scan(kWindow);
    }
    EXPECT_EQ(logs.scheme->reserved_peak_bytes(), reserves ? (1 + 1) * 2 * (16U << 10) : 0U)
        << "of both stripes, on D and the parity";
    logs.scan(kWindow);
    const std::vector<uint64_t> folded = logs.make_room(2 * kWindow);
    EXPECT_EQ(std::count(folded.begin(), folded.end(), 1U), reserves ? 0 : 1);
    EXPECT_EQ(std::count(folded.begin(), folded.end(), 2U), 1);
    EXPECT_EQ(folded.size(), 2 * kWindow / (64 << 10) + (reserves ? 1 : 2))
        << "and others, longest untouched";
    for (int i = 0; i < 12; ++i) {
      logs.scan(kWindow);
      logs.make_room(kWindow);
    }
    const std::vector<uint64_t> left = logs.scheme->pending();
    EXPECT_EQ(std::count(left.begin(), left.end(), 1U), 0)
        << "nothing is kept of who is hot no more";
  }
}

TEST(ReservedCurm, GivesNothingToStripesOfOtherClasses) {
  Logs logs("curm-reserve");
  dynamic_cast<Curm&>(*logs.scheme).set_classes([](uint64_t stripe) {
    return stripe == 1 ? Class::write_only : Class::read_write;
  });
  for (int i = 0; i < 4; ++i) {
    logs.write(1, 8 << 10);
    logs.scan(kWindow);
  }
  EXPECT_EQ(logs.scheme->reserved_peak_bytes(), 0U);
}

// Stripes that are rewritten after more than the logs hold came by: what is kept of them is
// overtaken, and folded once in the end.
TEST(ReservedCurm, FoldsLessWhereScansComeBetween) {
  const auto background_bytes = [](std::string_view name) {
    Logs logs(name);
    for (int i = 0; i < 20; ++i) {
      for (uint64_t stripe = 1; stripe <= 8; ++stripe) logs.write(stripe, 8 << 10);
      for (int j = 0; j < 4; ++j) {
        logs.scan(kWindow / 4);
        if (logs.scheme->logged_bytes() >= kWindow) logs.make_room(kWindow);
      }
    }
    EXPECT_TRUE(logs.scheme->fold_all());
    return logs.model.counts().background_payload_bytes;
  };
  const uint64_t with = background_bytes("curm-reserve"), without = background_bytes("curm");
  EXPECT_LT(with, without);
}

}  // namespace
}  // namespace stoker::curm
