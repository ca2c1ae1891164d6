// Stripes that change their scheme in use: through every crash, in memory and on shards, and on
// whatever nodes are left they go on by what they were given.
#include "curm/scheme_switch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "curm/shard_stories.h"
#include "stoker/base/crc32c.h"
#include "stoker/testing/sanitized.h"

namespace stoker::curm {
namespace {

TEST(SchemeSwitch, StripesChangeTheirSchemeInUse) {
  for (uint64_t seed = 1; seed <= 30; ++seed)
    EXPECT_EQ(calm_run(by_name(kSwitch), Form::safe, seed), "") << "seed " << seed;
  for (uint64_t seed = 2; seed <= 20; seed += 2)
    EXPECT_EQ(rebuild_in_service(by_name(kSwitch), Form::safe, seed), "") << "seed " << seed;
}

TEST(SchemeSwitch, SurvivesCrashesAroundTheChange) {
  for (uint64_t seed = 1; seed <= 150 / kLess; ++seed)
    EXPECT_EQ(crash_run(by_name(kSwitch), seed), "") << "seed " << seed;
  uint64_t late = 0;
  for (uint64_t point = 0; point < 60; point += 3 * kLess)
    ASSERT_EQ(recovery_sweep(by_name(kSwitch), in_memory, point, 0, 3 * kLess, late), "");
}

struct Change {
  std::string_view from, to;
  int k = 4, m = 2;
  uint64_t seed = 1;
};

// An update by one scheme, the change, an update by the other; the power goes at `point`, and a
// node with it or none. Once that is recovered m others are lost. Empty, or what is wrong.
std::string change_story(const Change& change, const Ground& ground, uint64_t point, bool& finished,
                         const std::function<void(Round&)>& bug = {}) {
  Lab lab(by_name(kSwitch), Form::safe, change.k, change.m, 2 * change.seed, bug, ground);
  if (const Status done = lab.switching()->change(1, change.from); !done)
    return done.error().message();
  const std::vector<Update> updates = {{{1, 1}, 100, Value::of(lab.random_bytes(3000))},
                                       {{1, 1}, 1000, Value::of(lab.random_bytes(4096))}};
  lab.cluster().crash_after(point);
  size_t acknowledged = 0;
  bool begun = false, changed = false;
  const auto scenario = [&]() -> Status {
    STOKER_TRY(lab.scheme().update(updates[0]));
    ++acknowledged;
    begun = true;
    STOKER_TRY(lab.switching()->change(1, change.to));
    changed = true;
    STOKER_TRY(lab.scheme().update(updates[1]));
    ++acknowledged;
    return {};
  };
  finished = scenario().has_value();
  const auto nodes = static_cast<uint64_t>(change.k + change.m);
  std::string_view expected = changed ? change.to : change.from;
  std::set<NodeId> lost;
  if (point % 2 == 1) lost.insert(static_cast<NodeId>(point / 2 % nodes));
  for (const bool first : {true, false}) {
    lab.cluster().restart(lost);
    lab.start();  // who opens it need not know of any change
    if (const Status done = lab.scheme().recover(lost); !done) return done.error().message();
    if (const Status done = lab.cluster().recovered(); !done) return done.error().message();
    const std::string_view now = lab.switching()->scheme_of(1);
    if (first && begun && !changed && now == change.to) expected = now;
    if (now != expected)
      return "the stripe goes by " + std::string(now) + ", not by " + std::string(expected);
    if (lab.switching()->scheme_of(0) != "vdl") return "another stripe goes by another scheme";
    if (std::string wrong = first ? lab.at_rest(updates, acknowledged) : lab.at_rest();
        !wrong.empty())
      return wrong;
    lost.clear();
    for (int i = 0; i < change.m; ++i)
      lost.insert(static_cast<NodeId>((point / 2 + 1 + 2 * static_cast<uint64_t>(i)) % nodes));
  }
  return {};
}

TEST(SchemeSwitch, SurvivesEveryCrashPointOfAChange) {
  for (size_t i = 0; i < std::size(kSchemes); ++i) {
    const Change change{kSchemes[i], kSchemes[(i + 1) % std::size(kSchemes)]};
    bool finished = false;
    for (uint64_t point = 0; !finished; point += kLess)
      ASSERT_EQ(change_story({change.from, change.to, 4, 2, point}, in_memory, point, finished), "")
          << change.from << " to " << change.to << ", point " << point;
    finished = false;
    for (uint64_t point = i % 5; !finished; point += 5 * kLess)
      ASSERT_EQ(change_story({change.from, change.to, 4, 2, point}, on_shards, point, finished), "")
          << change.from << " to " << change.to << " on shards, point " << point;
  }
}

bool says(const Round& round) {
  return std::any_of(round.errands.begin(), round.errands.end(), [](const Errand& errand) {
    return std::any_of(errand.steps.begin(), errand.steps.end(),
                       [](const Step& step) { return step.said.has_value(); });
  });
}

// Whether some story sees the bug, of those that `of` makes.
bool change_caught(const std::function<std::function<void(Round&)>()>& of, uint64_t seeds = 4000) {
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    bool finished = false;
    if (!change_story({"pl", "parix", 2, 1, seed}, in_memory, seed % 60, finished, of()).empty())
      return true;
  }
  return false;
}

TEST(SchemeSwitch, MutationsOfWhatIsSaidAreCaught) {
  const auto unflushed = [] {
    return [](Round& round) {
      for (Errand& errand : round.errands) {
        if (says(round))
          std::erase_if(errand.steps,
                        [](const Step& step) { return step.kind == Step::Kind::flush; });
      }
    };
  };
  const auto on_one_chunk = [] {
    return [](Round& round) {
      for (size_t i = 1; i < round.errands.size(); ++i) {
        for (Step& step : round.errands[i].steps) step.said.reset();
      }
    };
  };
  // The first two are the story's own changes.
  const auto not_again = [] {
    return [rounds = 0](Round& round) mutable {
      if (says(round) && ++rounds > 2) round.errands.clear();
    };
  };
  EXPECT_FALSE(change_caught([] { return std::function<void(Round&)>(); }, 600));
  EXPECT_TRUE(change_caught(unflushed));
  EXPECT_TRUE(change_caught(on_one_chunk));
  EXPECT_TRUE(change_caught(not_again));
}

// What all members together keep in the logs is what one alone may.
TEST(SchemeSwitch, MakesRoomForAllItsMembers) {
  Lab lab(by_name(kSwitch), Form::safe, 4, 2, 2);
  const std::array<std::string_view, 3> schemes = {"curm", "curm", "pl"};
  for (uint64_t stripe = 0; stripe < schemes.size(); ++stripe) {
    ASSERT_TRUE(lab.switching()->change(stripe, schemes[stripe]));
    for (int position = 0; position < 4; ++position) {
      const Update update{{stripe, position}, 0, Value::of(lab.random_bytes(1000))};
      ASSERT_TRUE(lab.scheme().update(update));
      lab.lay(update);
    }
  }
  ASSERT_EQ(lab.scheme().logged_bytes(), 12'000U);
  EXPECT_EQ(lab.scheme().pending().size(), 3U);
  for (const uint64_t stripe : lab.scheme().make_room(12'000))
    ASSERT_TRUE(lab.scheme().fold(stripe));
  // what curm keeps of the 8,000 that are its share
  EXPECT_EQ(lab.scheme().logged_bytes(), 4'000U);
  ASSERT_TRUE(lab.scheme().fold_all());
  EXPECT_EQ(lab.scheme().logged_bytes(), 0U);
  EXPECT_TRUE(lab.scheme().pending().empty());
  EXPECT_EQ(lab.at_rest(), "");
}

// A node of format 2 says nothing of schemes. Opening makes it one of 3 before anything else.
TEST(SchemeSwitch, OpensTheFormatBefore) {
  ShardStory story(kSwitch, 2);
  ASSERT_TRUE(story.touch_all());
  story.sim.close();
  std::vector<std::byte> sector(kHeadBytes);
  for (NodeId node = 0; node < 6; ++node) {
    SimImage head = story.sim.disk().image(ShardSim::path(node) + "/head");
    for (const uint64_t at : {uint64_t{0}, kShardBlock}) {
      head.read(at, sector);
      sector[8] = std::byte{2};
      const uint32_t crc = crc32c(sector.data(), kHeadBytes - 4);
      std::memcpy(sector.data() + kHeadBytes - 4, &crc, 4);
      head.write(at, sector);
    }
    story.sim.disk().put(ShardSim::path(node) + "/head", head);
  }
  ASSERT_TRUE(story.recover());
  EXPECT_TRUE(story.sim.lost().empty());
  EXPECT_EQ(story.lab.after_recovery(), "");
  ASSERT_TRUE(story.lab.switching()->change(1, "fl"));
  ASSERT_TRUE(story.recover());
  EXPECT_EQ(story.lab.switching()->scheme_of(1), "fl");
  for (NodeId node = 0; node < 6; ++node) {
    const SimImage head = story.sim.disk().image(ShardSim::path(node) + "/head");
    for (const uint64_t at : {uint64_t{0}, kShardBlock}) {
      head.read(at, sector);
      EXPECT_EQ(sector[8], std::byte{3});
    }
  }
}

TEST(SchemeSwitch, RefusesASchemeThatThereIsNot) {
  MemoryCluster cluster({2, 1, 3, 8192, 1}, 1);
  const curm::Setup setup{
      &cluster, {2, 1, 3, 8192, 1}, *codec::ErasureCode::make(2, 1), Form::safe, 4096};
  EXPECT_FALSE(SchemeSwitch::make(setup, "raid"));
  EXPECT_THAT((*SchemeSwitch::make(setup, "vdl"))->change(0, "raid").error().what,
              testing::HasSubstr("there is no scheme `raid`"));
  Round newer;
  newer.to(0).mark({0, 0}, 1, 200);
  ASSERT_TRUE(cluster.run(newer));
  EXPECT_THAT((*SchemeSwitch::make(setup, "vdl"))->recover({}).error().what,
              testing::HasSubstr("a chunk header of node 0 is of a scheme that this program does "
                                 "not know: use a newer one"));
}

}  // namespace
}  // namespace stoker::curm
