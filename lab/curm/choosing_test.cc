// Choosing: what it chooses by what is measured, that it costs little beside the best scheme of all
// stripes, and that stripes given another scheme without a word on the disk survive crashes.
#include "curm/choosing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "curm/generator.h"
#include "curm/replay.h"
#include "curm/schemes_lab.h"
#include "stoker/testing/sanitized.h"

namespace stoker::curm {
namespace {

// Turns the stripe of every third update to the other scheme, as Choosing may.
class Turning final : public SchemeSwitch {
 public:
  explicit Turning(const Setup& setup) : SchemeSwitch(setup, "curm") {}
  Status update(const Update& update) override {
    STOKER_TRY(about_to(update));
    return SchemeSwitch::update(update);
  }
  Status update_together(const std::vector<Update>& pieces) override {
    STOKER_TRY(about_to(pieces[0]));
    return SchemeSwitch::update_together(pieces);
  }

 private:
  Status about_to(const Update& update) {
    if (++updates_ % 3 != 0) return {};
    const uint64_t stripe = update.chunk.stripe;
    return turn(stripe, scheme_of(stripe) == "fo" ? "curm" : "fo");
  }
  uint64_t updates_ = 0;
};

std::unique_ptr<Scheme> turning(const Setup& setup) {
  Setup own = setup;
  own.numbers = std::make_shared<Numbers>();
  own.gap_max = 700;  // so that folds read along what they do not need
  return std::make_unique<Turning>(own);
}

TEST(Turning, HoldsNewestDataAndItsParityAtRest) {
  for (const Form form : {Form::published, Form::safe}) {
    for (uint64_t seed = 1; seed <= 24; ++seed)
      EXPECT_EQ(calm_run(turning, form, seed), "") << "seed " << seed;
  }
  for (uint64_t seed = 2; seed <= 20; seed += 2)
    EXPECT_EQ(rebuild_in_service(turning, Form::safe, seed), "") << "seed " << seed;
}

TEST(Turning, SurvivesCrashesAndLosses) {
  for (uint64_t seed = 1; seed <= 150 / kLess; ++seed)
    EXPECT_EQ(crash_run(turning, seed), "") << "seed " << seed;
  uint64_t late = 0;
  for (uint64_t point = 0; point < 60; point += 3 * kLess)
    ASSERT_EQ(recovery_sweep(turning, in_memory, point, 0, 3 * kLess, late), "");
}

TEST(Choosing, HoldsNewestDataAndSurvivesCrashes) {
  for (uint64_t seed = 1; seed <= 12; ++seed)
    EXPECT_EQ(calm_run(by_name(kChoose), Form::safe, seed), "") << "seed " << seed;
  for (uint64_t seed = 1; seed <= 30 / kLess; ++seed)
    EXPECT_EQ(crash_run(by_name(kChoose), seed), "") << "seed " << seed;
}

ReplayResult played(const Trace& trace, std::string_view scheme,
                    const ReplayOptions& options = {}) {
  auto result = replay(trace, scheme, Form::safe, options);
  EXPECT_TRUE(result) << scheme;
  return result ? *result : ReplayResult();
}

// Pages at random places are not logged: the counts are those of full overwrite, but for the first
// ones. What is rewritten all the time is logged, from the first update.
TEST(Choosing, LogsWhatIsRewritten) {
  const Trace scattered = generate(*find_profile("oltp"), 1, 12'000);
  const ReplayResult chosen = played(scattered, kChoose);
  EXPECT_GT(chosen.counts.random_writes, chosen.updates * 4 * 9 / 10);
  EXPECT_LT(chosen.counts.random_writes, chosen.updates * 4);
  const ReplayResult hot = played(generate(*find_profile("wdev"), 1), kChoose);
  EXPECT_EQ(hot.counts.random_writes, 0U);
  EXPECT_EQ(hot.counts.reads, 0U);
}

// The promise of docs/curm.md on traces of which each fills small logs several times;
// bench/choose.py plays longer ones. Seed 21: the limits were chosen on others.
TEST(Choosing, IsCloseToTheBestOfAllSchemes) {
  ReplayOptions options;
  options.log_bytes = 8 << 20;
  options.reserved_bytes = 32 << 10;
  for (const std::string_view profile : {"hm", "rsrch", "postmark", "oltp", "wdev"}) {
    const Trace trace = generate(*find_profile(profile), 21, profile == "wdev" ? 0 : 8'000);
    const ReplayResult chosen = played(trace, kChoose, options);
    for (const std::string_view fixed : {"fo", "fl", "vdl", "curm"}) {
      const ReplayResult other = played(trace, fixed, options);
      EXPECT_GT(chosen.updates_per_second, 0.95 * other.updates_per_second)
          << profile << ' ' << fixed;
      EXPECT_GT(chosen.drained_updates_per_second, 0.95 * other.drained_updates_per_second)
          << profile << ' ' << fixed;
    }
  }
}

}  // namespace
}  // namespace stoker::curm
