#include "coded_sim.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <optional>

#include "lab.h"
#include "stoker/store/local/fsck.h"
#include "stoker/testing/coded_world.h"
#include "stoker/testing/recording.h"

namespace stoker {

void SimCounts::add(const SimCounts& other) {
  commits += other.commits, batches += other.batches, folds += other.folds,
      repairs += other.repairs;
  opens += other.opens, crashes += other.crashes, crashes_in_recovery += other.crashes_in_recovery;
  lost += other.lost, returned += other.returned, old_copies += other.old_copies,
      failed += other.failed, flipped += other.flipped, slowed += other.slowed;
  final_losses += other.final_losses;
}

std::string SimCounts::text() const {
  std::string out;
  const auto say = [&out](const char* what, uint64_t count) {
    out += (out.empty() ? "" : ", ") + std::to_string(count) + " " + what;
  };
  say("commits", commits), say("in batches", batches), say("folds", folds), say("repairs", repairs),
      say("opens", opens), say("crashes", crashes), say("of them in recovery", crashes_in_recovery);
  say("shards lost", lost), say("returned", returned), say("as old copies", old_copies),
      say("failed under load", failed), say("with a flipped bit", flipped), say("slowed", slowed);
  say("sets of m lost at the end", final_losses);
  return out;
}

namespace {

using coded::CodedStore;
using coded::CodedWorld;
using coded::CodedWorldOptions;
using Change = Recorder::Change;

std::string text_of(const std::vector<Change>& changes) {
  std::string text;
  for (const Change& each : changes)
    text += " " + each.key + "=" + std::to_string(each.bytes) + ":" + std::to_string(each.offset) +
            "+" + std::to_string(each.written);
  return text;
}

constexpr size_t kObjectMax = 300'000;

CodedWorldOptions options_of(uint64_t seed) {
  constexpr struct {
    size_t k, m, shards;
  } kCodes[] = {{4, 2, 6}, {2, 1, 3}, {4, 2, 8}, {6, 3, 9}, {3, 3, 7}, {1, 2, 5}};
  const auto& code = kCodes[seed % std::size(kCodes)];
  CodedWorldOptions options;
  options.k = code.k;
  options.m = code.m;
  options.shards = code.shards;
  options.segment_bytes = 256 << 10;
  options.segments = static_cast<uint32_t>(4 + seed / std::size(kCodes) % 4);  // 4 is the least
  options.background = false;  // folds and repairs come as steps of the story
  options.seed = seed;
  options.faults = seed % 2 == 0;
  return options;
}

class Story {
 public:
  Story(uint64_t seed, bool tell)
      : seed_(seed),
        tell_(tell),
        options_(options_of(seed)),
        world_(options_),
        random_(seed * 0x9E3779B97F4A7C15ULL) {}
  ~Story() {
    recorder_.reset();
    store_.reset();
  }
  Status run();
  const SimCounts& counts() const { return counts_; }

 private:
  // What is wrong with a shard; one of which nothing is said is whole and live.
  enum class Trouble : uint8_t {
    failed,   // its transfers fail, or failed; or it is back from being away
    flipped,  // a bit of it is not what was written
    away,     // it is not there
  };

  uint64_t below(uint64_t n) { return random_() % n; }
  void say(const std::string& what) const {
    if (tell_) std::printf("  %s\n", what.c_str());
  }
  static Error wrong(const std::string& what) { return fail(Code::corruption, "{}", what); }
  SimDisk& disk() { return world_.disk(); }
  const std::string& path(size_t shard) const { return world_.paths()[shard]; }
  bool counts(const coded::Health& health, size_t shard) const {
    return std::find(health.live.begin(), health.live.end(), path(shard)) != health.live.end();
  }

  Status open(bool may_crash);
  Status reopen();
  Status crash();
  void close() {
    recorder_.reset();
    store_.reset();
  }
  // While the power may go, anything may fail; `failed` says that something did.
  Status expect(const Status& status, const std::string& what, bool& failed);
  Status step();
  Status one_commit(bool& failed);
  Status some_commits(bool& failed);
  std::vector<Change> changes(size_t objects);
  Status read_something(bool& failed);
  Status fold(bool& failed);
  Status repair(bool& failed);
  Status compare_the_live() const;
  std::optional<size_t> victim();
  void lose_or_return();
  void fail_a_shard();
  void flip_a_bit();
  Status end();

  const uint64_t seed_;
  const bool tell_;
  const CodedWorldOptions options_;
  CodedWorld world_;
  std::mt19937_64 random_;
  Timeline timeline_ = {std::make_shared<const Point>()};
  std::unique_ptr<CodedStore> store_;
  std::optional<Recorder> recorder_;
  size_t acknowledged_ = 0;
  std::map<size_t, Trouble> troubles_;  // never more than m
  std::map<size_t, SimImage> kept_;     // of shards that are away
  std::map<size_t, SimImage> copies_;   // of shards at an earlier opening
  std::map<size_t, uint64_t> lost_at_;  // how often the store had been opened then
  uint64_t opened_ = 0;
  bool cut_ = false;      // the power will go, or has gone
  bool failing_ = false;  // transfers of a shard in trouble will fail
  uint64_t pattern_ = 0;
  SimCounts counts_;
};

Status Story::expect(const Status& status, const std::string& what, bool& failed) {
  failed = !status;
  if (status) return {};
  say(what + ": " + status.error().message());
  if (cut_ && status.error().code != Code::mismatch) return {};
  // The space of the store, that is: slots or table. A full log holds commits up until enough is
  // folded, and fails none.
  const bool of_log = status.error().what.find("the log") != std::string::npos;
  if (status.error().code == Code::out_of_space && !of_log) return {};
  return wrong(what + " failed, although nothing is broken: " + status.error().message());
}

// Opens what is there, and finds it in a state that it may be in.
Status Story::open(bool may_crash) {
  for (;;) {
    cut_ = failing_ = false;
    disk().restore_power();
    if (may_crash && below(3) == 0) {
      disk().cut_power_after(below(90), random_());
      cut_ = true;
    }
    StoreOptions options;
    options.create = true;
    options.capacity_bytes = 4 << 20;
    options.chunk_bytes = 64 << 10;
    options.objects_max = 16;
    ++counts_.opens;
    auto opened = world_.open_coded(options);
    if (!opened) {
      if (!cut_) return wrong("opening: " + opened.error().message());
      say("crash in recovery");
      ++counts_.crashes_in_recovery;
      continue;
    }
    store_ = std::move(*opened);
    // A crash may come while we look: then what was read until it came must have been right, and we
    // look again.
    const auto found = find_point(*store_, timeline_, {acknowledged_, timeline_.size() - 1});
    if (!found && !cut_) return wrong("opened: " + found.error().message());
    if (!found) {
      store_.reset();
      continue;
    }
    if (!cut_ && !store_->info().read_only.empty())
      return wrong("opened, but: " + store_->info().read_only);
    say("opened as after commit " + std::to_string(timeline_[*found]->version) + ", epoch " +
        std::to_string(store_->health().epoch));
    timeline_ = {timeline_[*found]};
    acknowledged_ = 0;
    recorder_.emplace(disk(), *store_, timeline_);
    recorder_->opened();
    ++opened_;
    return cut_ ? Status() : compare_the_live();
  }
}

// Shards that do not count are those that something happened to.
Status Story::compare_the_live() const {
  const coded::Health health = store_->health();
  for (size_t shard = 0; shard < options_.shards; ++shard) {
    if (!counts(health, shard) && !troubles_.contains(shard))
      return wrong("shard " + std::to_string(shard) +
                   " does not count, although nothing happened to it");
  }
  return {};
}

Status Story::reopen() {
  if (recorder_) acknowledged_ = recorder_->acknowledged_index();
  close();
  if (!cut_ && below(3) == 0) {
    // A reader changes nothing, and sees what the next writer may find.
    auto reader = world_.open_small(true);
    if (!reader) return wrong("opening to read: " + reader.error().message());
    const auto found = find_point(**reader, timeline_, {acknowledged_, timeline_.size() - 1});
    if (!found) return wrong("opened to read: " + found.error().message());
  }
  for (size_t shard = 0; shard < options_.shards; ++shard) {
    if (!troubles_.contains(shard) && below(4) == 0) copies_[shard] = disk().image(path(shard));
  }
  // Whoever takes a copy of a disk while the store is closed finds the epoch of before: the next
  // opening has another.
  STOKER_TRY(open(false));
  acknowledged_ = recorder_->acknowledged_index();
  close();
  for (uint64_t n = below(3); n > 0; --n) lose_or_return();
  return open(true);
}

Status Story::crash() {
  say("crash");
  ++counts_.crashes;
  if (recorder_) acknowledged_ = recorder_->acknowledged_index();
  disk().cut_power(random_());
  close();
  disk().restore_power();
  for (uint64_t n = below(3); n > 0; --n) lose_or_return();
  return open(true);
}

// A shard that may get into trouble: one that is in it, or another while there are fewer than m.
std::optional<size_t> Story::victim() {
  const size_t shard = below(options_.shards);
  if (troubles_.contains(shard) || troubles_.size() < options_.m) return shard;
  return {};
}

void Story::lose_or_return() {
  const auto shard = victim();
  if (!shard) return;
  const auto at = troubles_.find(*shard);
  if (at != troubles_.end() && at->second == Trouble::away) {
    if (lost_at_[*shard] == opened_) return;
    say("shard " + std::to_string(*shard) + " returns");
    ++counts_.returned;
    disk().put(path(*shard), kept_.at(*shard));
    kept_.erase(*shard);
    at->second = Trouble::failed;  // stale: the others went on without it
  } else if (copies_.contains(*shard) && below(3) == 0) {
    say("shard " + std::to_string(*shard) + " is replaced by an old copy");
    ++counts_.old_copies;
    disk().put(path(*shard), copies_.at(*shard));
    troubles_[*shard] = Trouble::failed;
  } else {
    say("shard " + std::to_string(*shard) + " is lost");
    ++counts_.lost;
    lost_at_[*shard] = opened_;
    kept_[*shard] = disk().image(path(*shard));
    disk().remove(path(*shard));
    troubles_[*shard] = Trouble::away;
  }
}

void Story::fail_a_shard() {
  const auto shard = victim();
  if (!shard || (troubles_.contains(*shard) && troubles_[*shard] == Trouble::away)) return;
  ++counts_.failed;
  failing_ = true;
  troubles_.emplace(*shard, Trouble::failed);
  const uint64_t how = below(4);
  say("shard " + std::to_string(*shard) + " will fail in way " + std::to_string(how));
  if (how == 0) return disk().cut_power_after(below(20), random_(), path(*shard));
  constexpr Op::Kind kKinds[] = {Op::Kind::read, Op::Kind::write, Op::Kind::sync};
  disk().fail_nth(kKinds[how - 1], 1 + below(8), EIO, path(*shard));
}

void Story::flip_a_bit() {
  const auto shard = victim();
  if (!shard || (troubles_.contains(*shard) && troubles_[*shard] == Trouble::away)) return;
  const SimImage image = disk().image(path(*shard));
  Bytes block(4096);
  image.read(0, block);
  const auto super = coded::decode_superblock(block);
  const bool pages = super && *super && below(2) == 0;
  const coded::Shape shape = pages ? (*super)->shape : coded::Shape();
  for (int tries = 0; tries < 200; ++tries) {
    // Half of them in the header pages of slots, which are few: of two copies one counts.
    uint64_t at = align_down(below(image.bytes()), 4096);
    if (pages) at = shape.page_at(below(shape.slots), below(shape.pages()), below(2));
    image.read(at, block);
    const bool empty = std::all_of(block.begin(), block.end(),
                                   [](std::byte byte) { return byte == std::byte{0}; });
    if (empty) continue;
    say("a bit of shard " + std::to_string(*shard) + " flips at " + std::to_string(at));
    ++counts_.flipped;
    disk().flip(path(*shard), at + below(4096), static_cast<unsigned>(below(8)));
    troubles_[*shard] = Trouble::flipped;
    return;
  }
}

// What a commit does to so many objects: makes, replaces, updates in several places, appends, cuts,
// removes.
std::vector<Change> Story::changes(size_t objects) {
  std::vector<Change> list;
  std::set<std::string> taken;
  for (size_t i = 0; i < objects; ++i) {
    std::string key = "k" + std::to_string(below(5));
    if (!taken.insert(key).second) continue;
    const auto& now = recorder_->now().objects;
    const auto at = now.find(key);
    const size_t bytes = at == now.end() ? 0 : at->second.bytes.size();
    const uint64_t kind = below(20);
    if (bytes == 0 || kind < 2) {
      const size_t made = below(kObjectMax) + 1;
      list.push_back({key, made, 0, below(4) == 0 ? below(made) : made, ++pattern_});
    } else if (kind == 2) {
      list.push_back({key, 0});
    } else if (kind == 3) {
      list.push_back({key, below(bytes) + 1});
    } else if (kind < 6) {
      const size_t more = std::min<size_t>(kObjectMax, bytes + below(50'000) + 1);
      list.push_back({key, more, bytes, more - bytes, ++pattern_});
    } else {
      for (uint64_t ranges = below(3) == 0 ? 1 + below(4) : 1; ranges > 0; --ranges) {
        size_t offset = below(bytes);
        size_t size =
            std::min<size_t>(bytes - offset, below(3) == 0 ? below(60'000) + 1 : below(9'000) + 1);
        // few places, whole blocks: so that they are written again and again, in all chunks of a
        // row
        if (below(2) == 0) {
          offset = std::min(align_down(bytes - 1, 4096), below(5) * 65536 + below(3) * 4096);
          size = std::min<size_t>(bytes - offset, 4096 * (1 + below(2)));
        }
        list.push_back({key, bytes, offset, size, ++pattern_});
      }
    }
  }
  return list;
}

Status Story::one_commit(bool& failed) {
  const auto list = changes(below(5) == 0 ? 2 + below(2) : 1);
  say("commit" + text_of(list));
  const Status done = recorder_->commit(list, Durability::durable);
  if (done) ++counts_.commits;
  return expect(done, "commit", failed);
}

// Commits of one batch, whatever the threads do: they queue up behind a fold that cannot go on.
Status Story::some_commits(bool& failed) {
  std::vector<Recorder::Together> list;
  std::set<std::string> taken;
  for (uint64_t n = 2 + below(3); n > 0; --n) {
    Recorder::Together each{changes(1), Durability::durable};
    if (taken.insert(each.changes.at(0).key).second) list.push_back(std::move(each));
  }
  for (const auto& each : list) say("together with others: commit" + text_of(each.changes));
  Future<void> folded;
  const Status done = recorder_->commit_batch(list, [&] {
    auto held = disk().hold();
    folded = store_->fold_all();
    return held;
  });
  if (done) counts_.commits += list.size(), ++counts_.batches;
  return expect(done, "commits together", failed);
}

Status Story::read_something(bool& failed) {
  const auto& objects = recorder_->now().objects;
  if (objects.empty()) return {};
  const auto object = std::next(objects.begin(), static_cast<ptrdiff_t>(below(objects.size())));
  const Bytes& bytes = object->second.bytes;
  const size_t offset = below(bytes.size());
  Bytes into(below(bytes.size() - offset) + 1);
  const auto read = store_->read(object->first, offset, slice_of(into), {}).wait();
  if (!read) return expect(read, "read", failed);
  if (std::memcmp(into.data(), bytes.data() + offset, into.size()) != 0)
    return wrong("a read of " + object->first + " at " + std::to_string(offset) +
                 " has other bytes than were written");
  return {};
}

Status Story::fold(bool& failed) {
  ++counts_.folds;
  say("fold");
  STOKER_TRY(expect(store_->fold_all().wait(), "fold", failed));
  if (failed || cut_ || failing_ || store_->health().newer_blocks == 0) return {};
  return wrong("no more than m shards are in trouble, and yet " +
               std::to_string(store_->health().newer_blocks) + " blocks cannot be folded");
}

Status Story::repair(bool& failed) {
  const bool scrubs = ++counts_.repairs % 2 == 0;
  say(scrubs ? "scrub" : "repair");
  const auto scrubbed = std::make_shared<ScrubReport>();
  STOKER_TRY(
      expect((scrubs ? store_->scrub(scrubbed) : store_->repair()).wait(), "repair", failed));
  if (cut_ || failing_) return {};
  if (!scrubbed->lost.empty())
    return wrong("no more than m shards are in trouble, and yet: " + scrubbed->lost[0]);
  const coded::Health health = store_->health();
  for (size_t shard = 0; shard < options_.shards; ++shard) {
    const auto trouble = troubles_.find(shard);
    if (trouble == troubles_.end() || trouble->second != Trouble::failed) continue;
    if (!counts(health, shard))
      return wrong("shard " + std::to_string(shard) +
                   " is back and does not count: " + health.troubles.at(0));
    troubles_.erase(trouble);
  }
  return {};
}

Status Story::step() {
  const uint64_t kind = below(100);
  bool failed = false;
  if (kind < 45) {
    STOKER_TRY(one_commit(failed));
  } else if (kind < 52) {
    STOKER_TRY(some_commits(failed));
  } else if (kind < 60) {
    STOKER_TRY(read_something(failed));
  } else if (kind < 70) {
    STOKER_TRY(fold(failed));
  } else if (kind < 76) {
    STOKER_TRY(repair(failed));
  } else if (kind < 80) {
    fail_a_shard();
  } else if (kind < 83) {
    flip_a_bit();
  } else if (kind < 85) {
    ++counts_.slowed;
    disk().slow(path(below(options_.shards)), below(2) * 50'000);
  } else if (kind < 92) {
    cut_ = true;
    disk().cut_power_after(below(60), random_());
  } else if (kind < 95) {
    return crash();
  } else {
    return reopen();
  }
  if (store_->info().read_only.empty() && !failed) return {};
  // works on without the shard that failed
  if (store_->info().read_only.empty() && below(2) == 0) return {};
  return cut_ ? crash() : Status();
}

// At rest: all shards come back and are brought up to date, everything is folded, nothing is wrong
// in any block; then any m are lost.
Status Story::end() {
  say("the end");
  if (recorder_) acknowledged_ = recorder_->acknowledged_index();
  close();
  disk().restore_power();
  // A flipped bit that nobody has read is found by none of this: the disk is replaced by what it is
  // without it, a stale one.
  for (auto& [shard, trouble] : troubles_) {
    if (trouble != Trouble::flipped) continue;
    kept_[shard] = disk().image(path(shard));
    disk().remove(path(shard));
    trouble = Trouble::away;
  }
  STOKER_TRY(open(false));
  acknowledged_ = recorder_->acknowledged_index();
  close();
  for (auto& [shard, trouble] : troubles_) {
    if (trouble == Trouble::away) disk().put(path(shard), kept_.at(shard));
    trouble = Trouble::failed;
  }
  STOKER_TRY(open(false));
  bool failed = false;
  STOKER_TRY(repair(failed));
  STOKER_TRY(fold(failed));
  acknowledged_ = recorder_->acknowledged_index();
  close();
  CodedOptions coded;
  coded.files = false;
  STOKER_ASSIGN(const auto report, fsck_coded_store({options_.k, options_.m, world_.paths()},
                                                    world_.runtime().runtime(), {}, coded));
  for (const auto& problem : report.problems) say("fsck: " + problem);
  if (!report.problems.empty()) return wrong("at rest, fsck: " + report.problems[0]);
  if (report.records != 0)
    return wrong("at rest " + std::to_string(report.records) + " blocks are still in the logs");
  std::vector<size_t> shards;
  for (size_t i = 0; i < options_.shards; ++i) shards.push_back(i);
  Images images;
  for (const auto& each : world_.paths()) images[each] = disk().image(each);
  for (int i = 0; i < 3; ++i) {
    ++counts_.final_losses;
    std::shuffle(shards.begin(), shards.end(), random_);
    for (const auto& [each, image] : images) disk().put(each, image);
    troubles_.clear();
    for (size_t j = 0; j < options_.m; ++j) {
      disk().remove(path(shards[j]));
      troubles_[shards[j]] = Trouble::away;
    }
    STOKER_TRY(open(false));
    acknowledged_ = recorder_->acknowledged_index();
    close();
  }
  return {};
}

Status Story::run() {
  STOKER_TRY(open(true));  // or it is not made at the first try
  for (int i = 0; i < 40; ++i) {
    if (const Status done = step(); !done) return done.error().with("step " + std::to_string(i));
  }
  return end();
}

}  // namespace

SimStory simulate_coded(uint64_t seed, bool tell) {
  Story story(seed, tell);
  const Status done = story.run();
  ++cases_checked;
  return {done ? std::string() : done.error().message(), story.counts()};
}

}  // namespace stoker
