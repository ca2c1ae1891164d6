// Every named state of a coded store, for every code: crashes at each of its durable steps, with
// sets of lost shards. Of 4+2 and 6+3 every set is lost in every state; of 10+4, which has 1471, as
// many as there are cases. --soak takes many more cases, and every set of 10+4 too. What was done
// is in the file coded_enumeration.txt beside this program.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "coded_enumeration.h"
#include "lab.h"

namespace stoker {
namespace {

constexpr KM kCodes[] = {{4, 2}, {6, 3}, {10, 4}};
// under sanitizers the first one: the others take the same paths
constexpr size_t kCodesHere = kLess == 1 ? std::size(kCodes) : 1;
constexpr uint64_t kCases[] = {150, 90, 45};  // as many as take about as long
constexpr uint64_t kSets[] = {1 + 6 + 15, 1 + 9 + 36 + 84, 1 + 14 + 91 + 364 + 1001};

class CodedEnumeration : public ::testing::TestWithParam<std::tuple<size_t, size_t>> {
 protected:
  static void SetUpTestSuite() {
    report_ =
        "state                                       code     crashes  recovered  sets of lost  "
        "lived on  violations\n";
  }
  static void TearDownTestSuite() {
    std::printf("%s", report_.c_str());
    const auto beside =
        std::filesystem::read_symlink("/proc/self/exe").replace_filename("coded_enumeration.txt");
    std::ofstream file(beside);
    file << report_;
    file.close();
    EXPECT_TRUE(file) << beside << " cannot be written";
  }
  static void tell(const std::string& name, const KM& code, const Enumerated& found) {
    char line[200];
    std::snprintf(line, sizeof line, "%-42s %5s %10llu %10llu %6llu / %-5llu %9llu %11llu\n",
                  name.c_str(), code.text().c_str(), static_cast<unsigned long long>(found.states),
                  static_cast<unsigned long long>(found.cases),
                  static_cast<unsigned long long>(found.failure_sets),
                  static_cast<unsigned long long>(found.failure_sets_all),
                  static_cast<unsigned long long>(found.lived_on),
                  static_cast<unsigned long long>(found.violations));
    report_ += line;
  }
  static inline std::string report_;
};

TEST_P(CodedEnumeration, EveryCrashAndLossLeavesACommittedState) {
  const auto [state_index, code_index] = GetParam();
  const NamedState& state = named_states()[state_index];
  const KM& code = kCodes[code_index];
  EnumerationEffort effort;
  effort.cases = std::max<uint64_t>(24, kCases[code_index] / kLess) * soak_factor;
  effort.every_set = kLess == 1 && (code.m < 4 || soak_factor > 1);
  const Enumerated found = enumerate(code, state, 1000 + state_index * 10 + code_index, effort);
  tell(state.name, code, found);
  EXPECT_EQ(found.violations, 0U) << found.first;
  if (state.kind == NamedState::Kind::gone_records) {  // more than may be is damaged in each case
    EXPECT_EQ(found.cases, 10U);
    return;
  }
  EXPECT_GE(found.cases, std::min<uint64_t>(effort.cases, 24));
  // A parity that lost what it staged is in trouble in every case: with m others it would be one
  // too many.
  if (state.kind != NamedState::Kind::lost_stage) {
    EXPECT_EQ(found.failure_sets_all, kSets[code_index]);
  }
  if (effort.every_set) {
    EXPECT_EQ(found.failure_sets, found.failure_sets_all);
  } else {
    EXPECT_GE(found.failure_sets, std::min<uint64_t>(effort.cases, kSets[code_index]) / 2);
  }
}

INSTANTIATE_TEST_SUITE_P(States, CodedEnumeration,
                         ::testing::Combine(::testing::Range<size_t>(0, named_states().size()),
                                            ::testing::Range<size_t>(0, kCodesHere)),
                         [](const ::testing::TestParamInfo<CodedEnumeration::ParamType>& test) {
                           const KM& code = kCodes[std::get<1>(test.param)];
                           return named_states()[std::get<0>(test.param)].name + "_" +
                                  std::to_string(code.k) + "_" + std::to_string(code.m);
                         });

}  // namespace
}  // namespace stoker
