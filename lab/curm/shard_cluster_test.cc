// The update schemes over the production code of real shards, on simulated disks: crashes between
// any two transfers, torn writes, lost nodes, flipped bits, old copies. The same stories as in
// memory (schemes_lab.h).
#include "curm/shard_cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "curm/shard_stories.h"
#include "stoker/testing/sanitized.h"

namespace stoker::curm {
namespace {

class Shards : public testing::TestWithParam<std::string_view> {};
INSTANTIATE_TEST_SUITE_P(All, Shards, testing::ValuesIn(kProtocols),
                         [](const auto& each) { return std::string(each.param); });

TEST_P(Shards, HoldNewestDataAndItsParityAtRest) {
  for (uint64_t seed = 1; seed <= 6; ++seed)
    EXPECT_EQ(calm_run(by_name(GetParam()), Form::safe, seed, {}, on_shards), "")
        << "seed " << seed;
}

TEST_P(Shards, SurviveCrashesAndLosses) {
  uint64_t late = 0;
  for (uint64_t seed = 1; seed <= std::max<uint64_t>(12 / kLess, 4); ++seed)
    EXPECT_EQ(crash_run(by_name(GetParam()), seed, {}, on_shards, &late), "") << "seed " << seed;
  EXPECT_GT(late, 5 / kLess);
}

// Points of a recovery at which the power goes, of what points before it left.
TEST_P(Shards, SurviveCrashPointsOfARecovery) {
  uint64_t late = 0;
  for (uint64_t point = 3; point < 60; point += std::min<uint64_t>(4 * kLess, 12))
    ASSERT_EQ(recovery_sweep(by_name(GetParam()), on_shards, point, point % 5, 5, late), "");
  EXPECT_GT(late, 20 / kLess);
}

// Before each transfer the power goes, and a node with it or none.
TEST_P(Shards, SurviveEveryCrashPoint) {
  uint64_t states = 0;
  bool finished = false;
  for (uint64_t point = 0; !finished; point += kLess) {
    std::set<NodeId> blank;
    if (point % 3 != 0) blank.insert(static_cast<NodeId>(point % 6));
    const auto order = [point](CrashCluster& cluster) {
      static_cast<ShardSim&>(cluster).crash_at_transfer(point);
    };
    ASSERT_EQ(crash_point(by_name(GetParam()), on_shards, point, order, blank, finished), "")
        << "point " << point;
    ++states;
  }
  RecordProperty("states", static_cast<int>(states));
  EXPECT_GT(states, 60 / kLess);
}

TEST_P(Shards, MutationSkippedFlushIsCaught) {
  const auto bug = [](Round& round) {
    for (Errand& errand : round.errands)
      std::erase_if(errand.steps, [](const Step& step) { return step.kind == Step::Kind::flush; });
  };
  bool caught = false;
  for (uint64_t seed = 1; seed <= 40 && !caught; ++seed)
    caught = !crash_run(by_name(GetParam()), seed, bug, on_shards).empty();
  EXPECT_TRUE(caught);
}

// ---- damage
// -------------------------------------------------------------------------------------------------

TEST_P(Shards, ADamagedLogCountsAsALostNode) {
  size_t noticed = 0, compared = 0;
  for (uint64_t seed = 1; seed <= 30 / kLess; ++seed) {
    ShardStory story(GetParam(), seed);
    story.act(20);
    const std::set<NodeId> victims = {static_cast<NodeId>(seed % 6),
                                      static_cast<NodeId>((seed + 2) % 6)};
    for (const NodeId victim : victims) {
      for (const std::string& log : story.logs(victim)) {
        for (int i = 0; i < 8; ++i) story.flip(log);
      }
    }
    // A round that reads a damaged record fails. Then damage in a node's newest frame may go
    // unnoticed: it is not told from one that was never written.
    const Status touched = story.touch_all();
    if (!touched) {
      ASSERT_EQ(touched.error().code, Code::corruption) << touched.error().message();
    }
    const Status done = story.recover();
    ASSERT_TRUE(done) << done.error().message() << ", seed " << seed;
    noticed += story.sim.lost().size();
    for (const NodeId lost : story.sim.lost()) EXPECT_EQ(victims.count(lost), 1U);
    if (!touched) continue;
    ++compared;
    EXPECT_EQ(story.lab.after_recovery(), "") << "seed " << seed;
  }
  EXPECT_GT(noticed, 0U);
  if (GetParam() != "fl") {  // whose updates read its log
    EXPECT_GT(compared, 0U);
  }
}

TEST_P(Shards, DamagedBlocksAndHeadersAreErasures) {
  size_t noticed = 0;
  for (uint64_t seed = 1; seed <= 20 / kLess + 1; ++seed) {
    ShardStory story(GetParam(), seed);
    story.act(20);
    ASSERT_TRUE(story.lab.scheme().fold_all());
    const std::set<NodeId> victims = {static_cast<NodeId>(seed % 6),
                                      static_cast<NodeId>((seed + 1) % 6)};
    for (const NodeId victim : victims) {
      for (const char* file : {"/data", "/parity", "/head"}) {
        for (int i = 0; i < 4; ++i) story.flip(ShardSim::path(victim) + file);
      }
    }
    const Status done = story.recover();
    ASSERT_TRUE(done) << done.error().message() << ", seed " << seed;
    noticed += story.sim.lost().size();
    for (const NodeId lost : story.sim.lost()) EXPECT_EQ(victims.count(lost), 1U);
    EXPECT_EQ(story.lab.after_recovery(), "") << "seed " << seed;
    story.act(10);
    ASSERT_TRUE(story.lab.scheme().fold_all());
    EXPECT_EQ(story.lab.at_rest(), "");
  }
  EXPECT_GT(noticed, 0U);
}

TEST(ShardCluster, ABlockThatIsReadAndDiffersFromItsChecksumIsAnErrorThatNamesIt) {
  ShardStory story("vdl", 3);
  story.act(20);
  ASSERT_TRUE(story.lab.scheme().fold_all());
  const ShardLayout layout{story.lab.geometry(), 8192, 0};
  const Chunk chunk{2, 1};
  const Update update{chunk, 0, Value::of(story.lab.random_bytes(8192))};
  ASSERT_TRUE(story.lab.scheme().update(update));
  story.lab.lay(update);
  ASSERT_TRUE(story.lab.scheme().fold_all());
  const NodeId node = story.lab.geometry().node(chunk);
  story.sim.disk().flip(ShardSim::path(node) + "/data", layout.block_at(chunk, 1) + 77, 3);
  const auto read = story.lab.scheme().read(chunk, 5000, 10);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, Code::corruption);
  EXPECT_THAT(read.error().what,
              testing::HasSubstr("block 1 of chunk 1 of stripe 2 in 'n" + std::to_string(node) +
                                 "' differs from its checksum"));
  // nothing runs any more
  EXPECT_FALSE(story.lab.scheme().fold_all() && story.lab.scheme().read({0, 0}, 0, 1));
  ASSERT_TRUE(story.recover());
  EXPECT_EQ(story.sim.lost(), std::set<NodeId>{node});
  EXPECT_EQ(story.lab.after_recovery(), "");
}

TEST(ShardCluster, MoreThanMLostNodesAreNamedAndNothingIsChanged) {
  ShardStory story("pl", 4);
  story.act(20);
  story.sim.close();
  std::map<NodeId, SimImage> kept;
  for (const NodeId node : {0, 1, 2}) {
    kept.emplace(node, story.sim.disk().image(ShardSim::path(node) + "/head"));
    story.sim.disk().remove(ShardSim::path(node) + "/head");
  }
  const Status opened = story.sim.reopen();
  ASSERT_FALSE(opened);
  EXPECT_THAT(opened.error().what,
              testing::AllOf(testing::HasSubstr("3 of 6 nodes are lost, but the code tolerates 2"),
                             testing::HasSubstr("'n0' is not there"),
                             testing::HasSubstr("'n2' is not there")));
  for (const auto& [node, head] : kept) story.sim.disk().put(ShardSim::path(node) + "/head", head);
  ASSERT_TRUE(story.recover());
  EXPECT_TRUE(story.sim.lost().empty());
  EXPECT_EQ(story.lab.after_recovery(), "");
}

TEST(ShardCluster, NodesAreKnownByIdentityAndOldCopiesAreNotTaken) {
  ShardStory story("vdl", 5);
  story.act(20);
  std::map<std::string, SimImage> old;
  for (const char* file : {"/head", "/data", "/parity", "/log.0"})
    old.emplace("n3" + std::string(file), story.sim.disk().image("n3" + std::string(file)));
  story.sim.close();
  story.sim.disk().unlimit("n3/");
  story.sim.reorder();
  ASSERT_TRUE(story.recover());
  EXPECT_EQ(story.sim.lost().size(), 1U);
  EXPECT_EQ(story.lab.after_recovery(), "");
  story.act(10);
  story.sim.close();
  // the lost disk is put back
  for (const auto& [path, image] : old) story.sim.disk().put(path, image);
  ASSERT_TRUE(story.recover());
  EXPECT_EQ(story.sim.lost().size(), 1U);
  EXPECT_EQ(story.lab.after_recovery(), "");

  ShardStory other("vdl", 5);
  story.sim.close();
  story.sim.disk().put("n4/head", other.sim.disk().image("n4/head"));
  const Status mixed = story.sim.reopen();
  ASSERT_FALSE(mixed);
  EXPECT_THAT(mixed.error().what, testing::HasSubstr("is a node of another cluster"));
}

TEST(ShardCluster, SegmentsAreFreedAndUsedAgain) {
  ShardStory story("vdl", 6);
  for (int i = 0; i < 60; ++i) {
    ASSERT_TRUE(story.touch_all());
    ASSERT_TRUE(story.lab.scheme().fold_all());
  }
  for (NodeId node = 0; node < 6; ++node) EXPECT_LE(story.logs(node).size(), 3U);
  ASSERT_TRUE(story.recover());
  EXPECT_EQ(story.lab.after_recovery(), "");
}

// Logs of several segments, with live records in all.
void fill_logs(ShardStory& story) {
  for (int i = 0; i < 40 && story.logs(1).size() < 3; ++i) ASSERT_TRUE(story.touch_all());
  ASSERT_GE(story.logs(1).size(), 3U);
}

TEST(ShardCluster, ASegmentThatIsMissingOrZeroedIsALostNode) {
  for (const bool zeroed : {false, true}) {
    for (const size_t index : {size_t{0}, size_t{1}}) {
      ShardStory story("vdl", 7);
      fill_logs(story);
      const std::string path = story.logs(1)[index];
      story.sim.close();
      if (zeroed)
        story.sim.disk().put(path, SimImage(story.sim.disk().image(path).bytes()));
      else
        story.sim.disk().remove(path);
      const Status done = story.recover();
      ASSERT_TRUE(done) << done.error().message();
      EXPECT_EQ(story.sim.lost(), std::set<NodeId>{1}) << path << (zeroed ? " zeroed" : " missing");
      EXPECT_EQ(story.lab.after_recovery(), "") << path << (zeroed ? " zeroed" : " missing");
    }
  }
}

// The power went when a segment was being made: it is made again, and the node loses nothing.
TEST(ShardCluster, ASegmentThatIsShortAndTheLastIsMadeAgain) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{512}, uint64_t{20480}}) {
    ShardStory story("vdl", 8);
    fill_logs(story);
    const size_t segments = story.logs(1).size();
    const uint64_t whole = story.sim.disk().image(story.logs(1)[0]).bytes();
    const std::string path = ShardSim::path(1) + "/log." + std::to_string(segments);
    story.sim.close();
    story.sim.disk().put(path, SimImage(bytes));
    ASSERT_TRUE(story.sim.reopen());
    EXPECT_TRUE(story.sim.lost().empty()) << bytes;
    story.lab.start();
    ASSERT_TRUE(story.lab.scheme().recover(story.sim.lost()));
    ASSERT_TRUE(story.sim.recovered());
    EXPECT_EQ(story.lab.after_recovery(), "");
    // recovery needed it: all others are full
    EXPECT_EQ(story.sim.disk().image(path).bytes(), whole);
    ASSERT_TRUE(story.touch_all());
    ASSERT_TRUE(story.recover());
    EXPECT_TRUE(story.sim.lost().empty()) << bytes;
    EXPECT_EQ(story.lab.after_recovery(), "");
  }
}

// ---- schemes changed in use
// ---------------------------------------------------------------------------------------------

// All that is asked of a scheme, where stripes are given another one now and then (Lab::turn), and
// go on with it after every crash.
INSTANTIATE_TEST_SUITE_P(InUse, Shards, testing::Values(kSwitch),
                         [](const auto& each) { return std::string(each.param); });

}  // namespace
}  // namespace stoker::curm
