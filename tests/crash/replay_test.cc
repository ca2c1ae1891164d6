// Records the I/O of every commit path of the local store and recovers every disk that a power cut
// could have left behind.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>

#include "lab.h"
#include "stoker/testing/sanitized.h"

namespace stoker {
namespace {

using Change = Recorder::Change;
constexpr auto kDurable = Durability::durable;
constexpr auto kDeferred = Durability::deferred;

// A commit path: what is there before, and what is recorded.
struct Script {
  std::string name;
  std::function<void(Recorder&)> before;  // null: the store is made within the recording
  std::function<void(Recorder&)> recorded;
};

void three_objects(Recorder& run) {
  ASSERT_OK(run.commit(
      {{"a", 150'000, 0, 150'000, 1}, {"b", 65'536, 0, 65'536, 2}, {"c", 5'000, 0, 5'000, 3}},
      kDurable));
}

std::vector<Script> scripts() {
  return {
      {"first_commit", nullptr, three_objects},
      {"overwrite", three_objects,
       [](Recorder& run) {
         ASSERT_OK(run.commit({{"a", 150'000, 0, 150'000, 11}}, kDurable));
         ASSERT_OK(
             run.commit({{"a", 150'000, 60'000, 20'000, 12}, {"c", 5'000, 17, 900, 13}}, kDurable));
       }},
      {"deferred_and_durable", three_objects,
       [](Recorder& run) {
         ASSERT_OK(run.commit({{"b", 65'536, 0, 65'536, 21}}, kDeferred));
         ASSERT_OK(run.commit({{"c", 5'000, 0, 5'000, 22}}, kDeferred));
         ASSERT_OK(run.commit({{"b", 65'536, 100, 1'000, 23}, {"d", 100, 0, 100, 24}}, kDurable));
         ASSERT_OK(run.commit({{"c", 5'000, 0, 5'000, 25}}, kDeferred));
       }},
      {"snapshot_and_drop", three_objects,
       [](Recorder& run) {
         ASSERT_OK(run.commit({{"c", 5'000, 0, 5'000, 30}}, kDeferred));
         ASSERT_OK(run.snapshot("s"));
         ASSERT_OK(run.commit({{"b", 65'536, 0, 65'536, 31}}, kDurable));
         ASSERT_OK(run.commit({{"c", 0}}, kDurable));
         ASSERT_OK(run.drop("s"));
         ASSERT_OK(
             run.commit({{"b", 65'536, 0, 65'536, 32}, {"d", 65'536, 0, 65'536, 33}}, kDurable));
       }},
      {"area_switch", three_objects,
       [](Recorder& run) {
         for (uint64_t round = 0; round < 40; ++round) {
           ASSERT_OK(run.commit({{"c", 5'000, 0, 5'000, 100 + round}},
                                round % 4 == 3 ? kDeferred : kDurable));
         }
       }},
      {"remove_and_resize", three_objects,
       [](Recorder& run) {
         ASSERT_OK(run.commit({{"b", 0}, {"a", 70'001}}, kDurable));
         ASSERT_OK(run.commit({{"a", 140'000}, {"b", 10, 0, 10, 41}}, kDurable));
         ASSERT_OK(run.commit({{"a", 140'000, 69'000, 2'000, 42}}, kDurable));
         ASSERT_OK(run.commit({{"a", 0}}, kDurable));
       }},
      {"reuse", three_objects,
       [](Recorder& run) {
         for (uint64_t round = 0; round < 8; ++round) {
           ASSERT_OK(run.commit({{"a", 150'000, 0, 150'000, 200 + round}}, kDurable));
           ASSERT_OK(run.commit({{"b", 65'536, 0, 65'536, 300 + round}},
                                round % 2 == 0 ? kDeferred : kDurable));
         }
       }},
      {"together", three_objects,
       [](Recorder& run) {
         for (uint64_t round = 0; round < 4; ++round) {
           ASSERT_OK(run.commit_together(
               {{{{"b", 65'536, 0, 65'536, 500 + round}}, kDurable},
                {{{"c", 5'000, 0, 5'000, 510 + round}}, kDeferred},
                {{{"d", 9'000, 0, 9'000, 520 + round}, {"e", 1'000, 0, 1'000, 530 + round}},
                 kDurable}}));
         }
       }},
      {"abandon", three_objects,
       [](Recorder& run) {
         for (uint64_t round = 0; round < 5; ++round) {
           ASSERT_OK(run.abandon(
               {{"a", 150'000, 0, 150'000, 600 + round}, {"c", 5'000, 10, 100, 610 + round}}));
           ASSERT_OK(run.commit(
               {{"b", 65'536, 0, 65'536, 620 + round}, {"c", 5'000, 700, 3'000, 630 + round}},
               kDurable));
         }
       }},
  };
}

// A recorded run, and from where it began.
struct Recorded {
  Images before;
  Timeline timeline;
  Admissible admissible;  // at its beginning
  std::vector<SimEvent> events;
};

// Opens the store and runs `script` on it, recovery included; the recording was started by the
// caller.
Status record(Lab& lab, Recorded& run, const std::function<void(Recorder&)>& script) {
  {
    STOKER_ASSIGN(auto store, lab.open());
    STOKER_ASSIGN(const size_t point, find_point(*store, run.timeline, run.admissible));
    run.timeline.push_back(run.timeline[point]);
    lab.disk().note(static_cast<uint64_t>(Note::begun), run.timeline.size() - 1);
    Recorder recorder(lab.disk(), *store, run.timeline);
    recorder.opened();
    script(recorder);
  }
  run.events = lab.disk().stop_recording();
  return {};
}

Recorded record_script(Lab& lab, const Script& script) {
  Recorded run;
  run.before = lab.blank();
  run.timeline = {std::make_shared<const Point>()};
  if (script.before) {
    {
      auto store = lab.open();
      EXPECT_OK(store);
      Recorder recorder(lab.disk(), **store, run.timeline);
      script.before(recorder);
    }
    run.before = lab.images();
    run.timeline = {run.timeline.back()};
  }
  lab.disk().start_recording();
  EXPECT_OK(record(lab, run, script.recorded));
  return run;
}

// In CI each recording has this long for all of its cases; from then on only every eighth is tried,
// and no second crash.
class Patience {
 public:
  bool over() const {
    return soak_factor == 1 && std::chrono::steady_clock::now() - begun_ > std::chrono::seconds(4);
  }

 private:
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
};

struct Outcome {
  uint64_t cases = 0;
  uint64_t left_out = 0;
  uint64_t nested = 0;
  uint64_t violations = 0;
  std::string first;
};

void violation(Outcome& outcome, const std::string& what) {
  if (outcome.violations++ == 0) outcome.first = what;
}

// Crash -> recover -> write -> crash: records the recovery of this case and a commit after it, and
// crashes that anywhere. `killed`: the first crash takes only the process; what it wrote and did
// not flush is still in the disks' caches.
void replay_again(Lab& lab, const Recorded& run, const CrashCase& crash, bool killed, uint64_t seed,
                  const Patience& patience, Outcome& outcome) {
  Recorded second{killed ? crash.durable : crash.images, run.timeline, crash.admissible, {}};
  lab.put(second.before);
  lab.disk().start_recording();
  if (killed) {
    for (const SimEvent* write : crash.pending)
      lab.disk().put_pending(write->path, write->offset, write->bytes);
  }
  const Status status = record(lab, second, [](Recorder& recorder) {
    EXPECT_OK(recorder.commit({{"c", 5'000, 0, 5'000, 900}}, kDeferred));
    EXPECT_OK(recorder.commit({{"e", 66'000, 0, 66'000, 901}}, kDurable));
  });
  if (!status) return violation(outcome, "second run: " + status.error().message());
  CrashEffort effort;
  effort.keep_one_in = 8;
  effort.samples = 32;
  effort.tears = 1;
  CrashWalk walk(second.events, second.before, second.admissible, seed, effort);
  walk.run([&](CrashCase& again) {
    ++outcome.nested;
    lab.put(again.images);
    const auto point = lab.recover(second.timeline, again.admissible);
    if (!point)
      violation(outcome,
                "crash " + crash.what + ", then " + again.what + ": " + point.error().message());
    return !patience.over();
  });
}

// Every crash case of the recording; every `nested_every`th is recovered under recording and
// crashed again.
Outcome replay(Lab& lab, const Recorded& run, uint64_t seed, uint64_t nested_every,
               uint64_t stop_after = UINT64_MAX) {
  Outcome outcome;
  const Patience patience;
  std::mt19937_64 random(seed);
  CrashWalk walk(run.events, run.before, run.admissible, seed);
  walk.run([&](CrashCase& crash) {
    if (patience.over() && random() % 8 != 0) {
      ++outcome.left_out;
      return true;
    }
    ++outcome.cases;
    lab.put(crash.images);
    if (const Status clean = lab.fsck(run.timeline[crash.admissible.first]->version > 0); !clean) {
      violation(outcome, "crash " + crash.what + " (case " + std::to_string(outcome.cases) +
                             "): " + clean.error().message());
    }
    const auto point = lab.recover(run.timeline, crash.admissible);
    if (!point) {
      violation(outcome, "crash " + crash.what + " (case " + std::to_string(outcome.cases) +
                             "): " + point.error().message());
      return outcome.violations < stop_after;
    }
    if (nested_every != 0 && random() % 16 == 0) {
      if (const Status works = lab.works(run.timeline, *point); !works)
        violation(outcome, "after crash " + crash.what + ": " + works.error().message());
    }
    if (nested_every != 0 && !patience.over() && random() % nested_every == 0)
      replay_again(lab, run, crash, random() % 2 == 0, random(), patience, outcome);
    return true;
  });
  return outcome;
}

class Replay : public ::testing::TestWithParam<std::tuple<size_t, size_t>> {};

TEST_P(Replay, EveryCrashLeavesACommittedState) {
  const auto [script_index, volumes] = GetParam();
  const Script script = scripts()[script_index];
  LabOptions options;
  options.volumes = volumes;
  options.capacity_bytes += (volumes - 1) * 2 * 64 * kKiB;  // an extent must fit on one of them
  Lab lab(options, 7 + script_index);
  const Recorded run = record_script(lab, script);
  const auto begun = std::chrono::steady_clock::now();
  const bool soak = soak_factor > 1;
  const Outcome outcome = replay(lab, run, 1000 + script_index, soak ? 3 : 40);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  std::printf(
      "replay %s on %zu volume(s): %zu events, %llu cases (%llu left out), %llu after a second "
      "crash, %.1f s\n",
      script.name.c_str(), volumes, run.events.size(),
      static_cast<unsigned long long>(outcome.cases),
      static_cast<unsigned long long>(outcome.left_out),
      static_cast<unsigned long long>(outcome.nested), seconds);
  EXPECT_GT(outcome.cases, 20U);
  EXPECT_EQ(outcome.violations, 0U) << outcome.first;
}

// Under sanitizers two volumes only: they take the paths of one as well.
INSTANTIATE_TEST_SUITE_P(Paths, Replay,
                         ::testing::Combine(::testing::Range<size_t>(0, scripts().size()),
                                            ::testing::Range<size_t>(kLess == 1 ? 1 : 2, 3)),
                         [](const ::testing::TestParamInfo<Replay::ParamType>& test) {
                           return scripts()[std::get<0>(test.param)].name + "_" +
                                  std::to_string(std::get<1>(test.param)) + "_volumes";
                         });

// A check that cannot fail proves nothing: on disks that break the rules the same replay must find
// violations.
class Mutation : public ::testing::Test {
 protected:
  static Outcome replay_mutated(const std::function<void(std::vector<SimEvent>&)>& mutate) {
    Lab lab({}, 5);
    Recorded run = record_script(lab, scripts()[1]);
    mutate(run.events);
    return replay(lab, run, 1, 0, 3);
  }
};

TEST_F(Mutation, DroppedFlushesAreFound) {
  const Outcome outcome = replay_mutated([](std::vector<SimEvent>& events) {
    for (SimEvent& event : events) event.covers.clear();
  });
  EXPECT_GT(outcome.violations, 0U);
}

TEST_F(Mutation, AFlushThatComesOneWriteLateIsFound) {
  // The journal record is then under way while the data it names is not durable yet.
  const Outcome outcome = replay_mutated([](std::vector<SimEvent>& events) {
    for (size_t i = 0; i + 1 < events.size(); ++i) {
      size_t next = i + 1;
      while (next < events.size() && events[next].kind == SimEvent::Kind::note) ++next;
      if (events[i].kind != SimEvent::Kind::flush || next == events.size() ||
          events[next].kind != SimEvent::Kind::write)
        continue;
      SimEvent flush = events[i];  // copied behind the write; the notes keep their order
      events[i].kind = SimEvent::Kind::flush;
      events[i].covers.clear();
      events.insert(events.begin() + static_cast<ptrdiff_t>(next) + 1, std::move(flush));
      for (SimEvent& each : events) {
        for (size_t& write : each.covers) write += write > next ? 1U : 0U;
      }
      i = next + 1;
    }
  });
  EXPECT_GT(outcome.violations, 0U);
}

TEST_F(Mutation, AnEarlyAcknowledgementIsFound) {
  // Each commit is acknowledged when it begins.
  const Outcome outcome = replay_mutated([](std::vector<SimEvent>& events) {
    for (SimEvent& event : events) {
      if (event.kind == SimEvent::Kind::note && event.note == static_cast<uint64_t>(Note::begun))
        event.note = static_cast<uint64_t>(Note::durable);
    }
  });
  EXPECT_GT(outcome.violations, 0U);
}

TEST_F(Mutation, ADiskThatLiesAboutFlushesIsFound) {
  uint64_t violations = 0;
  for (uint64_t seed = 1; seed < 60; ++seed) {
    Lab lab({}, seed);
    Timeline timeline = {std::make_shared<const Point>()};
    lab.blank();
    SimFaults faults;
    faults.flush_lies = 1'000'000;
    lab.disk().set_faults(faults);
    {
      auto store = lab.open();
      ASSERT_OK(store);
      Recorder recorder(lab.disk(), **store, timeline);
      three_objects(recorder);
    }
    lab.disk().cut_power(seed);
    lab.disk().restore_power();
    lab.disk().set_faults({});
    if (!lab.recover(timeline, {timeline.size() - 1, timeline.size() - 1})) ++violations;
  }
  EXPECT_GT(violations, 30U);
}

}  // namespace
}  // namespace stoker
