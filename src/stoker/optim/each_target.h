// For tests: runs a check once for every instruction set that this machine and this build have.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include "hwy/targets.h"
#include "stoker/optim/optim.h"

namespace stoker::optim {

template <typename Check>
void on_each_target(Check check) {
  int ran = 0;
  for (const int64_t target : {HWY_AVX3, HWY_AVX2, HWY_NEON, HWY_EMU128}) {
    if ((hwy::SupportedTargets() & target) == 0) continue;
    hwy::SetSupportedTargetsForTest(target);
    const char* expected = target == HWY_EMU128 ? "scalar" : hwy::TargetName(target);
    EXPECT_STREQ(target_name(), expected);  // the mock took effect
    SCOPED_TRACE(target_name());
    check();
    hwy::SetSupportedTargetsForTest(0);
    ++ran;
  }
  EXPECT_GE(ran, 1);
}

}  // namespace stoker::optim
