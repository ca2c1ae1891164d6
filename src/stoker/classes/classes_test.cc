#include "stoker/classes/classes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace stoker {
namespace {

using testing::HasSubstr;

constexpr std::string_view kByWrites = R"({"nodes": [
  {"feature": "log_writes", "threshold": 0.5, "left": 1, "right": 2}, {"class": "read_only"},
  {"feature": "rewrite_ratio", "threshold": 0.25, "left": 3, "right": 4},
      {"class": "write_only"}, {"class": "read_write"}]})";

ClassFeatures features(float writes, float rewrites) {
  ClassFeatures all{};
  all[1] = writes;
  all[2] = rewrites;
  return all;
}

TEST(Classes, AreKnownByTheirNames) {
  for (size_t each = 0; each < kClasses.size(); ++each)
    EXPECT_EQ(class_of(kClasses[each]), static_cast<Class>(each));
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

TEST(ClassTree, RefusesWhatIsNoTree) {
  const auto refusal = [](std::string_view text) {
    const auto tree = ClassTree::parse(text);
    return tree ? std::string("taken") : tree.error().what;
  };
  EXPECT_THAT(refusal(""), HasSubstr("not JSON"));
  EXPECT_THAT(refusal("[1]"), HasSubstr("not JSON with a list"));
  EXPECT_THAT(refusal(R"({"nodes": []})"), HasSubstr("0 nodes"));
  EXPECT_THAT(refusal(R"({"nodes": [7]})"), HasSubstr("node 0 is not an object"));
  EXPECT_THAT(refusal(R"({"nodes": [{"class": "hot"}]})"), HasSubstr("not one of read_only"));
  EXPECT_THAT(refusal(
                  R"({"nodes": [{"feature": "size", "threshold": 1, "left": 1, "right": 1},
      {"class": "read_only"}]})"),
              HasSubstr("feature of node 0"));
  EXPECT_THAT(refusal(
                  R"({"nodes": [{"feature": "read_share", "threshold": 1, "left": 0, "right": 1},
      {"class": "read_only"}]})"),
              HasSubstr("a child stands behind"));
  EXPECT_THAT(refusal(
                  R"({"nodes": [{"feature": "read_share", "threshold": 1, "left": 1, "right": 9},
      {"class": "read_only"}]})"),
              HasSubstr("a child stands behind"));
  EXPECT_THAT(refusal(
                  R"({"nodes": [{"feature": "read_share", "left": 1, "right": 1},
      {"class": "read_only"}]})"),
              HasSubstr("has neither a class nor"));
  EXPECT_THAT(refusal(R"({"nodes": [{"class": "read_only"}], "created": 7})"),
              HasSubstr("`created` is not a list"));
  EXPECT_THAT(refusal(R"({"nodes": [{"class": "read_only"}], "created": []})"),
              HasSubstr("0 nodes"));
  EXPECT_THAT(refusal(
                  R"({"nodes": [{"class": "read_only"}], "created": [{"feature": "read_share",
      "threshold": 1, "left": 1, "right": 1}, {"class": "read_only"}]})"),
              HasSubstr("feature of node 0"));
  std::string chain = R"({"nodes": [)";
  for (int i = 0; i < 7; ++i)
    chain += R"({"feature": "read_share", "threshold": 1, "left": )" + std::to_string(i + 1) +
             R"(, "right": )" + std::to_string(i + 1) + "},";
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
    for (uint64_t i = 0; i < ClassTable::kWindow; ++i, ++at)
      table.see(i % 4, {0, true, 4096 * (i % 8), 4096});
  }
  EXPECT_GT(table.score().distrusted, 5U);
  EXPECT_EQ(table.score().right, 0U);
  EXPECT_EQ(table.of(1), Class::read_write);  // the prior
}

TEST(ClassTable, JudgesByWhatHappenedNext) {
  ClassTable table(ClassTree::shipped());
  std::vector<std::pair<ClassFeatures, Class>> samples;
  table.on_sample([&](const ClassFeatures& known, Class was) { samples.emplace_back(known, was); });
  // rewritten in the first window
  for (uint64_t i = 0; i < ClassTable::kWindow; ++i) table.see(7, {0, true, 4096 * (i % 16), 4096});
  EXPECT_TRUE(samples.empty());
  // only read in the second
  for (uint64_t i = 0; i < ClassTable::kWindow; ++i) table.see(7, {0, false, 0, 8192});
  ASSERT_EQ(samples.size(), 1U);
  EXPECT_EQ(samples[0].second, Class::read_only);
  EXPECT_EQ(samples[0].first[0], 0.F);                      // no reads until then
  EXPECT_NEAR(samples[0].first[2], 1 - 16.0 / 1024, 1e-5);  // all but the first round of writes
  EXPECT_NEAR(samples[0].first[3], 12, 0.01);               // of 4 KiB
  EXPECT_NEAR(samples[0].first[4], 960.0 / 1024, 0.01);     // each round begins anew
  EXPECT_NEAR(samples[0].first[6], std::log2(17.F), 1e-5);
}

// A stated class is not changed by what the object does; a learnt one goes on from where it was; a
// forgotten object begins anew.
TEST(ClassTable, KeepsWhatIsStatedAndGoesOnFromWhatWasLearnt) {
  const auto tree = ClassTree::parse(kByWrites);
  ASSERT_TRUE(tree);
  ClassTable table(*tree);
  table.set(1, 0, {Class::read_only, true});
  table.set(2, 0, {Class::write_only, false});
  EXPECT_EQ(table.of(1), Class::read_only);
  EXPECT_EQ(table.of(2), Class::write_only);
  EXPECT_FALSE(table.known(3));
  for (uint64_t window = 0; window < 4; ++window) {  // both are rewritten
    for (uint64_t i = 0; i < ClassTable::kWindow; ++i)
      table.see(1 + i % 2, {0, true, 4096 * (i % 8), 4096});
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

CreationFeatures made(std::string_view key, uint64_t bytes = 0, const FolderHistory& folder = {}) {
  return creation_features(key, bytes, folder);
}

TEST(Creation, ReadsWhatANameSays) {
  const auto says = [](std::string_view key) {
    const CreationFeatures known = made(key);
    for (size_t i = 0; i < 4; ++i) {
      if (known[i] > 0) return kCreationFeatureNames[i];
    }
    return std::string_view();
  };
  EXPECT_EQ(says("a/b"), "");
  EXPECT_EQ(says(""), "");
  EXPECT_EQ(says("////"), "");
  EXPECT_EQ(says("x/Datasets-3/00017"), "name_data");
  EXPECT_EQ(says("run7/ckpt_000100.bin"), "name_saved");
  EXPECT_EQ(says("checkpoints/train.log"), "name_log") << "the last word that says anything";
  EXPECT_EQ(says("logs/INDEX.db2"), "name_state");
  EXPECT_EQ(says("catalogue/notes"), "") << "words, not parts of them";
  EXPECT_EQ(says(std::string(1000, 'x')), "");
  for (const std::string_view key : {"a/b", ""}) EXPECT_FALSE(tells_of_use(made(key, 1 << 20)));
  EXPECT_TRUE(tells_of_use(made("a.log")));
  EXPECT_TRUE(tells_of_use(made("a", 0, {0, 1, 0})));
  const CreationFeatures known = made("d12/part-0042.x", 4095, {3, 1, 0});
  EXPECT_EQ(known[4], 4.F) << "digits of the last part";
  EXPECT_FLOAT_EQ(known[5], 12);
  EXPECT_FLOAT_EQ(known[6], 0.75);
  EXPECT_FLOAT_EQ(known[7], 0.25);
  EXPECT_FLOAT_EQ(known[9], std::log2(5.F));
}

TEST(Creation, AFoldersHistoryForgetsSlowly) {
  FolderHistory history{};
  for (int i = 0; i < 1000; ++i) add_to(history, Class::read_only);
  for (int i = 0; i < 500; ++i) add_to(history, Class::write_only);
  EXPECT_GT(history[1], 2 * history[0]);
  EXPECT_GT(history[0], 0.F);
  EXPECT_LE(history[0] + history[1], 256.F);
}

// By name: logs are write-only; else by what most of the folder's objects did.
constexpr std::string_view kByFolder = R"({"nodes": [{"class": "read_write"}], "created": [
  {"feature": "name_log", "threshold": 0.5, "left": 1, "right": 2},
      {"feature": "folder_read_only", "threshold": 0.5, "left": 3, "right": 4},
  {"class": "write_only"}, {"class": "read_write"}, {"class": "read_only"}]})";

void only_read(ClassTable& table, uint64_t object, uint32_t folder, int windows) {
  for (uint64_t i = 0; i < static_cast<uint64_t>(windows) * ClassTable::kWindow; ++i)
    table.see(object, {folder, false, 4096 * (i % 8), 4096});
}

TEST(ClassTable, SaysAClassWhenAnObjectIsMade) {
  const auto tree = ClassTree::parse(kByFolder);
  ASSERT_TRUE(tree) << tree.error().message();
  ClassTable table(*tree);
  EXPECT_EQ(table.at_creation({1, "x/a", 9000}), Class::read_write)
      << "neither name nor folder tell";
  EXPECT_EQ(table.at_creation({1, "x/a.log", 0}), Class::write_only);
  table.create(7, {1, "x/a.log", 0});
  EXPECT_EQ(table.of(7), Class::write_only) << "at once";
  EXPECT_EQ(table.known(7), (ClassTable::Known{Class::write_only, false}));
  table.create(8, {1, "x/b", 0});
  EXPECT_FALSE(table.known(8));

  table.see(9, {2, true, 0, 4096});
  only_read(table, 9, 2, 3);
  EXPECT_EQ(table.at_creation({2, "y/a", 9000}), Class::read_only)
      << "as its folder's other object is";
  EXPECT_EQ(table.at_creation({1, "x/a", 9000}), Class::read_write)
      << "other folders have histories of their own";
  table.set(10, 3, {Class::read_only, true});
  EXPECT_EQ(table.at_creation({3, "z/a", 0}), Class::read_only) << "what was stated is history too";
}

// What was said when it was made holds until counters say something else twice in a row.
TEST(ClassTable, CountersOverruleWhatWasSaidAtCreation) {
  const auto tree = ClassTree::parse(
      R"({"nodes": [{"feature": "read_share", "threshold": 0.9, "left": 1, "right": 2},
      {"class": "read_write"}, {"class": "read_only"}], "created": [{"class": "write_only"}]})");
  ASSERT_TRUE(tree) << tree.error().message();
  ClassTable table(*tree);
  table.create(1, {0, "a.log", 0});
  only_read(table, 1, 0, 1);
  EXPECT_EQ(table.of(1), Class::write_only);
  only_read(table, 1, 0, 1);
  EXPECT_EQ(table.of(1), Class::read_only);
}

// Judged by the first window after the one that made it, or when it goes; wrong too often, it is
// not listened to.
TEST(ClassTable, JudgesWhatWasSaidAtCreation) {
  const auto tree = ClassTree::parse(
      R"({"nodes": [{"class": "read_write"}], "created": [{"class": "read_only"}]})");
  ASSERT_TRUE(tree);
  ClassTable table(*tree);
  std::vector<Class> truth;
  table.on_creation_sample([&](const CreationFeatures& known, Class was) {
    EXPECT_EQ(known[3], 1.F);
    truth.push_back(was);
  });
  const auto make = [&](uint64_t object) {
    table.create(object, {0, "cache", 0});
    table.see(object, {0, true, 0, 4096});
  };
  make(1);
  only_read(table, 99, 1, 1);
  only_read(table, 1, 0, 1);
  EXPECT_EQ(truth, std::vector{Class::read_only});
  make(2);
  make(2);  // another one of that name: nobody had read the first
  EXPECT_EQ(truth.size(), 2U);
  EXPECT_EQ(truth[1], Class::write_only);
  table.create(3, {0, "cache", 0});
  table.forget(3);
  EXPECT_EQ(truth.size(), 2U) << "never touched: nothing is learnt";
  EXPECT_EQ(table.creation_score().judged, 2U);
  EXPECT_EQ(table.creation_score().right, 1U);
  for (uint64_t object = 10; object < 20; ++object) {
    make(object);
    table.forget(object);
  }
  EXPECT_EQ(table.at_creation({0, "cache", 0}), Class::read_write)
      << "the prior: always saying write-only was right more often";
  make(30);
  EXPECT_EQ(table.of(30), Class::read_write);
  EXPECT_GT(table.creation_score().distrusted, 0U);
}

}  // namespace
}  // namespace stoker
