// Every flush of a cluster on files is needed: here its sources are built with deliberate bugs
// (curm/mutation.h), each of which leaves one flush out or believes in it too early; the stories of
// testing/shard_stories.h must find each.
#include <gtest/gtest.h>

#include <cstdio>

#include "curm/mutation.h"
#include "curm/shard_stories.h"
#include "lab.h"
#include "mutants.h"

#ifndef STOKER_MUTATIONS
#error "the cluster of this test must be built with mutations"
#endif

namespace stoker::curm {
namespace {

struct Bug {
  Mutation mutation;
  const char* name;
};
constexpr Bug kBugs[] = {
    {Mutation::skip_log_flush, "skip_log_flush"},
    {Mutation::skip_data_flush, "skip_data_flush"},
    {Mutation::skip_parity_flush, "skip_parity_flush"},
    {Mutation::acknowledge_followers, "acknowledge_followers"},
    {Mutation::count_late_writes, "count_late_writes"},
    {Mutation::skip_full_segment_flush, "skip_full_segment_flush"},
    {Mutation::skip_begin_flush, "skip_begin_flush"},
    {Mutation::skip_making_flush, "skip_making_flush"},
    {Mutation::skip_opening_flush, "skip_opening_flush"},
    {Mutation::skip_proposal_flush, "skip_proposal_flush"},
    {Mutation::skip_confirmation_flush, "skip_confirmation_flush"},
    {Mutation::skip_blanking_flush, "skip_blanking_flush"},
    {Mutation::skip_admission_flush, "skip_admission_flush"},
};

constexpr uint64_t kStories = 42;  // six turns of the schemes

std::string caught_by(Mutation bug, uint64_t stories) {
  return caught_in_a_child([=] {
    mutation<Mutation> = bug;
    for (uint64_t seed = 1; seed <= stories; ++seed) {
      if (const std::string wrong = all_stories(seed); !wrong.empty())
        return "seed " + std::to_string(seed) + ", " + wrong;
    }
    return std::string();
  });
}

class CurmMutation : public testing::TestWithParam<Bug> {};

TEST_P(CurmMutation, IsCaught) {
  const std::string caught = caught_by(GetParam().mutation, kStories);
  std::printf("%s: caught by %s\n", GetParam().name, caught.empty() ? "nothing" : caught.c_str());
  EXPECT_NE(caught, "");
}

INSTANTIATE_TEST_SUITE_P(Bugs, CurmMutation, testing::ValuesIn(kBugs),
                         [](const auto& test) { return std::string(test.param.name); });

// And it is the bugs that are caught.
TEST(CurmMutants, NothingIsCaughtWhereThereIsNone) {
  EXPECT_EQ(caught_by(Mutation::none, kStories / kLess * soak_factor), "");
}

}  // namespace
}  // namespace stoker::curm
