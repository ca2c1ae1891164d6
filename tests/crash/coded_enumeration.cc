#include "coded_enumeration.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>

#include "coded_cases.h"
#include "lab.h"
#include "stoker/store/local/fsck.h"

namespace stoker {
namespace {

using coded::CodedStore;
using coded::CodedWorld;
using coded::CodedWorldOptions;
using coded::shard_bit;
using coded::ShardSet;

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

// Sets of at most m shards, to be lost in a crash: always the one that was used least, in an order
// by seed.
class Losses {
 public:
  Losses(const KM& code, uint64_t seed) : m_(code.m) {
    for (ShardSet set = 0; set < ShardSet{1} << (code.k + code.m); ++set) {
      if (static_cast<size_t>(std::popcount(set)) <= code.m) sets_.push_back({set, 0});
    }
    std::mt19937_64 random(seed);
    std::shuffle(sets_.begin(), sets_.end(), random);
  }
  // Holds those that are lost already. Together with those that are in trouble there are no more
  // than m; and so many fewer, if that can be.
  ShardSet next(ShardSet troubled, ShardSet lost = 0, size_t fewer = 0) {
    troubled_.insert(troubled);
    const size_t room = std::max(m_ - fewer, static_cast<size_t>(std::popcount(troubled)));
    Set& chosen = *least(troubled, lost, room);
    used_ += chosen.times++ == 0 ? 1 : 0;
    return chosen.shards;
  }
  // Whether next() would give one that it never gave.
  bool has_new(ShardSet troubled) {
    troubled_.insert(troubled);
    return used_ < sets_.size() && least(troubled, 0, m_)->times == 0;
  }
  size_t all() const { return sets_.size(); }
  size_t used() const { return used_; }
  // Of those that there are, the ones that can be lost beside what was ever in trouble.
  size_t possible() const {
    return static_cast<size_t>(std::count_if(sets_.begin(), sets_.end(), [this](const Set& set) {
      return std::any_of(troubled_.begin(), troubled_.end(), [&](ShardSet troubled) {
        return static_cast<size_t>(std::popcount(set.shards | troubled)) <= m_;
      });
    }));
  }

 private:
  struct Set {
    ShardSet shards;
    uint64_t times;
  };
  std::vector<Set>::iterator least(ShardSet troubled, ShardSet lost, size_t room) {
    const auto fits = [&](const Set& set) {
      return (set.shards & lost) == lost &&
             static_cast<size_t>(std::popcount(set.shards | troubled)) <= room;
    };
    // there is always one: those that are lost
    auto best = std::find_if(sets_.begin(), sets_.end(), fits);
    for (auto at = best; at != sets_.end() && best->times > 0; ++at) {
      if (at->times < best->times && fits(*at)) best = at;
    }
    return best;
  }

  const size_t m_;
  std::vector<Set> sets_;
  std::set<ShardSet> troubled_;
  size_t used_ = 0;
};

// One run of an enumeration.
class Enumeration {
 public:
  Enumeration(const KM& code, uint64_t seed, const EnumerationEffort& effort)
      : code_(code),
        cases_(effort.cases),
        stop_after_(effort.stop_after),
        every_set_(effort.every_set),
        seed_(seed),
        random_(seed),
        world_(world_options(code)),
        losses_(code, seed),
        later_(code, seed + 1) {}

  Enumerated run(const NamedState& state) {
    const auto recorded = record(world_, state);
    if (!recorded) {
      violation("the play itself: " + recorded.error().message());
      return result_;
    }
    // Where sets are left, further cases, until none is or no case can take one.
    size_t used = 0;
    do {
      used = losses_.used();
      play(state.kind, *recorded);
      only_new_ = true;
    } while (every_set_ && losses_.used() > used && losses_.used() < losses_.possible() &&
             result_.violations < stop_after_);
    result_.failure_sets = losses_.used();
    result_.failure_sets_all = losses_.possible();
    return result_;
  }

 private:
  void play(NamedState::Kind kind, const Recorded& run) {
    if (kind == NamedState::Kind::steps) steps(run);
    if (kind == NamedState::Kind::torn_apply) made(run, torn_applies(run, world_.paths()));
    if (kind == NamedState::Kind::lost_stage) made(run, lost_stages(run, world_.paths()));
    if (kind == NamedState::Kind::in_recovery) in_recovery(run);
    if (kind == NamedState::Kind::rotten_pages) made(run, rotten_pages(run, world_.paths()));
    if (kind == NamedState::Kind::gone_records && !only_new_)
      gone(run, gone_records(run, world_.paths()));
  }
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
    for (size_t i = 0; i < code_.k + code_.m; ++i)
      text += (lost & shard_bit(i)) != 0 ? " " + std::to_string(i) : "";
    return text + ": ";
  }
  // Recovers what is there; the store must be in an admissible state.
  Result<size_t> recover(const Timeline& timeline, Admissible range) {
    ++cases_checked;
    STOKER_ASSIGN(auto store, open_store(world_));
    return find_point(*store, timeline, range);
  }

  // Visits every stride-th of what the walk can leave behind and is wanted, so that there are about
  // `cases`. Returns how many there are.
  static uint64_t walk(const Recorded& run, uint64_t seed, uint64_t cases,
                       const std::function<bool(const CrashCase&)>& wanted,
                       const CrashWalk::Visit& visit) {
    uint64_t all = 0;
    CrashWalk(run.events, run.before, run.admissible, seed, effort()).run([&](CrashCase& crash) {
      all += wanted(crash) ? 1 : 0;
      return true;
    });
    const uint64_t stride = std::max<uint64_t>(1, all / std::max<uint64_t>(1, cases));
    uint64_t at = seed % stride;
    CrashWalk(run.events, run.before, run.admissible, seed, effort()).run([&](CrashCase& crash) {
      return !wanted(crash) || at++ % stride != 0 || visit(crash);
    });
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
      const ShardSet more = losses_.next(crash.troubled, lost);
      put(images_of(world_), more);
      const auto stays = recover(run.timeline, {*point, *point});
      if (!stays)
        return violation(name(crash, lost) + "served, then" + name({}, more) +
                         stays.error().message());
      put(crash.images, lost);
    }
    if (random_() % 4 != 0) return true;
    ++result_.lived_on;
    const Status lives = live_on(crash.images, lost | crash.troubled, run.timeline, *point);
    return lives || violation(name(crash, lost) + "later: " + lives.error().message());
  }

  void steps(const Recorded& run) {
    const uint64_t cases = only_new_ ? left() : cases_;
    const uint64_t states = walk(
        run, seed_, cases, [this](const CrashCase& crash) { return wanted(crash); },
        [&](CrashCase& crash) { return one(run, crash, losses_.next(crash.troubled)); });
    if (!only_new_) result_.states = states;
  }
  bool wanted(const CrashCase& crash) {
    // asked in any case: it takes down what there is beside which sets are lost
    const bool takes_new = losses_.has_new(crash.troubled);
    return takes_new || !only_new_;
  }
  uint64_t left() const { return losses_.possible() - losses_.used(); }

  // The whole story of one crash: recovered without some shards, written to; the lost ones come
  // back and are resynced; others are lost.
  Status live_on(const Images& images, ShardSet lost, const Timeline& timeline, size_t point) {
    Timeline further = {timeline[point]};
    {
      STOKER_ASSIGN(auto store, open_store(world_));
      Recorder recorder(world_.disk(), *store, further);
      STOKER_TRY(recorder.commit({{"works", 90'000, 0, 90'000, 99}}, Durability::durable));
      if (recorder.now().objects.contains("a") &&
          recorder.now().objects.at("a").bytes.size() == 250'000)
        STOKER_TRY(recorder.commit({{"a", 250'000, 8'192, 20'000, 98}}, Durability::durable));
      if (random_() % 2 == 0) STOKER_TRY(store->fold_all().wait());
    }
    for (size_t i = 0; i < world_.paths().size(); ++i) {
      if ((lost & shard_bit(i)) != 0)
        world_.disk().put(world_.paths()[i], images.at(world_.paths()[i]));
    }
    {
      STOKER_ASSIGN(auto store, open_store(world_));
      if (random_() % 2 == 0)
        STOKER_TRY(Recorder(world_.disk(), *store, further)
                       .commit({{"works", 90'000, 4'096, 4'096, 97}}, Durability::durable));
      STOKER_TRY(store->repair().wait());
      if (!store->health().troubles.empty())
        return fail(Code::corruption, "a shard that came back does not count: {}",
                    store->health().troubles[0]);
      if (random_() % 2 == 0) STOKER_TRY(store->fold_all().wait());
    }
    CodedOptions coded;
    coded.files = false;
    STOKER_ASSIGN(const auto report, fsck_coded_store({code_.k, code_.m, world_.paths()},
                                                      world_.runtime().runtime(), {}, coded));
    if (!report.problems.empty()) return fail(Code::corruption, "fsck: {}", report.problems[0]);
    put(images_of(world_), later_.next(0));
    STOKER_ASSIGN(const size_t found, recover(further, {further.size() - 1, further.size() - 1}));
    static_cast<void>(found);
    return {};
  }

  // About as many as are wanted, each at least once.
  void made(const Recorded& run, const Result<MadeCases>& cases) {
    if (!cases) return static_cast<void>(violation(cases.error().message()));
    result_.states = cases->states;
    const uint64_t count =
        only_new_ ? cases->states
                  : std::max(cases->states, std::min(cases_, cases->states * losses_.all()));
    for (uint64_t i = 0; i < count; ++i) {
      const CrashCase crash = cases->make(i, random_);
      if (wanted(crash) && !one(run, crash, losses_.next(crash.troubled))) return;
    }
  }

  // What is gone is an error, when it is opened to read and to write, and again; once it is written
  // anew all is as it should be.
  void gone(const Recorded& run, const Result<MadeCases>& cases) {
    if (!cases) return static_cast<void>(violation(cases.error().message()));
    result_.states = cases->states;
    const ModelState& objects = run.timeline.back()->objects;
    for (uint64_t i = 0; i < 2 * cases->states; ++i) {
      const CrashCase crash = cases->make(i, random_);
      ShardSet lost = 0;  // of those that have it, every other time as many as may be
      for (size_t shard = 0; i % 2 == 1 && static_cast<size_t>(std::popcount(lost)) < code_.m;
           ++shard)
        lost |= crash.troubled & shard_bit(shard);
      ++result_.cases;
      put(crash.images, lost);
      Status status = shows_nothing_else(objects, true);
      if (status) status = shows_nothing_else(objects, false);
      if (status) status = written_anew(objects);
      if (!status && !violation(name(crash, lost) + status.error().message())) return;
    }
  }
  Status shows_nothing_else(const ModelState& objects, bool read_only) {
    ++cases_checked;
    STOKER_ASSIGN(auto store, read_only ? world_.open_small(true) : open_store(world_));
    size_t refused = 0;
    for (const auto& [key, object] : objects) {
      for (size_t at = 0; at < object.bytes.size(); at += 4096) {
        Bytes into(std::min<size_t>(4096, object.bytes.size() - at));
        const auto read = store->read(key, at, slice_of(into), {}).wait();
        if (!read && read.error().code != Code::corruption) return read.error();
        if (!read) ++refused;
        if (read && std::memcmp(into.data(), object.bytes.data() + at, into.size()) != 0)
          return fail(Code::corruption, "'{}' at {} has other bytes than were written last", key,
                      at);
      }
    }
    return refused > 0 ? Status()
                       : fail(Code::corruption, "what is in no log is read all the same");
  }
  Status written_anew(const ModelState& objects) {
    Timeline further;
    {
      STOKER_ASSIGN(auto store, open_store(world_));
      further.push_back(std::make_shared<Point>(Point{store->info().committed, objects, {}}));
      Recorder recorder(world_.disk(), *store, further);
      STOKER_TRY(recorder.commit({{"a", 250'000, 0, 250'000, 96}}, Durability::durable));
      STOKER_TRY(recorder.commit({{"b", 200'000, 0, 200'000, 95}}, Durability::durable));
    }
    STOKER_ASSIGN(const size_t found, recover(further, {further.size() - 1, further.size() - 1}));
    static_cast<void>(found);
    return {};
  }

  // The crash that the play may end in, some shards lost, and then a crash at every step of what
  // opening does about it, others lost.
  void in_recovery(const Recorded& run) {
    const uint64_t inner = std::max<uint64_t>(8, 30 / kLess);
    const uint64_t outer =
        only_new_ ? std::max<uint64_t>(1, left() / inner) : std::max<uint64_t>(4, cases_ / 30);
    walk(
        run, seed_, outer, [this](const CrashCase& crash) { return wanted(crash); },
        [&](CrashCase& crash) { return crash_again(run, crash, inner); });
  }
  bool crash_again(const Recorded& run, const CrashCase& crash, uint64_t cases) {
    // Not as many as can be, so that there are others to lose in the second; none, where sets are
    // wanted that were not there.
    const ShardSet first = only_new_ ? 0 : losses_.next(crash.troubled, 0, 1);
    Recorded opening;
    opening.before = crash.images;
    for (size_t i = 0; i < world_.paths().size(); ++i) {
      if ((first & shard_bit(i)) != 0) opening.before.erase(world_.paths()[i]);
    }
    opening.timeline = run.timeline;
    opening.admissible = crash.admissible;
    put(crash.images, first);
    world_.disk().start_recording();
    const auto opened = recover(run.timeline, crash.admissible);
    if (opened) world_.disk().note(static_cast<uint64_t>(Note::durable), *opened);
    // and no other: it was served
    if (opened) world_.disk().note(static_cast<uint64_t>(Note::begun), *opened);
    opening.events = world_.disk().stop_recording();
    if (!opened) return violation(name(crash, first) + opened.error().message());
    bool going = true;
    const auto any = [](const CrashCase&) { return true; };
    const uint64_t states = walk(opening, random_(), cases, any, [&](CrashCase& again) {
      ++result_.cases;
      const ShardSet second = losses_.next(crash.troubled, first);
      put(again.images, second);
      const auto point = recover(run.timeline, again.admissible);
      if (!point)
        going =
            violation(name(crash, first) + "then " + name(again, second) + point.error().message());
      return going;
    });
    if (!only_new_) result_.states += states;
    return going;
  }

  const KM code_;
  const uint64_t cases_, stop_after_;
  const bool every_set_;
  const uint64_t seed_;
  bool only_new_ = false;  // of the sets of lost shards; what else there is was tried
  std::mt19937_64 random_;
  CodedWorld world_;
  Losses losses_;
  Losses later_;  // when a story ends, without a crash
  Enumerated result_;
};

}  // namespace

Enumerated enumerate(const KM& code, const NamedState& state, uint64_t seed,
                     const EnumerationEffort& effort) {
  return Enumeration(code, seed, effort).run(state);
}

}  // namespace stoker
