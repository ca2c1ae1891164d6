// Records the I/O of every protocol of the coded store and recovers every disk set that a power cut and the loss of up to m shards could have
// left behind: what was acknowledged is there, nothing is mixed, what was chosen once stays, parity fits the data.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <functional>

#include "lab.h"
#include "stoker/testing/coded_world.h"
#include "stoker/store/local/fsck.h"
#include "stoker/testing/recording.h"

namespace stoker {
namespace {

using coded::CodedStore;
using coded::CodedWorld;
using coded::CodedWorldOptions;
using Change = Recorder::Change;
constexpr auto kDurable = Durability::durable;

struct Chunks {
  size_t k, m;
};

CodedWorldOptions world_options(const Chunks& code) {
  CodedWorldOptions options;
  options.k = code.k;
  options.m = code.m;
  options.segment_bytes = 256 << 10;
  options.segments = 5;
  options.background = false;
  return options;
}

Result<std::unique_ptr<CodedStore>> open(CodedWorld& world, bool create = false) {
  StoreOptions options;
  options.create = create;
  options.capacity_bytes = 3 << 20;
  options.chunk_bytes = 64 << 10;
  options.objects_max = 16;
  return world.open_coded(options);
}

// A protocol: what is there before, and what is recorded.
struct Script {
  std::string name;
  std::function<void(Recorder&, CodedStore&)> recorded;
};

// Two objects of a stripe each, and one that ends in its second block.
void before(Recorder& run) {
  ASSERT_OK(run.commit({{"a", 250'000, 0, 250'000, 1}, {"b", 200'000, 0, 200'000, 2}, {"c", 5'000, 0, 5'000, 3}}, kDurable));
}

std::vector<Script> scripts() {
  return {
      {"updates_that_overlap",
       [](Recorder& run, CodedStore&) {
         ASSERT_OK(run.commit({{"a", 250'000, 8'192, 8'192, 11}}, kDurable));
         ASSERT_OK(run.commit({{"a", 250'000, 12'288, 8'192, 12}}, kDurable));
         ASSERT_OK(run.commit({{"a", 250'000, 10'000, 100, 13}}, kDurable));
       }},
      {"fold",
       [](Recorder& run, CodedStore& store) {
         ASSERT_OK(run.commit({{"a", 250'000, 8'192, 8'192, 21}}, kDurable));
         ASSERT_OK(run.commit({{"b", 200'000, 0, 4'096, 22}}, kDurable));
         ASSERT_OK(store.fold_all().wait());
         ASSERT_OK(run.commit({{"a", 250'000, 12'288, 4'096, 23}}, kDurable));
         ASSERT_OK(store.fold_all().wait());
       }},
      {"fold_of_two_chunks_at_one_offset",
       [](Recorder& run, CodedStore& store) {
         ASSERT_OK(run.commit({{"a", 250'000, 4'096, 4'096, 31}}, kDurable));
         ASSERT_OK(run.commit({{"a", 250'000, 65'536 + 4'096, 4'096, 32}}, kDurable));
         ASSERT_OK(store.fold_all().wait());
         ASSERT_OK(run.commit({{"a", 250'000, 65'536 + 4'096, 4'096, 33}}, kDurable));
         ASSERT_OK(store.fold_all().wait());
       }},
      {"transaction_over_ranges_and_objects",
       [](Recorder& run, CodedStore&) {
         ASSERT_OK(run.commit({{"a", 250'000, 0, 4'096, 41}, {"b", 200'000, 100'000, 9'000, 42}}, kDurable));
         ASSERT_OK(run.commit({{"a", 250'000, 60'000, 20'000, 43}, {"c", 0}}, kDurable));
         ASSERT_OK(run.commit({{"c", 70'000, 10, 60'000, 44}, {"b", 150'000}}, kDurable));
         ASSERT_OK(run.commit({{"b", 200'000, 190'000, 10'000, 45}}, kDurable));
       }},
      {"whole_objects",
       [](Recorder& run, CodedStore& store) {
         ASSERT_OK(run.commit({{"a", 250'000, 0, 250'000, 51}}, kDurable));
         ASSERT_OK(run.commit({{"a", 250'000, 4'096, 4'096, 52}}, kDurable));
         ASSERT_OK(run.commit({{"a", 300'000, 0, 300'000, 53}}, kDurable));
         ASSERT_OK(store.fold_all().wait());
         ASSERT_OK(run.commit({{"a", 0}}, kDurable));
         ASSERT_OK(run.commit({{"d", 250'000, 0, 250'000, 54}}, kDurable));
       }},
      {"transactions_fill_the_logs",
       [](Recorder& run, CodedStore&) {
         ASSERT_OK(run.commit({{"early", 70'000, 0, 70'000, 60}}, kDurable));  // that no later COMMIT names
         for (uint64_t i = 0; i < 50; ++i) ASSERT_OK(run.commit({{"c", 5'000 + i, 0, 5'000 + i, 200 + i}, {"b", 200'000, (i % 40) * 4'096, 4'096, 300 + i}}, kDurable));
       }},
      {"full_logs",
       [](Recorder& run, CodedStore&) {
         for (uint64_t i = 0; i < 90; ++i) ASSERT_OK(run.commit({{"a", 250'000, (i * 7 % 60) * 4'096, 4'096, 100 + i}}, kDurable));
       }},
  };
}

struct Recorded {
  Images before;
  Timeline timeline;
  Admissible admissible;
  std::vector<SimEvent> events;
};

Images images_of(CodedWorld& world) {
  Images images;
  for (const auto& path : world.paths()) images[path] = world.disk().image(path);
  return images;
}

Recorded record_script(CodedWorld& world, const Script& script) {
  Recorded run;
  run.timeline = {std::make_shared<const Point>()};
  {
    auto store = open(world, true);
    EXPECT_OK(store);
    Recorder recorder(world.disk(), **store, run.timeline);
    before(recorder);
  }
  run.before = images_of(world);
  run.timeline = {run.timeline.back()};
  run.timeline.push_back(run.timeline[0]);
  world.disk().start_recording();
  {
    auto store = open(world);
    EXPECT_OK(store);
    world.disk().note(static_cast<uint64_t>(Note::begun), 1);
    Recorder recorder(world.disk(), **store, run.timeline);
    recorder.opened();
    script.recorded(recorder, **store);
  }
  run.events = world.disk().stop_recording();
  return run;
}

class Patience {
 public:
  explicit Patience(double seconds) : seconds_(seconds) {}
  bool over() const { return soak_factor == 1 && std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count() > seconds_; }

 private:
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  const double seconds_;
};

struct Outcome {
  uint64_t cases = 0, full = 0, violations = 0;
  std::string first;
};

// Random shards, at most m of them.
std::vector<size_t> some_shards(std::mt19937_64& random, const Chunks& code) {
  std::vector<size_t> all;
  for (size_t i = 0; i < code.k + code.m; ++i) all.push_back(i);
  std::shuffle(all.begin(), all.end(), random);
  all.resize(random() % 4 == 0 ? random() % (code.m + 1) : code.m);
  return all;
}

void put(CodedWorld& world, const Images& images, const std::vector<size_t>& lost) {
  for (const auto& [path, image] : images) world.disk().put(path, image);
  for (const size_t shard : lost) world.disk().remove(world.paths()[shard]);
}

// Recovers what is there; the store must be in an admissible state.
Result<size_t> recover(CodedWorld& world, const Timeline& timeline, Admissible range) {
  ++cases_checked;
  STOKER_ASSIGN(auto store, open(world));
  return find_point(*store, timeline, range);
}

// The whole story of one crash: recovered without some shards, written to; the lost ones come back and are resynced; others are lost.
Status live_on(CodedWorld& world, const Chunks& code, const Images& images, const std::vector<size_t>& lost, const Timeline& timeline, size_t point, std::mt19937_64& random) {
  Timeline further = {timeline[point]};
  {
    STOKER_ASSIGN(auto store, open(world));
    Recorder recorder(world.disk(), *store, further);
    STOKER_TRY(recorder.commit({{"works", 90'000, 0, 90'000, 99}}, kDurable));
    if (recorder.now().objects.contains("a") && recorder.now().objects.at("a").bytes.size() == 250'000) STOKER_TRY(recorder.commit({{"a", 250'000, 8'192, 20'000, 98}}, kDurable));
    if (random() % 2 == 0) STOKER_TRY(store->fold_all().wait());
  }
  for (const size_t shard : lost) world.disk().put(world.paths()[shard], images.at(world.paths()[shard]));
  {
    STOKER_ASSIGN(auto store, open(world));
    if (random() % 2 == 0) STOKER_TRY(Recorder(world.disk(), *store, further).commit({{"works", 90'000, 4'096, 4'096, 97}}, kDurable));
    STOKER_TRY(store->repair().wait());
    if (!store->health().troubles.empty()) return make_error(Code::corruption, "a shard that came back does not count: " + store->health().troubles[0]);
    if (random() % 2 == 0) STOKER_TRY(store->fold_all().wait());
  }
  CodedOptions coded;
  coded.files = false;
  STOKER_ASSIGN(const auto report, fsck_coded_store({code.k, code.m, world.paths()}, world.runtime().runtime(), {}, coded));
  if (!report.problems.empty()) return make_error(Code::corruption, "fsck: " + report.problems[0]);
  for (const size_t shard : some_shards(random, code)) world.disk().remove(world.paths()[shard]);
  STOKER_ASSIGN(const size_t found, recover(world, further, {further.size() - 1, further.size() - 1}));
  static_cast<void>(found);
  return {};
}

void violation(Outcome& outcome, const std::string& what) {
  if (outcome.violations++ == 0) outcome.first = what;
}

Outcome replay(CodedWorld& world, const Chunks& code, const Recorded& run, uint64_t seed, double seconds, uint64_t one_in, uint64_t stop_after = UINT64_MAX) {
  Outcome outcome;
  const Patience patience(seconds);
  std::mt19937_64 random(seed);
  CrashEffort effort;
  effort.all_subsets_up_to = 4;
  effort.samples = 6;
  effort.tears = 1;
  CrashWalk walk(run.events, run.before, run.admissible, seed, effort);
  walk.run([&](CrashCase& crash) {
    if (random() % one_in != 0) return true;
    if (patience.over() && random() % 16 != 0) return true;
    ++outcome.cases;
    const std::vector<size_t> lost = some_shards(random, code);
    std::string who = " without";
    for (const size_t shard : lost) who += " " + std::to_string(shard);
    put(world, crash.images, lost);
    const std::string what = "crash " + crash.what + " (case " + std::to_string(outcome.cases) + ")" + who + ": ";
    const auto point = recover(world, run.timeline, crash.admissible);
    if (!point) {
      violation(outcome, what + point.error().message());
      return outcome.violations < stop_after;
    }
    // What was served stays: with other shards lost now, on top of none.
    if (stop_after == UINT64_MAX && random() % 4 == 0) {
      ++outcome.full;
      if (const Status lives = live_on(world, code, crash.images, lost, run.timeline, *point, random); !lives) violation(outcome, what + "later: " + lives.error().message());
    }
    return outcome.violations < stop_after;
  });
  return outcome;
}

class CodedReplay : public ::testing::TestWithParam<std::tuple<size_t, size_t>> {};

constexpr Chunks kCodes[] = {{2, 1}, {4, 2}, {6, 3}};

TEST_P(CodedReplay, EveryCrashAndLossLeavesACommittedState) {
  const auto [script_index, code_index] = GetParam();
  const Chunks code = kCodes[code_index];
  const Script script = scripts()[script_index];
  CodedWorld world(world_options(code));
  const Recorded run = record_script(world, script);
  const auto begun = std::chrono::steady_clock::now();
  const Outcome outcome = replay(world, code, run, 4000 + script_index * 10 + code_index, 0.5, soak_factor > 1 ? 1 : 3);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  std::printf("coded replay %s, %zu+%zu: %zu events, %llu cases, %llu lived on, %.1f s\n", script.name.c_str(), code.k, code.m, run.events.size(), static_cast<unsigned long long>(outcome.cases),
              static_cast<unsigned long long>(outcome.full), seconds);
  EXPECT_GT(outcome.cases, 10U);
  EXPECT_EQ(outcome.violations, 0U) << outcome.first;
}

INSTANTIATE_TEST_SUITE_P(Paths, CodedReplay, ::testing::Combine(::testing::Range<size_t>(0, scripts().size()), ::testing::Range<size_t>(0, std::size(kCodes))),
                         [](const ::testing::TestParamInfo<CodedReplay::ParamType>& test) {
                           const Chunks code = kCodes[std::get<1>(test.param)];
                           return scripts()[std::get<0>(test.param)].name + "_" + std::to_string(code.k) + "_" + std::to_string(code.m);
                         });

// A check that cannot fail proves nothing: the same replay of a store that leaves a step out, or takes it too early, must find violations. A write that
// is taken out of the recording stands for code that never made it; an acknowledgement moved forward for code that did not wait.
enum class What : uint8_t { superblock, image, val, commit, stage, fold, page, block };

What what_of(const coded::Shape& shape, const SimEvent& write) {
  if (write.offset < coded::kHeadBytes) return What::superblock;
  if (write.offset < shape.segment_at(0)) return What::image;
  if (write.offset >= shape.slot_at(0)) return (write.offset - shape.slot_at(0)) % (shape.slot_at(1) - shape.slot_at(0)) < 2 * shape.pages() * coded::kBlock ? What::page : What::block;
  const uint64_t payload = *reinterpret_cast<const uint32_t*>(write.bytes->data() + 4);
  const auto content = coded::decode_payload(shape, std::span(*write.bytes).subspan(kFrameHeaderBytes, payload));
  EXPECT_OK(content);
  const auto& item = content->items.at(0);
  if (std::holds_alternative<coded::ValItem>(item)) return What::val;
  if (std::holds_alternative<coded::CommitItem>(item)) return What::commit;
  return std::holds_alternative<coded::StageItem>(item) ? What::stage : What::fold;
}

class CodedMutation : public ::testing::Test {
 protected:
  using Edit = std::function<void(std::vector<SimEvent>&, const coded::Shape&)>;

  // How many violations the replay of this script finds when its recording is edited.
  static uint64_t found(const std::string& script_name, const Edit& edit, uint64_t one_in = 1) {
    const auto all = scripts();
    const auto script = std::find_if(all.begin(), all.end(), [&](const Script& each) { return each.name == script_name; });
    CodedWorld world(world_options(code_));
    Recorded run = record_script(world, *script);
    Bytes sector(coded::kSuperblockBytes);
    run.before.begin()->second.read(0, sector);
    const auto superblock = coded::decode_superblock(sector);
    EXPECT_TRUE(superblock && *superblock);
    edit(run.events, (*superblock)->shape);
    return replay(world, code_, run, 1, 1e9, one_in, 1).violations;  // to the first one, however slow the machine is
  }
  // The write never reaches its disk.
  static void lose(std::vector<SimEvent>& events, size_t index) {
    events[index].kind = SimEvent::Kind::flush;
    events[index].covers.clear();
    for (SimEvent& event : events) std::erase(event.covers, index);
  }
  static Edit losing(What what, size_t but_first = 0) {
    return [what, but_first](std::vector<SimEvent>& events, const coded::Shape& shape) {
      size_t seen = 0;
      for (size_t i = first_note(events); i < events.size(); ++i) {
        if (events[i].kind == SimEvent::Kind::write && what_of(shape, events[i]) == what && seen++ % 6 >= but_first) lose(events, i);
      }
    };
  }
  static size_t first_note(const std::vector<SimEvent>& events) {
    size_t at = 0;
    while (events[at].kind != SimEvent::Kind::note) ++at;
    return at;
  }
  // What was written in one way is on the disk as soon as something else was.
  static Edit hurrying(What what, What before) {
    return [what, before](std::vector<SimEvent>& events, const coded::Shape& shape) {
      std::vector<SimEvent> out;
      std::vector<size_t> moved(events.size());
      std::vector<bool> taken(events.size());
      const auto take = [&](size_t i) {
        moved[i] = out.size();
        taken[i] = true;
        out.push_back(events[i]);
      };
      for (size_t i = 0; i < events.size(); ++i) {
        if (taken[i]) continue;
        const bool border = i > first_note(events) && events[i].kind == SimEvent::Kind::write && what_of(shape, events[i]) == before;
        if (border) {
          for (size_t j = i + 1; j < events.size() && events[j].kind != SimEvent::Kind::note; ++j) {
            if (!taken[j] && events[j].kind == SimEvent::Kind::write && what_of(shape, events[j]) == what) take(j);
          }
        }
        take(i);
      }
      for (SimEvent& event : out) {
        for (size_t& index : event.covers) index = moved[index];
      }
      events = std::move(out);
    };
  }

  static constexpr Chunks code_{4, 2};
};

TEST_F(CodedMutation, NoFlushIsFound) {
  EXPECT_GT(found("updates_that_overlap", [](auto& events, const auto&) {
              for (SimEvent& event : events) event.covers.clear();
            }), 0U);
}
TEST_F(CodedMutation, AnAcknowledgementBeforeTheFlushIsFound) {
  EXPECT_GT(found("updates_that_overlap", [](std::vector<SimEvent>& events, const auto&) {
              for (size_t i = 1; i < events.size(); ++i) {
                if (events[i].kind != SimEvent::Kind::note || events[i].note != static_cast<uint64_t>(Note::durable)) continue;
                size_t from = i;
                while (from > 0 && events[from - 1].kind == SimEvent::Kind::flush) --from;
                std::rotate(events.begin() + static_cast<ptrdiff_t>(from), events.begin() + static_cast<ptrdiff_t>(i), events.begin() + static_cast<ptrdiff_t>(i) + 1);
              }
            }), 0U);
}
TEST_F(CodedMutation, ValuesOnOneShardOnlyAreFound) { EXPECT_GT(found("updates_that_overlap", losing(What::val, 1)), 0U); }
TEST_F(CodedMutation, ADroppedCommitIsFound) { EXPECT_GT(found("transaction_over_ranges_and_objects", losing(What::commit)), 0U); }
TEST_F(CodedMutation, ACommitOnOneShardOnlyIsFound) { EXPECT_GT(found("transaction_over_ranges_and_objects", losing(What::commit, 1)), 0U); }
TEST_F(CodedMutation, ACommitBeforeWhatItNamesIsFound) { EXPECT_GT(found("whole_objects", hurrying(What::commit, What::block)), 0U); }
TEST_F(CodedMutation, ASkippedStageIsFound) { EXPECT_GT(found("fold_of_two_chunks_at_one_offset", losing(What::stage)), 0U); }
TEST_F(CodedMutation, ASkippedDecisionIsFound) { EXPECT_GT(found("fold", losing(What::fold)), 0U); }
TEST_F(CodedMutation, BlocksInPlaceBeforeTheDecisionAreFound) { EXPECT_GT(found("fold", hurrying(What::block, What::stage)), 0U); }
TEST_F(CodedMutation, BlocksThatAFoldNeverWroteAreFound) { EXPECT_GT(found("whole_objects", losing(What::block)), 0U); }
TEST_F(CodedMutation, HeadersThatWereNeverWrittenAreFound) { EXPECT_GT(found("whole_objects", losing(What::page)), 0U); }
TEST_F(CodedMutation, ImagesThatWereNeverWrittenAreFound) { EXPECT_GT(found("transactions_fill_the_logs", losing(What::image), 16), 0U); }

}  // namespace
}  // namespace stoker
