// Every scheme, with real bytes: at rest parity == encode(data) and data == newest; the safe forms
// through crashes and losses; and deliberate bugs, each of which these tests must see.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <optional>

#include "curm/curm.h"
#include "curm/fl.h"
#include "curm/parix.h"
#include "curm/pl.h"
#include "curm/range_map.h"
#include "curm/scheme.h"
#include "curm/schemes_lab.h"
#include "stoker/testing/sanitized.h"

namespace stoker::curm {
namespace {

TEST(RangeMap, IsAnArrayOfBytes) {
  const uint64_t seed = static_cast<uint64_t>(testing::UnitTest::GetInstance()->random_seed());
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  RangeMap<int> map;
  std::array<std::pair<int, uint64_t>, 200> bytes{};  // value, origin
  for (int i = 1; i < 3000; ++i) {
    const uint64_t at = random() % 200, n = random() % (201 - at);
    if (random() % 4 == 0) {
      map.erase(at, n);
      for (uint64_t b = at; b < at + n; ++b) bytes[b] = {};
    } else {
      map.put(at, n, i);
      for (uint64_t b = at; b < at + n; ++b) bytes[b] = {i, at};
    }
    const uint64_t from = random() % 200, count = random() % (201 - from);
    std::array<std::pair<int, uint64_t>, 200> seen{};
    uint64_t last = from;
    for (const auto& piece : map.within(from, count)) {
      ASSERT_LE(last, piece.at);
      ASSERT_LT(piece.at, piece.end);
      last = piece.end;
      for (uint64_t b = piece.at; b < piece.end; ++b) seen[b] = {piece.value, piece.origin};
    }
    uint64_t empty = 0;
    for (const auto& gap : map.gaps(from, count)) empty += gap.size();
    for (uint64_t b = from; b < from + count; ++b) {
      ASSERT_EQ(seen[b], bytes[b]);
      empty -= bytes[b].first == 0 ? 1 : 0;
    }
    ASSERT_EQ(empty, 0);
  }
}

class Schemes : public testing::TestWithParam<std::string_view> {};
INSTANTIATE_TEST_SUITE_P(All, Schemes, testing::ValuesIn(kProtocols),
                         [](const auto& each) { return std::string(each.param); });

TEST_P(Schemes, HoldNewestDataAndItsParityAtRest) {
  for (const Form form : {Form::published, Form::safe}) {
    for (uint64_t seed = 1; seed <= 24; ++seed)
      EXPECT_EQ(calm_run(by_name(GetParam()), form, seed), "")
          << "seed " << seed << (form == Form::safe ? ", safe" : ", published");
  }
}

TEST_P(Schemes, SurviveCrashesAndLossesWhereSafe) {
  uint64_t late = 0;
  for (uint64_t seed = 1; seed <= 100 / kLess; ++seed)
    EXPECT_EQ(crash_run(by_name(GetParam()), seed, {}, in_memory, &late), "") << "seed " << seed;
  EXPECT_GT(late, 80 / kLess);
}

// Every point of a recovery at which the power can go, of what every point before it left.
TEST_P(Schemes, SurviveEveryCrashPointOfARecovery) {
  uint64_t late = 0;
  for (uint64_t point = 0; point < 60; point += kLess)
    ASSERT_EQ(recovery_sweep(by_name(GetParam()), in_memory, point, 0, kLess, late), "");
  EXPECT_GT(late, 300 / kLess / kLess);
}

// Every point at which the power can go, with no loss and with every single one.
TEST_P(Schemes, SurviveEveryCrashPoint) {
  uint64_t states = 0;
  for (NodeId lost = -1; lost < 6; ++lost) {
    const std::set<NodeId> blank = lost < 0 ? std::set<NodeId>() : std::set<NodeId>{lost};
    bool finished = false;
    for (uint64_t point = 0; !finished; point += kLess) {
      const auto order = [point](CrashCluster& cluster) { cluster.crash_after(point); };
      ASSERT_EQ(crash_point(by_name(GetParam()), in_memory, point, order, blank, finished), "")
          << "point " << point << ", lost " << lost;
      ++states;
    }
  }
  RecordProperty("states", static_cast<int>(states));
  EXPECT_GT(states, 150 / kLess);
}

TEST_P(Schemes, KeepToWhatARecoveryMadeOfAnUpdate) {
  for (uint64_t seed = 1; seed <= 1000 / kLess; ++seed)
    ASSERT_EQ(lone_update(by_name(GetParam()), seed), "") << "seed " << seed;
}

TEST_P(Schemes, RebuildALostNodeInService) {
  for (const Form form : {Form::published, Form::safe}) {
    // as many nodes as chunks: the spare is the node itself
    for (uint64_t seed = 2; seed <= 40; seed += 2)
      EXPECT_EQ(rebuild_in_service(by_name(GetParam()), form, seed), "") << "seed " << seed;
  }
}

// Bytes that a round reads of logs, by node.
std::map<NodeId, uint64_t> logged_reads(const Round& round) {
  std::map<NodeId, uint64_t> bytes;
  for (const Errand& errand : round.errands) {
    for (const Step& step : errand.steps) {
      for (const Step::Part& part : step.parts) {
        EXPECT_TRUE(!part.logged || part.place.node == errand.node);
        if (part.logged) bytes[errand.node] += part.bytes;
      }
    }
  }
  return bytes;
}

// A fold reads the newest bytes out of D's log; for a chunk that is lost its records come from the
// log of a node that gives its base as well, whole.
TEST(VdlLogs, AreReadByFoldsAndRebuilds) {
  for (const std::string_view name : {"vdl", "curm"}) {
    std::vector<std::map<NodeId, uint64_t>> reads;
    Lab lab(by_name(name), Form::safe, 4, 2, 2, [&reads](Round& round) {
      if (auto bytes = logged_reads(round); !bytes.empty()) reads.push_back(std::move(bytes));
    });
    const auto write = [&](int position, uint64_t offset, uint64_t bytes) {
      ASSERT_TRUE(lab.act({{1, position}, offset, Value::of(lab.random_bytes(bytes))}));
    };
    const auto node = [&](int position) { return lab.geometry().node({1, position}); };
    write(0, 100, 3000);
    write(0, 1000, 500);
    write(2, 0, 700);
    EXPECT_TRUE(reads.empty());
    ASSERT_TRUE(lab.scheme().read({1, 0}, 900, 200));
    EXPECT_EQ(std::exchange(reads, {}),
              (std::vector<std::map<NodeId, uint64_t>>{{{node(0), 200}}}));
    const std::map<int, std::map<NodeId, uint64_t>> losses = {
        {0, {{node(4), 3500}}}, {5, {{node(0), 3500}, {node(2), 700}}}};
    for (const auto& [lost, expected] : losses) {
      lab.cluster().wipe(node(lost));
      for (uint64_t stripe = 0; stripe < 3; ++stripe) {
        for (int position = 0; position < 6; ++position) {
          if (lab.geometry().node({stripe, position}) != node(lost)) continue;
          ASSERT_TRUE(lab.scheme().rebuild({stripe, position}));
        }
      }
      EXPECT_EQ(std::exchange(reads, {}), (std::vector<std::map<NodeId, uint64_t>>{expected}))
          << name << ", chunk " << lost;
    }
    ASSERT_TRUE(lab.scheme().fold(1));
    EXPECT_EQ(std::exchange(reads, {}),
              (std::vector<std::map<NodeId, uint64_t>>{{{node(0), 3000}, {node(2), 700}}}));
    EXPECT_EQ(lab.at_rest(), "");
  }
}

// ---- deliberate bugs
// -------------------------------------------------------------------------------------------------

using Bug = std::function<void(Round&)>;

Bug without(Step::Kind kind) {
  return [kind](Round& round) {
    for (Errand& errand : round.errands) {
      std::deque<Step> kept;
      for (Step& step : errand.steps) {
        if (step.kind != kind) kept.push_back(std::move(step));
      }
      errand.steps = std::move(kept);
    }
  };
}

Bug on_records(const std::function<void(Record&)>& change) {
  return [change](Round& round) {
    for (Errand& errand : round.errands) {
      for (Step& step : errand.steps) {
        if (step.kind != Step::Kind::append) continue;
        step.record = [make = step.record, change] {
          Record record = make();
          change(record);
          return record;
        };
      }
    }
  };
}

// Whether one of some seeds sees the bug.
bool caught(const std::function<std::string(uint64_t)>& run, uint64_t seeds = 150) {
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    if (!run(seed).empty()) return true;
  }
  return false;
}

// The bug of a public prototype: the difference is taken to the base, so the second of two
// overlapping updates spoils the parity.
class DeltaAgainstBase final : public FullLogging {
  using FullLogging::FullLogging;
  Slot read_newest(Errand& errand, const Chunk& chunk, uint64_t offset,
                   uint64_t bytes) const override {
    return errand.read(chunk, offset, bytes);
  }
};

TEST(Mutation, DeltaAgainstTheBaseIsCaught) {
  const Made buggy = [](const curm::Setup& setup) {
    return std::make_unique<DeltaAgainstBase>(setup);
  };
  for (const Form form : {Form::published, Form::safe}) {
    EXPECT_TRUE(caught([&](uint64_t seed) { return calm_run(buggy, form, seed); }));
  }
}

// Of another: the original is kept in place of the update that was sent with it.
TEST(Mutation, FirstTouchThatLosesTheUpdateIsCaught) {
  const Bug safe_bug = on_records([](Record& record) {
    if (!record.before.empty())
      record.ranges = {{record.ranges[0].offset, Value::of(Bytes(record.ranges[0].value.size()))}};
  });
  EXPECT_TRUE(caught(
      [&](uint64_t seed) { return calm_run(by_name("parix"), Form::safe, seed, safe_bug); }));
  // Published: the parities drop the first new bytes, and keep what they asked for.
  const auto lost_first = std::make_shared<std::set<Chunk>>();
  const Bug published_bug = on_records([lost_first](Record& record) {
    if (record.kind == Record::Kind::value && lost_first->insert(record.chunk).second)
      record.ranges[0].value = Value::of(Bytes(record.ranges[0].value.size()));
  });
  EXPECT_TRUE(caught([&](uint64_t seed) {
    return calm_run(by_name("parix"), Form::published, seed, published_bug);
  }));
}

// What a flush is for: what was appended last before it, what was written in place before a mark,
// or the mark.
enum class FlushOf { update, stage, commit, epoch, base, mark };
std::optional<FlushOf> flush_of(const std::deque<Step>& steps, size_t at) {
  if (at > 0 && steps[at - 1].kind == Step::Kind::mark) return FlushOf::mark;
  if (at + 1 < steps.size() && steps[at + 1].kind == Step::Kind::mark) return FlushOf::base;
  for (size_t before = at; before-- > 0;) {
    if (steps[before].kind != Step::Kind::append) continue;
    switch (steps[before].record().kind) {
      case Record::Kind::stage:
        return FlushOf::stage;
      case Record::Kind::commit:
        return FlushOf::commit;
      case Record::Kind::epoch:
        return FlushOf::epoch;
      default:
        return FlushOf::update;
    }
  }
  return {};
}

Bug without(FlushOf which) {
  return [which](Round& round) {
    for (Errand& errand : round.errands) {
      std::deque<Step> kept;
      for (size_t at = 0; at < errand.steps.size(); ++at) {
        if (errand.steps[at].kind != Step::Kind::flush || flush_of(errand.steps, at) != which)
          kept.push_back(errand.steps[at]);
      }
      errand.steps = std::move(kept);
    }
  };
}

TEST_P(Schemes, MutationSkippedFlushIsCaught) {
  std::map<FlushOf, const char*> flushes = {{FlushOf::update, "of an update"},
                                            {FlushOf::epoch, "of an epoch"},
                                            {FlushOf::base, "of what is written in place"},
                                            {FlushOf::mark, "of a mark"}};
  if (GetParam() != "fo") flushes.emplace(FlushOf::stage, "of a stage");
  if (GetParam() == "vdl" || GetParam() == "curm") flushes.emplace(FlushOf::commit, "of a commit");
  const Made made = by_name(GetParam());
  for (const auto& [which, name] : flushes) {
    const Bug bug = without(which);
    bool found = false;
    // A decision that stands on several nodes is lost only where it is lost on all of them.
    if (which == FlushOf::epoch) {
      found = caught([&](uint64_t seed) { return lone_update(made, seed, bug); }, 8000);
    } else if (which == FlushOf::commit) {
      found = caught(
          [&](uint64_t seed) {
            bool finished = false;
            return crash_point(
                made, in_memory, seed,
                [seed](CrashCluster& cluster) { cluster.crash_after(seed % 80); }, {}, finished,
                bug);
          },
          8000);
    } else {
      found = caught([&](uint64_t seed) { return crash_run(made, seed, bug); });
    }
    EXPECT_TRUE(found) << name;
  }
}

TEST_P(Schemes, MutationIntentOfAnotherUpdateIsCaught) {  // values bear a number that is too high
  const Bug bug = on_records([](Record& record) {
    if (record.kind == Record::Kind::value) record.seq += 1'000'000;
  });
  EXPECT_TRUE(caught([&](uint64_t seed) { return crash_run(by_name(GetParam()), seed, bug); }));
}

TEST_P(Schemes, MutationAcknowledgedBeforeParityIsCaught) {  // one parity is forgotten
  const Bug bug = [](Round& round) {
    if (round.background || round.kind != Round::Kind::exchange || round.errands.size() < 3) return;
    for (Step& step : round.errands[1].steps) {
      if (step.kind != Step::Kind::append) continue;
      step.record = [make = step.record] {
        Record record = make();
        if (record.kind == Record::Kind::epoch) return record;
        return Record{Record::Kind::stage, record.epoch, 0, record.chunk, {}, {}, {}};
      };
    }
  };
  EXPECT_TRUE(caught([&](uint64_t seed) { return crash_run(by_name(GetParam()), seed, bug); }));
}

TEST(Mutation, FoldWithoutStageOrMarkIsCaught) {
  const Bug empty_stage = on_records([](Record& record) {
    if (record.kind == Record::Kind::stage) record.ranges.clear();
  });
  for (const std::string_view name : {"fl", "pl", "plr", "parix", "vdl", "curm"}) {
    EXPECT_TRUE(caught([&](uint64_t seed) { return crash_run(by_name(name), seed, empty_stage); }))
        << name << ", empty stage";
  }
  for (const std::string_view name : {"fl", "pl", "plr", "parix"}) {
    EXPECT_TRUE(caught([&](uint64_t seed) {
      return crash_run(by_name(name), seed, without(Step::Kind::mark));
    })) << name
        << ", no mark";
  }
}

TEST(Mutation, LostCommitIsCaught) {
  const Bug bug = on_records([](Record& record) {
    if (record.kind == Record::Kind::commit) record.kind = Record::Kind::stage;
  });
  for (const std::string_view name : {"vdl", "curm"}) {
    EXPECT_TRUE(caught([&](uint64_t seed) { return crash_run(by_name(name), seed, bug); })) << name;
  }
}

}  // namespace
}  // namespace stoker::curm
