// Every named state of a coded store, for every code: crashes at each of its durable steps, with sets of lost shards. In CI so many cases of each,
// spread evenly and with as many different sets as there are cases; --soak takes many more, which are all there are for the small ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "coded_enumeration.h"
#include "lab.h"

namespace stoker {
namespace {

constexpr KM kCodes[] = {{4, 2}, {6, 3}, {10, 4}};

class CodedEnumeration : public ::testing::TestWithParam<std::tuple<size_t, size_t>> {
 protected:
  static void SetUpTestSuite() { report_ = "state                                       code     crashes  recovered  sets of lost  lived on  violations\n"; }
  static void TearDownTestSuite() { std::printf("%s", report_.c_str()); }
  static void tell(const std::string& name, const KM& code, const Enumerated& found) {
    char line[200];
    std::snprintf(line, sizeof line, "%-42s %5s %10llu %10llu %6llu / %-5llu %9llu %11llu\n", name.c_str(), code.text().c_str(), static_cast<unsigned long long>(found.states), static_cast<unsigned long long>(found.cases),
                  static_cast<unsigned long long>(found.failure_sets), static_cast<unsigned long long>(found.failure_sets_all), static_cast<unsigned long long>(found.lived_on), static_cast<unsigned long long>(found.violations));
    report_ += line;
  }
  static inline std::string report_;
};

TEST_P(CodedEnumeration, EveryCrashAndLossLeavesACommittedState) {
  const auto [state_index, code_index] = GetParam();
  const NamedState& state = named_states()[state_index];
  const KM& code = kCodes[code_index];
  constexpr uint64_t kCases[] = {150, 90, 45};  // as many as take about as long
  const Enumerated found = enumerate(code, state, 1000 + state_index * 10 + code_index, std::max<uint64_t>(24, kCases[code_index] / kLess) * soak_factor);
  tell(state.name, code, found);
  EXPECT_GT(found.cases, 20U);
  EXPECT_EQ(found.violations, 0U) << found.first;
}

INSTANTIATE_TEST_SUITE_P(States, CodedEnumeration, ::testing::Combine(::testing::Range<size_t>(0, named_states().size()), ::testing::Range<size_t>(0, std::size(kCodes))),
                         [](const ::testing::TestParamInfo<CodedEnumeration::ParamType>& test) {
                           const KM& code = kCodes[std::get<1>(test.param)];
                           return named_states()[std::get<0>(test.param)].name + "_" + std::to_string(code.k) + "_" + std::to_string(code.m);
                         });

}  // namespace
}  // namespace stoker
