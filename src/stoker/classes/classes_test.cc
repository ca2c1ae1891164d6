#include "stoker/classes/classes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "stoker/curm/generator.h"

namespace stoker {
namespace {

using testing::HasSubstr;

constexpr std::string_view kByWrites = R"({"nodes": [
  {"feature": "log_writes", "threshold": 0.5, "left": 1, "right": 2}, {"class": "read_only"},
  {"feature": "rewrite_ratio", "threshold": 0.25, "left": 3, "right": 4}, {"class": "write_only"}, {"class": "read_write"}]})";

ClassFeatures features(float writes, float rewrites) {
  ClassFeatures all{};
  all[1] = writes;
  all[2] = rewrites;
  return all;
}

TEST(Classes, AreKnownByTheirNames) {
  for (size_t each = 0; each < kClasses.size(); ++each) EXPECT_EQ(class_of(kClasses[each]), static_cast<Class>(each));
  EXPECT_FALSE(class_of("read"));
  EXPECT_FALSE(class_of(""));
}

TEST(ClassTree, SaysWhatItsNodesSay) {
  const auto tree = ClassTree::parse(kByWrites);
  ASSERT_TRUE(tree) << tree.error().message();
  EXPECT_EQ(tree->classify(features(0, 0)), Class::read_only);
  EXPECT_EQ(tree->classify(features(3, 0.25F)), Class::write_only);
  EXPECT_EQ(tree->classify(features(3, 0.26F)), Class::read_write);
  EXPECT_EQ(tree->contrary().classify(features(3, 0.26F)), Class::write_only);
  EXPECT_EQ(tree->contrary().classify(features(3, 0)), Class::read_write);
}

TEST(ClassTree, TheOneThatShipsKnowsTheClasses) {
  EXPECT_EQ(ClassTree::shipped().classify({}), Class::read_only);  // never written
  std::array<int, 3> said{};
  ClassTable table(ClassTree::shipped());
  table.on_sample([&](const ClassFeatures& known, Class) { ++said[static_cast<size_t>(ClassTree::shipped().classify(known))]; });
  const curm::Trace trace = curm::generate(*curm::find_profile("vm"), 9, 30'000);
  for (const curm::Request& request : trace.requests) table.see(request.offset >> 20, curm::access_of(request));
  for (const int times : said) EXPECT_GT(times, 0);
}

TEST(ClassTree, RefusesWhatIsNoTree) {
  const auto refusal = [](std::string_view text) {
    const auto tree = ClassTree::parse(text);
    return tree ? std::string("taken") : tree.error().what;
  };
  EXPECT_THAT(refusal(""), HasSubstr("not JSON"));
  EXPECT_THAT(refusal("[1]"), HasSubstr("not JSON with a list"));
  EXPECT_THAT(refusal(R"({"nodes": []})"), HasSubstr("0 nodes"));
  EXPECT_THAT(refusal(R"({"nodes": [7]})"), HasSubstr("node 0 is no object"));
  EXPECT_THAT(refusal(R"({"nodes": [{"class": "hot"}]})"), HasSubstr("none of ours"));
  EXPECT_THAT(refusal(R"({"nodes": [{"feature": "size", "threshold": 1, "left": 1, "right": 1}, {"class": "read_only"}]})"), HasSubstr("feature of node 0"));
  EXPECT_THAT(refusal(R"({"nodes": [{"feature": "read_share", "threshold": 1, "left": 0, "right": 1}, {"class": "read_only"}]})"), HasSubstr("not behind it"));
  EXPECT_THAT(refusal(R"({"nodes": [{"feature": "read_share", "threshold": 1, "left": 1, "right": 9}, {"class": "read_only"}]})"), HasSubstr("not behind it"));
  EXPECT_THAT(refusal(R"({"nodes": [{"feature": "read_share", "left": 1, "right": 1}, {"class": "read_only"}]})"), HasSubstr("has neither a class nor"));
  std::string chain = R"({"nodes": [)";
  for (int i = 0; i < 7; ++i) chain += R"({"feature": "read_share", "threshold": 1, "left": )" + std::to_string(i + 1) + R"(, "right": )" + std::to_string(i + 1) + "},";
  EXPECT_THAT(refusal(chain + R"({"class": "read_only"}]})"), HasSubstr("deeper than 6"));
}

constexpr uint64_t kMiBytes = 1 << 20;

// One object that is rewritten, others that are written once, in each window.
void rewrite(ClassTable& table, uint64_t& fresh) {
  for (uint64_t i = 0; i < ClassTable::kWindow; ++i) {
    if (i % 2 == 0) {
      table.see(1, {0, true, 4096 * (i % 8), 4096});
    } else {
      table.see(2, {0, true, kMiBytes + 4096 * fresh++, 4096});
    }
  }
}

TEST(ClassTable, ChangesAClassWhenItWasSaidTwiceInARow) {
  const auto tree = ClassTree::parse(kByWrites);
  ASSERT_TRUE(tree);
  ClassTable table(*tree);
  uint64_t fresh = 0;
  EXPECT_EQ(table.of(2), Class::read_write);  // nothing is known
  rewrite(table, fresh);
  EXPECT_EQ(table.of(2), Class::read_write);  // said once
  rewrite(table, fresh);
  EXPECT_EQ(table.of(2), Class::write_only);
  EXPECT_EQ(table.of(1), Class::read_write);
  EXPECT_EQ(table.score().judged, 2U);
  EXPECT_EQ(table.score().right, 2U);
  EXPECT_EQ(table.score().distrusted, 0U);
}

TEST(ClassTable, DoesNotListenToATreeThatIsWorseThanTheMajority) {
  const auto tree = ClassTree::parse(R"({"nodes": [{"class": "write_only"}]})");
  ASSERT_TRUE(tree);
  ClassTable table(*tree);
  uint64_t at = 0;
  for (int window = 0; window < 12; ++window) {  // everything is rewritten, always
    for (uint64_t i = 0; i < ClassTable::kWindow; ++i, ++at) table.see(i % 4, {0, true, 4096 * (i % 8), 4096});
  }
  EXPECT_GT(table.score().distrusted, 5U);
  EXPECT_EQ(table.score().right, 0U);
  EXPECT_EQ(table.of(1), Class::read_write);  // the prior
}

TEST(ClassTable, JudgesByWhatHappenedNext) {
  ClassTable table(ClassTree::shipped());
  std::vector<std::pair<ClassFeatures, Class>> samples;
  table.on_sample([&](const ClassFeatures& known, Class was) { samples.emplace_back(known, was); });
  for (uint64_t i = 0; i < ClassTable::kWindow; ++i) table.see(7, {0, true, 4096 * (i % 16), 4096});  // rewritten in the first window
  EXPECT_TRUE(samples.empty());
  for (uint64_t i = 0; i < ClassTable::kWindow; ++i) table.see(7, {0, false, 0, 8192});  // only read in the second
  ASSERT_EQ(samples.size(), 1U);
  EXPECT_EQ(samples[0].second, Class::read_only);
  EXPECT_EQ(samples[0].first[0], 0.F);                        // no reads until then
  EXPECT_NEAR(samples[0].first[2], 1 - 16.0 / 1024, 1e-5);    // all but the first round of writes
  EXPECT_NEAR(samples[0].first[3], 12, 0.01);                 // of 4 KiB
  EXPECT_NEAR(samples[0].first[4], 960.0 / 1024, 0.01);       // each round begins anew
  EXPECT_NEAR(samples[0].first[6], std::log2(17.F), 1e-5);
}

// A stated class is not changed by what the object does; a learnt one goes on from where it was; a forgotten object begins anew.
TEST(ClassTable, KeepsWhatIsStatedAndGoesOnFromWhatWasLearnt) {
  const auto tree = ClassTree::parse(kByWrites);
  ASSERT_TRUE(tree);
  ClassTable table(*tree);
  table.set(1, {Class::read_only, true});
  table.set(2, {Class::write_only, false});
  EXPECT_EQ(table.of(1), Class::read_only);
  EXPECT_EQ(table.of(2), Class::write_only);
  EXPECT_FALSE(table.known(3));
  for (uint64_t window = 0; window < 4; ++window) {  // both are rewritten
    for (uint64_t i = 0; i < ClassTable::kWindow; ++i) table.see(1 + i % 2, {0, true, 4096 * (i % 8), 4096});
  }
  EXPECT_EQ(table.of(1), Class::read_only);
  EXPECT_EQ(table.of(2), Class::read_write);
  EXPECT_EQ(table.known(1), (ClassTable::Known{Class::read_only, true}));
  EXPECT_EQ(table.known(2), (ClassTable::Known{Class::read_write, false}));
  EXPECT_GT(table.memory_bytes(), 0U);
  table.see(2, {0, true, 0, 4096});  // touched in the window in which it is forgotten
  table.forget(2);
  table.forget(3);
  EXPECT_FALSE(table.known(2));
  for (uint64_t i = 0; i < ClassTable::kWindow; ++i) table.see(1, {0, true, 0, 4096});
  EXPECT_FALSE(table.known(2));
  EXPECT_EQ(table.of(2), Class::read_write);
}

}  // namespace
}  // namespace stoker
