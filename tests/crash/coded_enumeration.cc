#include "coded_enumeration.h"

#include <algorithm>
#include <bit>
#include <set>

#include "coded_cases.h"
#include "lab.h"
#include "stoker/store/local/fsck.h"

namespace stoker {
namespace {

using coded::CodedStore;
using coded::CodedWorld;
using coded::CodedWorldOptions;
using coded::ShardSet;
using coded::shard_bit;

CodedWorldOptions world_options(const KM& code) {
  CodedWorldOptions options;
  options.k = code.k;
  options.m = code.m;
  options.segment_bytes = 128 << 10;
  options.segments = 5;
  options.background = false;
  return options;
}

Images images_of(CodedWorld& world) {
  Images images;
  for (const auto& path : world.paths()) images[path] = world.disk().image(path);
  return images;
}

Result<Recorded> record(CodedWorld& world, const NamedState& state) {
  Recorded run;
  {
    Stage stage(world, run.timeline);
    STOKER_TRY(prepare(stage));
  }
  run.before = images_of(world);
  run.timeline = {run.timeline.back()};
  world.disk().start_recording();
  Status played;
  {
    Stage stage(world, run.timeline);
    played = state.play(stage);
  }
  run.events = world.disk().stop_recording();
  run.after = images_of(world);
  if (!played) return played.error();
  return run;
}

// Sets of at most m shards, each once before any comes again, by seed.
class Losses {
 public:
  Losses(const KM& code, uint64_t seed) : m_(code.m) {
    for (ShardSet set = 0; set < ShardSet{1} << (code.k + code.m); ++set) {
      if (static_cast<size_t>(std::popcount(set)) <= code.m) sets_.push_back(set);
    }
    std::mt19937_64 random(seed);
    std::shuffle(sets_.begin(), sets_.end(), random);
  }
  // Together with those that are in trouble there are no more than m.
  ShardSet next(ShardSet troubled) {
    for (;;) {
      const ShardSet set = sets_[next_++ % sets_.size()];
      if (static_cast<size_t>(std::popcount(set | troubled)) > m_) continue;
      used_.insert(set);
      return set;
    }
  }
  size_t all() const { return sets_.size(); }
  size_t used() const { return used_.size(); }

 private:
  const size_t m_;
  std::vector<ShardSet> sets_;
  std::set<ShardSet> used_;
  size_t next_ = 0;
};

// One run of an enumeration.
class Enumeration {
 public:
  Enumeration(const KM& code, uint64_t seed, uint64_t cases, uint64_t stop_after) : code_(code), cases_(cases), stop_after_(stop_after), seed_(seed), random_(seed), world_(world_options(code)), losses_(code, seed) {}

  Enumerated run(const NamedState& state) {
    const auto recorded = record(world_, state);
    if (!recorded) {
      violation("the play itself: " + recorded.error().message());
      return result_;
    }
    if (state.kind == NamedState::Kind::steps) steps(*recorded);
    if (state.kind == NamedState::Kind::torn_apply) made(*recorded, torn_applies(*recorded, world_.paths()));
    if (state.kind == NamedState::Kind::lost_stage) made(*recorded, lost_stages(*recorded, world_.paths()));
    if (state.kind == NamedState::Kind::in_recovery) in_recovery(*recorded);
    if (state.kind == NamedState::Kind::rotten_pages) made(*recorded, rotten_pages(*recorded, world_.paths()));
    result_.failure_sets = losses_.used();
    result_.failure_sets_all = losses_.all();
    return result_;
  }

 private:
  static CrashEffort effort() {
    CrashEffort effort;
    effort.all_subsets_up_to = 4;
    effort.samples = 6;
    effort.tears = 1;
    return effort;
  }
  bool violation(const std::string& what) {
    if (result_.violations++ == 0) result_.first = what;
    return result_.violations < stop_after_;
  }
  void put(const Images& images, ShardSet lost) {
    for (size_t i = 0; i < world_.paths().size(); ++i) {
      const auto at = images.find(world_.paths()[i]);
      if (at == images.end() || (lost & shard_bit(i)) != 0) {
        world_.disk().remove(world_.paths()[i]);
      } else {
        world_.disk().put(at->first, at->second);
      }
    }
  }
  std::string name(const CrashCase& crash, ShardSet lost) const {
    std::string text = "crash " + crash.what + " (case " + std::to_string(result_.cases) + ")";
    if (lost != 0) text += " without";
    for (size_t i = 0; i < code_.k + code_.m; ++i) text += (lost & shard_bit(i)) != 0 ? " " + std::to_string(i) : "";
    return text + ": ";
  }
  // Recovers what is there; the store must be in an admissible state.
  Result<size_t> recover(const Timeline& timeline, Admissible range) {
    ++cases_checked;
    STOKER_ASSIGN(auto store, open_store(world_));
    return find_point(*store, timeline, range);
  }

  // Visits every stride-th of what the walk can leave behind, so that there are about `cases`. Returns how many there are.
  static uint64_t walk(const std::vector<SimEvent>& events, const Images& before, Admissible admissible, uint64_t seed, uint64_t cases, const CrashWalk::Visit& visit) {
    uint64_t all = 0;
    CrashWalk(events, before, admissible, seed, effort()).run([&](CrashCase&) { return ++all > 0; });
    const uint64_t stride = std::max<uint64_t>(1, all / std::max<uint64_t>(1, cases));
    uint64_t at = seed % stride;
    CrashWalk(events, before, admissible, seed, effort()).run([&](CrashCase& crash) { return at++ % stride != 0 || visit(crash); });
    return all;
  }

  bool one(const Recorded& run, const CrashCase& crash, ShardSet lost) {
    ++result_.cases;
    put(crash.images, lost);
    const auto point = recover(run.timeline, crash.admissible);
    if (!point) return violation(name(crash, lost) + point.error().message());
    // What was served stays, whoever is lost after it.
    if (static_cast<size_t>(std::popcount(lost | crash.troubled)) < code_.m) {
      world_.disk().cut_power(random_());
      world_.disk().restore_power();
      const ShardSet more = losses_.next(lost | crash.troubled);
      put(images_of(world_), lost | more);
      const auto stays = recover(run.timeline, {*point, *point});
      if (!stays) return violation(name(crash, lost) + "served, then" + name({}, more) + stays.error().message());
      put(crash.images, lost);
    }
    if (random_() % 4 != 0) return true;
    ++result_.lived_on;
    const Status lives = live_on(crash.images, lost | crash.troubled, run.timeline, *point);
    return lives || violation(name(crash, lost) + "later: " + lives.error().message());
  }

  void steps(const Recorded& run) {
    result_.states = walk(run.events, run.before, run.admissible, seed_, cases_, [&](CrashCase& crash) { return one(run, crash, losses_.next(crash.troubled)); });
  }

  // The whole story of one crash: recovered without some shards, written to; the lost ones come back and are resynced; others are lost.
  Status live_on(const Images& images, ShardSet lost, const Timeline& timeline, size_t point) {
    Timeline further = {timeline[point]};
    {
      STOKER_ASSIGN(auto store, open_store(world_));
      Recorder recorder(world_.disk(), *store, further);
      STOKER_TRY(recorder.commit({{"works", 90'000, 0, 90'000, 99}}, Durability::durable));
      if (recorder.now().objects.contains("a") && recorder.now().objects.at("a").bytes.size() == 250'000) STOKER_TRY(recorder.commit({{"a", 250'000, 8'192, 20'000, 98}}, Durability::durable));
      if (random_() % 2 == 0) STOKER_TRY(store->fold_all().wait());
    }
    for (size_t i = 0; i < world_.paths().size(); ++i) {
      if ((lost & shard_bit(i)) != 0) world_.disk().put(world_.paths()[i], images.at(world_.paths()[i]));
    }
    {
      STOKER_ASSIGN(auto store, open_store(world_));
      if (random_() % 2 == 0) STOKER_TRY(Recorder(world_.disk(), *store, further).commit({{"works", 90'000, 4'096, 4'096, 97}}, Durability::durable));
      STOKER_TRY(store->repair().wait());
      if (!store->health().troubles.empty()) return make_error(Code::corruption, "a shard that came back does not count: " + store->health().troubles[0]);
      if (random_() % 2 == 0) STOKER_TRY(store->fold_all().wait());
    }
    CodedOptions coded;
    coded.files = false;
    STOKER_ASSIGN(const auto report, fsck_coded_store({code_.k, code_.m, world_.paths()}, world_.runtime().runtime(), {}, coded));
    if (!report.problems.empty()) return make_error(Code::corruption, "fsck: " + report.problems[0]);
    put(images_of(world_), losses_.next(0));
    STOKER_ASSIGN(const size_t found, recover(further, {further.size() - 1, further.size() - 1}));
    static_cast<void>(found);
    return {};
  }

  // About as many as are wanted, each at least once.
  void made(const Recorded& run, const Result<MadeCases>& cases) {
    if (!cases) return static_cast<void>(violation(cases.error().message()));
    result_.states = cases->states;
    const uint64_t count = std::max(cases->states, std::min(cases_, cases->states * losses_.all()));
    for (uint64_t i = 0; i < count; ++i) {
      const CrashCase crash = cases->make(i, random_);
      if (!one(run, crash, losses_.next(crash.troubled))) return;
    }
  }

  // The crash that the play may end in, some shards lost, and then a crash at every step of what opening does about it, others lost.
  void in_recovery(const Recorded& run) {
    const uint64_t outer = std::max<uint64_t>(4, cases_ / 30);
    walk(run.events, run.before, run.admissible, seed_, outer, [&](CrashCase& crash) {
      const ShardSet first = losses_.next(crash.troubled);
      Images before = crash.images;
      for (size_t i = 0; i < world_.paths().size(); ++i) {
        if ((first & shard_bit(i)) != 0) before.erase(world_.paths()[i]);
      }
      put(crash.images, first);
      Recorded opening;
      opening.timeline = run.timeline;
      world_.disk().start_recording();
      const auto opened = recover(run.timeline, crash.admissible);
      if (opened) world_.disk().note(static_cast<uint64_t>(Note::durable), *opened);
      if (opened) world_.disk().note(static_cast<uint64_t>(Note::begun), *opened);  // and no other: it was served
      opening.events = world_.disk().stop_recording();
      if (!opened) return violation(name(crash, first) + opened.error().message());
      bool going = true;
      result_.states += walk(opening.events, before, crash.admissible, random_(), std::max<uint64_t>(8, 30 / kLess), [&](CrashCase& inner) {
        ++result_.cases;
        const ShardSet second = losses_.next(first | crash.troubled);
        put(inner.images, second | first);
        const auto point = recover(run.timeline, inner.admissible);
        if (!point) going = violation(name(crash, first) + "then " + name(inner, second) + point.error().message());
        return going;
      });
      return going;
    });
  }

  const KM code_;
  const uint64_t cases_, stop_after_, seed_;
  std::mt19937_64 random_;
  CodedWorld world_;
  Losses losses_;
  Enumerated result_;
};

}  // namespace

Enumerated enumerate(const KM& code, const NamedState& state, uint64_t seed, uint64_t cases, uint64_t stop_after) { return Enumeration(code, seed, cases, stop_after).run(state); }

}  // namespace stoker
