#include "stoker/curm/replay.h"

#include <gtest/gtest.h>

#include "stoker/curm/generator.h"

namespace stoker::curm {
namespace {
TEST(Replay, Runs) {
  const Trace trace = generate(*find_profile("wdev"), 1);
  for (const std::string_view scheme : kSchemes) {
    const auto result = replay(trace, scheme, Form::safe, {});
    ASSERT_TRUE(result);
    EXPECT_GT(result->updates_per_second, 0);
  }
}
}  // namespace
}  // namespace stoker::curm
