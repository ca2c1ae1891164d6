// A checker that cannot fail proves nothing: here the coded store is built with deliberate bugs
// (store/coded/mutation.h), and each of them, switched on alone, must be caught by the enumeration
// or by the simulation. Each runs in a process of its own: what a bug makes the store's own checks
// end is caught too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "coded_enumeration.h"
#include "coded_sim.h"
#include "lab.h"
#include "mutants.h"
#include "stoker/store/coded/mutation.h"

#ifndef STOKER_MUTATIONS
#error "the coded store of this test must be built with mutations"
#endif

namespace stoker {
namespace {

using coded::Mutation;

struct Bug {
  Mutation mutation;
  const char* name;
};
constexpr Bug kBugs[] = {
    {Mutation::skip_flush, "skip_flush"},
    {Mutation::acknowledge_before_parity, "acknowledge_before_parity"},
    {Mutation::drop_commit, "drop_commit"},
    {Mutation::commit_before_blocks, "commit_before_blocks"},
    {Mutation::val_without_flag, "val_without_flag"},
    {Mutation::size_outside_commit, "size_outside_commit"},
    {Mutation::delta_against_new, "delta_against_new"},
    {Mutation::apply_delta_twice, "apply_delta_twice"},
    {Mutation::fold_oldest, "fold_oldest"},
    {Mutation::skip_stage, "skip_stage"},
    {Mutation::skip_fold_record, "skip_fold_record"},
    {Mutation::header_before_blocks, "header_before_blocks"},
    {Mutation::reuse_segment_early, "reuse_segment_early"},
    {Mutation::ignore_epoch, "ignore_epoch"},
    {Mutation::no_durable_exclusion, "no_durable_exclusion"},
    {Mutation::admit_stale, "admit_stale"},
    {Mutation::resync_without_vals, "resync_without_vals"},
    {Mutation::skip_crc, "skip_crc"},
    {Mutation::decode_disagreeing, "decode_disagreeing"},
    {Mutation::decode_unchecked, "decode_unchecked"},
    {Mutation::believe_old_vals, "believe_old_vals"},
    {Mutation::ignore_told, "ignore_told"},
    {Mutation::settle_nothing, "settle_nothing"},
};

constexpr KM kCode{4, 2};

// Which check catches what is switched on, and how; empty: none does.
std::string caught_by() {
  std::vector<NamedState> states = named_states();
  std::rotate(states.begin(), states.end() - 1, states.end());  // the last one is quick
  for (const NamedState& state : states) {
    // cases in which a bug shows
    const bool rare = state.kind == NamedState::Kind::rotten_pages || state.name == "full_logs";
    const Enumerated found =
        enumerate(kCode, state, 7, {.cases = rare ? 500U : 120U, .stop_after = 1});
    if (found.violations > 0)
      return "the enumeration, " + state.name + ", case " + std::to_string(found.cases) + ": " +
             found.first;
  }
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const SimStory story = simulate_coded(seed);
    if (!story.wrong.empty())
      return "the simulation, seed " + std::to_string(seed) + ": " + story.wrong;
  }
  return {};
}

std::string caught_in_a_child(Mutation bug) {
  return stoker::caught_in_a_child([bug] {
    mutation<Mutation> = bug;
    return caught_by();
  });
}

class CodedMutation : public ::testing::TestWithParam<Bug> {};

TEST_P(CodedMutation, IsCaught) {
  const std::string caught = caught_in_a_child(GetParam().mutation);
  std::printf("%s: caught by %s\n", GetParam().name, caught.empty() ? "nothing" : caught.c_str());
  EXPECT_NE(caught, "");
}

INSTANTIATE_TEST_SUITE_P(Bugs, CodedMutation, ::testing::ValuesIn(kBugs),
                         [](const auto& test) { return std::string(test.param.name); });

// And it is the bugs that are caught: without any the same checks find nothing.
TEST(CodedMutants, NothingIsCaughtWhereThereIsNone) {
  EXPECT_EQ(caught_in_a_child(Mutation::none), "");
}

}  // namespace
}  // namespace stoker
