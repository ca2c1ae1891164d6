// For tests: runs a check once for every instruction set that this machine and this build have.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "stoker/optim/targets.h"

#include "hwy/targets.h"
#include "stoker/optim/optim.h"

namespace stoker::optim {

constexpr int64_t kFallback = HWY_EMU128 | HWY_SCALAR;

// The targets that the kernels were compiled for and this processor has, and the fallback.
inline std::vector<int64_t> targets_here() {
  const int64_t have = (hwy::SupportedTargets() & (HWY_TARGETS)) | kFallback;
  std::vector<int64_t> targets;
  for (int bit = 0; bit < 61; ++bit)
    if ((have >> bit & 1) != 0) targets.push_back(int64_t{1} << bit);
  targets.push_back(HWY_EMU128);  // of the two fallbacks the library has one, and takes either name
  return targets;
}

template <typename Check>
void on_each_target(Check check) {
  for (const int64_t target : targets_here()) {
    hwy::SetSupportedTargetsForTest(target);
    const std::string expected = target == HWY_EMU128 ? "scalar" : hwy::TargetName(target);
    EXPECT_EQ(target_name(), expected);  // the mock took effect
    SCOPED_TRACE(target_name());
    check();
    hwy::SetSupportedTargetsForTest(0);
  }
}

}  // namespace stoker::optim
