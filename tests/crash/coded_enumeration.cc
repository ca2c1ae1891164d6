#include "coded_enumeration.h"

#include <algorithm>
#include <bit>
#include <set>

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

Result<std::unique_ptr<CodedStore>> open_store(CodedWorld& world) {
  StoreOptions options;
  options.create = true;
  options.capacity_bytes = 3 << 20;
  options.chunk_bytes = 64 << 10;
  options.objects_max = 16;
  return world.open_coded(options);
}

// Two objects of some chunks each, and one that ends in its second block.
Status prepare(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 0, 250'000, 1}, {"b", 200'000, 0, 200'000, 2}, {"c", 5'000, 0, 5'000, 3}}));
  on.close();
  return {};
}

Status overlapping(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 8'192, 8'192, 11}}));
  STOKER_TRY(on.commit({{"a", 250'000, 12'288, 8'192, 12}}));
  return on.commit({{"a", 250'000, 10'000, 100, 13}});
}

Status fold(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 8'192, 8'192, 21}}));
  STOKER_TRY(on.commit({{"b", 200'000, 0, 4'096, 22}}));
  STOKER_TRY(on.fold());
  STOKER_TRY(on.commit({{"a", 250'000, 12'288, 4'096, 23}}));
  return on.fold();
}

Status update_during_a_fold(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 8'192, 8'192, 24}}));
  STOKER_TRY(on.commit_during_a_fold({{{"a", 250'000, 10'000, 4'096, 25}}, {{"b", 200'000, 0, 4'096, 26}}}));
  STOKER_TRY(on.commit_during_a_fold({{{"a", 250'000, 8'192, 4'096, 27}}}));
  return on.fold();
}

Status two_chunks_at_one_offset(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 4'096, 4'096, 31}}));
  STOKER_TRY(on.commit({{"a", 250'000, 65'536 + 4'096, 4'096, 32}}));
  STOKER_TRY(on.fold());
  STOKER_TRY(on.commit({{"a", 250'000, 65'536 + 4'096, 4'096, 33}}));
  return on.fold();
}

Status transaction(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 0, 4'096, 41}, {"a", 250'000, 131'072, 9'000, 46}, {"b", 200'000, 100'000, 9'000, 42}}));
  STOKER_TRY(on.commit({{"a", 250'000, 60'000, 20'000, 43}, {"c", 0}}));
  STOKER_TRY(on.commit({{"c", 70'000, 10, 60'000, 44}, {"b", 150'000}}));
  return on.commit({{"b", 200'000, 190'000, 10'000, 45}});
}

Status whole_objects(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 0, 250'000, 51}}));
  STOKER_TRY(on.commit({{"a", 250'000, 4'096, 4'096, 52}}));
  STOKER_TRY(on.commit({{"a", 300'000, 0, 300'000, 53}}));
  STOKER_TRY(on.fold());
  STOKER_TRY(on.commit({{"a", 0}}));
  return on.commit({{"d", 250'000, 0, 250'000, 54}});
}

Status full_logs(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"early", 70'000, 0, 70'000, 60}}));  // that no later COMMIT names
  for (uint64_t i = 0; i < 30; ++i) STOKER_TRY(on.commit({{"a", 250'000, (i * 7 % 60) * 4'096, 4'096, 100 + i}}));
  for (uint64_t i = 0; i < 25; ++i) STOKER_TRY(on.commit({{"c", 5'000 + i, 0, 5'000 + i, 200 + i}, {"b", 200'000, (i % 40) * 4'096, 4'096, 300 + i}}));
  return {};
}

// A shard misses updates and a fold, is back, and is resynced while there are newer blocks in the logs.
Status repair(Stage& on) {
  on.take_away(0);
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 0, 20'000, 61}}));
  STOKER_TRY(on.commit({{"a", 250'000, 65'536, 20'000, 62}, {"b", 200'000, 0, 9'000, 63}}));
  STOKER_TRY(on.fold());
  STOKER_TRY(on.commit({{"a", 250'000, 4'096, 8'192, 64}}));
  on.close();
  on.bring_back(0);
  STOKER_TRY(on.open());
  STOKER_TRY(on.repair());
  on.troubled(0);
  return on.commit({{"a", 250'000, 8'192, 4'096, 65}});
}

Status absent_then_back(Stage& on) {
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 0, 4'096, 66}}));
  on.close();
  on.take_away(1);
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 4'096, 4'096, 67}}));
  STOKER_TRY(on.commit({{"c", 9'000, 0, 9'000, 68}}));
  on.close();
  on.bring_back(1);
  STOKER_TRY(on.open());
  STOKER_TRY(on.commit({{"a", 250'000, 0, 8'192, 69}}));
  STOKER_TRY(on.repair());
  on.troubled(0);
  return on.fold();
}

struct Recorded {
  Images before;
  Timeline timeline = {std::make_shared<const Point>()};
  Admissible admissible;
  std::vector<SimEvent> events;
};

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
    if (state.kind == NamedState::Kind::torn_apply) torn_apply(*recorded);
    if (state.kind == NamedState::Kind::in_recovery) in_recovery(*recorded);
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

  // A fold overwrites blocks in place on D and all P: each of these writes torn after the same number of sectors, D's lost or there.
  void torn_apply(const Recorded& run) {
    coded::Shape shape;
    {
      Bytes sector(coded::kSuperblockBytes);
      run.before.begin()->second.read(0, sector);
      const auto superblock = coded::decode_superblock(sector);
      if (!superblock || !*superblock) return static_cast<void>(violation("the store has no superblock"));
      shape = (*superblock)->shape;
    }
    const auto in_place = [&shape](const SimEvent& write) {
      if (write.offset < shape.slot_at(0)) return false;
      return (write.offset - shape.slot_at(0)) % (shape.slot_at(1) - shape.slot_at(0)) >= 2 * shape.pages() * coded::kBlock;
    };
    // The moments at which the blocks of a fold are all under way.
    std::vector<CrashCase> moments;
    CrashEffort one_each;
    one_each.all_subsets_up_to = 0;
    one_each.samples = 1;
    CrashWalk(run.events, run.before, run.admissible, seed_, one_each).run([&](CrashCase& crash) {
      std::set<std::string> disks;
      for (const SimEvent* write : crash.pending) {
        if (in_place(*write)) disks.insert(write->path);
      }
      if (disks.size() == code_.m + 1 && disks.size() == crash.pending.size()) moments.push_back(crash);
      return true;
    });
    if (moments.empty()) return static_cast<void>(violation("the play has no fold whose blocks are all under way at once"));
    constexpr size_t kSectors = coded::kBlock / kSector;
    std::vector<std::pair<const CrashCase*, size_t>> all;
    for (const CrashCase& moment : moments) {
      for (size_t way = 0; way < 2 * (kSectors + 1) * 2; ++way) all.emplace_back(&moment, way);
    }
    result_.states = all.size();
    for (uint64_t i = 0; i < std::max<uint64_t>(cases_, all.size()); ++i) {
      const auto& [moment, way] = all[i % all.size()];
      const size_t cut = way % (kSectors + 1);
      const bool front = way / (kSectors + 1) % 2 == 0;
      const bool other = way / (kSectors + 1) / 2 == 0;  // of the writes the first, of D or P, is whole
      CrashCase crash = *moment;
      crash.images = crash.durable;
      crash.what = "torn at sector " + std::to_string(cut);
      for (const SimEvent* write : crash.pending) {
        SimImage& image = crash.images[write->path];
        if (other && write == crash.pending.front()) {
          image.write(write->offset, *write->bytes);
        } else {
          image.write_torn(write->offset, *write->bytes, [&](size_t sector) { return front == (sector % kSectors < cut); });
        }
      }
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
      result_.states += walk(opening.events, before, crash.admissible, random_(), 30, [&](CrashCase& inner) {
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

Status Stage::open() {
  STOKER_ASSIGN(store_, open_store(world_));
  recorder_.emplace(world_.disk(), *store_, timeline_);
  recorder_->opened();
  return {};
}

void Stage::close() {
  recorder_.reset();
  store_.reset();
}

Status Stage::commit_during_a_fold(const std::vector<std::vector<Recorder::Change>>& commits) {
  std::vector<Recorder::Together> list;
  for (const auto& changes : commits) list.push_back({changes, Durability::durable});
  Future<void> folded;
  STOKER_TRY(recorder_->commit_batch(list, [&] {
    auto held = world_.disk().hold();
    folded = store_->fold_all();
    return held;
  }));
  return folded.wait();
}

void Stage::take_away(size_t shard) {
  away_[shard] = world_.disk().image(world_.paths()[shard]);
  world_.disk().remove(world_.paths()[shard]);
  troubled(coded::shard_bit(shard));
}

void Stage::bring_back(size_t shard) { world_.disk().put(world_.paths()[shard], away_.at(shard)); }

void Stage::troubled(coded::ShardSet shards) { world_.disk().note(static_cast<uint64_t>(Note::troubled), shards); }

const std::vector<NamedState>& named_states() {
  using Kind = NamedState::Kind;
  static const std::vector<NamedState> states = {
      {"two_overlapping_updates", overlapping},
      {"a_fold", fold},
      {"an_update_during_a_fold", update_during_a_fold},
      {"folds_of_two_chunks_at_one_offset", two_chunks_at_one_offset},
      {"a_multi_range_transaction", transaction},
      {"whole_objects", whole_objects},
      {"full_logs", full_logs},
      {"an_apply_torn_on_all_parities", fold, Kind::torn_apply},
      {"a_repair", repair},
      {"a_shard_absent_then_back", absent_then_back},
      {"a_crash_inside_recovery_of_a_fold", fold, Kind::in_recovery},
      {"a_crash_inside_recovery_of_a_transaction", transaction, Kind::in_recovery},
      {"a_crash_inside_recovery_of_a_repair", repair, Kind::in_recovery},
  };
  return states;
}

Enumerated enumerate(const KM& code, const NamedState& state, uint64_t seed, uint64_t cases, uint64_t stop_after) { return Enumeration(code, seed, cases, stop_after).run(state); }

}  // namespace stoker
