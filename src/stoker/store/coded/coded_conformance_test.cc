// CodedStore passes the suite that every Store passes, with all shards there and with any m of them lost.
#include "stoker/testing/coded_world.h"
#include "stoker/testing/store_conformance.h"

namespace stoker {
namespace {

using coded::CodedWorld;
using coded::CodedWorldOptions;

StoreUnderTest on(const char* name, const CodedWorldOptions& options) {
  return {name, [options] { return std::make_unique<CodedWorld>(options); }};
}

std::vector<StoreUnderTest> stores() {
  const std::vector<StoreUnderTest> all = {on("all_of_4_2", {.k = 4, .m = 2, .scrub_rate = 1 << 30, .faults = true}), on("over_8_disks", {.k = 4, .m = 2, .shards = 8, .lost = {1, 6}}),
                                           on("lost_first_of_6_3", {.k = 6, .m = 3, .lost = {0, 1, 2}}), on("lost_two_of_4_2", {.k = 4, .m = 2, .lost = {3, 5}})};
  return {all.begin(), all.begin() + (kLess == 1 ? 4 : 2)};  // the others take the same paths
}

INSTANTIATE_TEST_SUITE_P(Coded, StoreConformance, ::testing::ValuesIn(stores()), store_name);

}  // namespace
}  // namespace stoker
