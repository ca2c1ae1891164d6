// CodedStore passes the suite that every Store passes, with all shards there and with any m of them
// lost. The pairs of 4+2 take turns from test to test: a run has each of the 15 in some tests, and
// each test without four of them (all of them in all tests would take half a minute more).
#include <cstdio>
#include <set>

#include "stoker/testing/coded_world.h"
#include "stoker/testing/store_conformance.h"

namespace stoker {
namespace {

using coded::CodedWorld;
using coded::CodedWorldOptions;

StoreUnderTest on(const std::string& name, const CodedWorldOptions& options) {
  return {name, [options] { return std::make_unique<CodedWorld>(options); }};
}

// How many tests of the suite stand before the one that runs, whichever of them were chosen.
size_t tests_before() {
  const auto& unit = *::testing::UnitTest::GetInstance();
  std::set<std::string> names;
  for (int i = 0; unit.current_test_suite()->GetTestInfo(i) != unit.current_test_info(); ++i) {
    const std::string name = unit.current_test_suite()->GetTestInfo(i)->name();
    names.insert(name.substr(0, name.find('/')));
  }
  const std::string own = unit.current_test_info()->name();
  return names.size() - names.count(own.substr(0, own.find('/')));
}

StoreUnderTest on_pairs(size_t turn) {
  constexpr size_t kPairs = 15, kApart = 4;
  const auto make = [turn] {
    std::vector<std::vector<size_t>> pairs;
    for (size_t one = 0; one < 6; ++one) {
      for (size_t other = one + 1; other < 6; ++other) pairs.push_back({one, other});
    }
    const std::vector<size_t>& lost = pairs.at((tests_before() + turn * kApart) % kPairs);
    std::printf("without shards %zu and %zu\n", lost[0], lost[1]);
    return std::make_unique<CodedWorld>(CodedWorldOptions{.k = 4, .m = 2, .lost = lost});
  };
  return {"lost_a_pair_of_4_2_turn_" + std::to_string(turn), make};
}

std::vector<StoreUnderTest> stores() {
  std::vector<StoreUnderTest> all = {
      on("all_of_4_2", {.k = 4, .m = 2, .scrub_rate = 1 << 30, .faults = true}),
      on("over_8_disks", {.k = 4, .m = 2, .shards = 8, .lost = {1, 6}})};
  if (kLess != 1) return all;  // under sanitizers: the others take the same paths
  all.push_back(on("lost_first_of_6_3", {.k = 6, .m = 3, .lost = {0, 1, 2}}));
  for (size_t turn = 0; turn < 4; ++turn) all.push_back(on_pairs(turn));
  return all;
}

INSTANTIATE_TEST_SUITE_P(Coded, StoreConformance, ::testing::ValuesIn(stores()), store_name);

}  // namespace
}  // namespace stoker
