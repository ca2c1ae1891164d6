#include "stoker/store/coded/upkeep/scrubber.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <deque>
#include <utility>

#include "stoker/base/log.h"
#include "stoker/store/coded/recovery/look.h"

namespace stoker::coded {
namespace {

constexpr auto kPatrolPause = std::chrono::minutes(1);  // after a pass that could not go on
// between passes that found nothing and are kept on the disks: a small store has many
constexpr std::chrono::seconds kKeptAtMost = std::chrono::hours(1);

}  // namespace

// One pass over everything, in steps between commits; what is damaged is mended from the others.
// Where it stands is in memory only. Nothing is folded beside a step.
class Scrubbing {
 public:
  enum class Asked : uint8_t { by_somebody, by_nobody };
  // `renewed`: shards that passes have left out and brought back.
  Scrubbing(const FoldParts& parts, Folder& folder, Resync& resync, Pace& pace, ShardSet& renewed,
            std::shared_ptr<ScrubReport> report, Asked asked)
      : map_(parts.map),
        shards_(parts.shards),
        shape_(parts.shards.shape()),
        reader_(parts.reader),
        logs_(parts.logs),
        rebuilder_(parts.rebuilder),
        joining_(parts.joining),
        folder_(folder),
        resync_(resync),
        pace_(pace),
        renewed_(renewed),
        report_(std::move(report)),
        asked_(asked) {}

  // A piece of it: one chunk, or as much of a log or table at most as is read at once. False: all
  // was looked at.
  Result<bool> step() {
    if (const auto map = map_.lock(); map->refused) return *map->refused;
    if (!begun_) return begin();
    if (!areas_.empty()) return read_area();
    if (!logs_done_) return judge_logs();
    if (no_room_) return fold_one();
    if (!chunks_done_) return check_next();
    if (!unreadable_.empty()) return renew_log();
    STOKER_TRY(keep_scrubbed(*report_,
                             asked_ == Asked::by_nobody ? kKeptAtMost : std::chrono::seconds(0)));
    return false;
  }
  const ScrubReport& report() const { return *report_; }
  RepairProgress progress() const {
    return {"scrubbing", report_->chunks, std::max(report_->chunks, total_), report_->bytes};
  }

 private:
  struct Log {
    std::set<ValKey> wanted;   // when the logs were begun with
    uint32_t incarnation = 0;  // of the shard, then
    LogContent content;
  };
  struct Region {
    bool log;  // a segment of it; else an area of the table
    size_t shard, nth;
  };
  struct Unreadable {
    uint32_t incarnation = 0;  // of the shard, when it was read
    std::vector<Region> areas;
  };
  // A stripe; weak: what is removed meanwhile frees its slots.
  struct Looking {
    std::string key;  // of its object
    std::weak_ptr<Stripe> stripe;
    bool had_headers = false;         // before it was looked at
    std::unique_ptr<StripeLook> all;  // of its chunks, on their way
  };
  template <typename Each>
  void each_live(Each each) const {
    const ShardSet set = map_.live();
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((set & shard_bit(shard)) != 0) each(shard);
    }
  }
  void spend(uint64_t bytes) { pace_.spend(bytes); }

  Result<bool> begin() {
    begun_ = true;
    STOKER_TRY(superblocks());
    each_live([&](size_t shard) {
      for (size_t area = 0; area < 2; ++area) areas_.push_back({false, shard, area});
    });
    each_live([&](size_t shard) {
      for (size_t segment = 0; segment < shape_.segments; ++segment)
        areas_.push_back({true, shard, segment});
    });
    const auto map = map_.lock();
    made_since_ = make_stamp(map->epoch, map->next_id);
    // removed since
    std::erase_if(map->lost, [](const auto& each) { return each.second.stripe.expired(); });
    for (const auto& [key, object] : map->table.objects()) {
      total_ += shape_.n() * static_cast<uint64_t>(std::count_if(
                                 object->stripes.begin(), object->stripes.end(),
                                 [](const StripePtr& stripe) { return stripe != nullptr; }));
    }
    return true;
  }

  // Both copies as they were written last. The bad one is written first.
  Status superblocks() {
    ShardSet failed = 0;
    std::string why;
    each_live([&](size_t shard) {
      Member& each = shards_[shard];
      const std::string expected = encode_superblock(each.super);
      std::optional<size_t> bad;
      const auto copies = superblock_copies(shards_, shard);
      spend(2 * kBlock);
      for (const size_t copy : {0, 1}) {
        const bool right = copies[copy] && encode_superblock(*copies[copy]) == expected;
        if (!right) bad = copy;
        report_->superblocks += right ? 0 : 1;
      }
      if (!bad) return;
      if (((each.super.counter + 1) & 1) != *bad) ++each.super.counter;
      failed |= shards_.write_superblocks(shard_bit(shard), why);
    });
    return failed == 0 ? Status() : logs_.drop_shards(failed, why);
  }

  // A piece of an area; the last one of it shows what is there.
  Result<bool> read_area() {
    const Region& area = areas_.front();
    if (!reading_) {
      if (area.log && !logs_begun_) begin_logs();
      if (area.nth == 0) images_ = logs_.images();
      begin_reading(area);
    }
    spend(reading_->step(pace_.free() ? PiecewiseRead::kAtOnce : 1));
    if (!reading_->done()) return true;
    // What fails once is read again.
    if (!reading_->readable() && !std::exchange(again_, true)) {
      begin_reading(area);
      return true;
    }
    again_ = false;
    if (!reading_->readable()) {
      Unreadable& unreadable = unreadable_[area.shard];
      unreadable.incarnation = shards_[area.shard].super.incarnation;
      unreadable.areas.push_back(area);
    }
    const Status looked = area.log ? take_segment(area) : take_table(area);
    read_before_ = reading_->take_memory();
    reading_.reset();
    areas_.pop_front();
    if (areas_.empty()) read_before_ = {};
    if (!looked) return looked.error();
    return true;
  }

  void begin_reading(const Region& area) {
    const uint64_t at = area.log ? shape_.segment_at(area.nth) : shape_.area_at(area.nth);
    const size_t bytes = area.log ? shape_.segment_bytes : shape_.area_bytes;
    AlignedBytes used = reading_ ? reading_->take_memory() : std::move(read_before_);
    reading_.emplace(shards_, area.shard, at, bytes, std::move(used));
  }

  // Every shard has the newest image whole; and can be read, or the next opening would leave it
  // out.
  Status take_table(const Region& area) {
    if (area.nth == 0) newest_image_ = 0;
    const auto image = read_table_image(shards_.store(), reading_->bytes());
    if (image) newest_image_ = std::max(newest_image_, image->stamp);
    // One that was written on all shards meanwhile is whole.
    if (area.nth == 0 || (map_.live() & shard_bit(area.shard)) == 0 || images_ != logs_.images() ||
        newest_image_ == logs_.image_stamp())
      return {};
    ++report_->tables;
    return joining_.checkpoint();
  }

  // What is needed of the logs from here on, or not any more when they are judged: what was durable
  // by now does not change while it is needed.
  void begin_logs() {
    logs_begun_ = true;
    each_live([&](size_t shard) {
      Log& log = found_[shard];
      log.incarnation = shards_[shard].super.incarnation;
      for (const auto& [stripe, val] : map_.vals_of(shard)) log.wanted.insert(key_of(*val));
    });
    const auto map = map_.lock();
    begun_at_ = make_stamp(map->epoch, map->version);
  }

  Status take_segment(const Region& area) {
    if (!reading_->readable()) return {};
    LogContent& content = found_[area.shard].content;
    read_segment(shape_, shards_.store(), area.shard, area.nth, shards_[area.shard].super.log_floor,
                 reading_->bytes(), [&](uint64_t at, const FrameContent& frame) {
                   content.take(frame, reading_->bytes().subspan(at));
                 });
    return {};
  }

  // What is needed of the logs and was needed when they were begun with; the segments that hold it
  // were not begun anew since.
  Result<bool> judge_logs() {
    logs_done_ = true;
    // A shard that was left out and came back meanwhile has a log of its own, which was just
    // written.
    std::erase_if(found_, [&](const auto& each) {
      return each.second.incarnation != shards_[each.first].super.incarnation;
    });
    std::set<Stamp> commits;
    for (const auto& [shard, log] : found_) {
      for (const Stamp stamp : log.content.commits) {
        if (stamp > logs_.image_stamp() && stamp <= begun_at_) commits.insert(stamp);
      }
    }
    uint64_t commits_lost = 0;
    ShardSet touched = 0;
    Status status;
    each_live([&](size_t shard) {
      const auto at = found_.find(shard);
      if (at == found_.end() || unreadable_.contains(shard) || !status) return;
      const Log& log = at->second;
      for (const Stamp stamp : commits) commits_lost += log.content.commits.contains(stamp) ? 0 : 1;
      auto lacking = map_.vals_of(shard);
      std::erase_if(lacking, [&](const auto& each) {
        return log.content.holds(*each.second) || !log.wanted.contains(key_of(*each.second));
      });
      std::erase_if(lacking,
                    [&](const auto& each) { return !can_be_read(each.first, each.second); });
      if (lacking.empty()) return;
      report_->records += lacking.size();
      touched |= shard_bit(shard);
      status = logs_.append_settled(shard, lacking);
      // It cannot be written: the others go on without it.
      if (!status && status.error().code != Code::out_of_space)
        status = logs_.drop_shards(shard_bit(shard), status.error().what);
    });
    report_->records += commits_lost;
    found_.clear();
    if (!status && status.error().code != Code::out_of_space) return status.error();
    STOKER_TRY(logs_.flush(touched));
    if (!status) {
      // The log has no room for a second copy: what is newer there now goes into the bases of all.
      no_room_ = status.error().what;
      const auto map = map_.lock();
      to_fold_ = map->dirty.size();
      return true;
    }
    if (commits_lost > 0) STOKER_TRY(joining_.checkpoint());
    return true;
  }

  // A stripe a step, the oldest first; what came meanwhile is not waited for.
  Result<bool> fold_one() {
    size_t folded = 0;
    if (to_fold_ > 0) {
      --to_fold_;
      const uint64_t before = logs_.moved();
      STOKER_ASSIGN(folded, folder_.step({1}));
      spend(logs_.moved() - before);
      folded_ += folded;
    }
    if (folded > 0) return true;
    if (folded_ == 0) report_->lose(*no_room_);
    no_room_.reset();
    STOKER_TRY(joining_.checkpoint());
    return true;
  }

  // From any shard; what cannot be is lost, and no reason to end the pass.
  bool can_be_read(const StripePtr& stripe, const ValRef& val) {
    const auto read = reader_.read_val(stripe, val, 0, val->crcs.size(), Priority::scrub);
    if (!read) report_->lose("an update in the logs cannot be read: " + read.error().what);
    return read.has_value();
  }

  // A shard whose log or table cannot be read is left out and brought back, which makes them
  // readable; after all chunks were looked at, and one after the other, so that nothing is left to
  // fewer shards than it must be. What was seen a while ago is looked at again before.
  Result<bool> renew_log() {
    STOKER_ASSIGN(const bool more, resync_.step());
    if (more) return true;
    const size_t shard = unreadable_.begin()->first;
    Unreadable& unreadable = unreadable_.begin()->second;
    const ShardSet rest = map_.live() & ~shard_bit(shard);
    // It failed meanwhile, or has a log of its own by now.
    const bool other =
        rest == map_.live() || unreadable.incarnation != shards_[shard].super.incarnation;
    if (other || unreadable.areas.empty()) {
      unreadable_.erase(shard);
      reading_.reset();
      return true;
    }
    if (!reading_) begin_reading(unreadable.areas.back());
    spend(reading_->step(pace_.free() ? PiecewiseRead::kAtOnce : 1));
    if (!reading_->done()) return true;
    const bool readable = reading_->readable();
    reading_.reset();
    if (readable) {
      unreadable.areas.pop_back();
      return true;
    }
    unreadable_.erase(shard);
    if ((renewed_ & shard_bit(shard)) != 0) {
      report_->lose(
          "the log or table of '" + shards_[shard].path +
          "' has sectors that cannot be read, although it was written again: replace that disk");
      return true;
    }
    if (!shape_.writable(rest) || !report_->lost.empty() || (renewed_ & ~rest) != 0) {
      report_->lose("the log or table of '" + shards_[shard].path +
                    "' has sectors that cannot be read, and too little is left without it to leave "
                    "it out: bring missing disks back first");
      return true;
    }
    // Nobody asked for it: not the last spare, then.
    if (asked_ == Asked::by_nobody &&
        static_cast<size_t>(std::popcount(rest)) + shape_.m <= shape_.shards) {
      report_->lose(
          "the log or table of '" + shards_[shard].path +
          "' has sectors that cannot be read; to make it readable the disk has to be left out for "
          "a while, and without it another one could not be lost: `stoker scrub` does it");
      return true;
    }
    ++report_->records;
    renewed_ |= shard_bit(shard);
    STOKER_TRY(
        logs_.drop_shards(shard_bit(shard), "its log or table has sectors that cannot be read"));
    return true;
  }

  // By the names of objects: those that come, go and change meanwhile do not matter.
  StripePtr next_stripe() {
    const auto map = map_.lock();
    const Table::Objects& objects = map->table.objects();
    for (auto at = objects.lower_bound(key_); at != objects.end(); ++at) {
      if (at->first != key_) index_ = 0;
      key_ = at->first;
      while (index_ < at->second->stripes.size()) {
        // What was made since is right, or the next pass's; names may rise for ever.
        if (const StripePtr& stripe = at->second->stripes[index_++];
            stripe && stripe->id < made_since_)
          return stripe;
      }
    }
    return nullptr;
  }

  // The next stripe, with what it was like before anything of it was loaded.
  std::optional<Looking> next_look() {
    const StripePtr stripe = next_stripe();
    if (!stripe) return {};
    const auto map = map_.lock();
    return Looking{key_, stripe, stripe->headers != nullptr, nullptr};
  }

  // Whoever asked waits for it: all chunks of a stripe at once, as each is on its own disk; and
  // those of the next one are on their way meanwhile, where no rate holds that back.
  void look_at_all(const StripePtr& stripe) {
    right_ = 0;
    if (asked_ != Asked::by_somebody) return;
    if (!looking_->all) looking_->all = rebuilder_.begin_look(stripe);
    if (pace_.free()) {
      ahead_ = next_look();
      const StripePtr next = ahead_ ? ahead_->stripe.lock() : nullptr;
      if (next) ahead_->all = rebuilder_.begin_look(next);
    }
    const auto all = std::move(looking_->all);
    if (all) right_ = rebuilder_.right_chunks(*stripe, *all);
  }

  Result<bool> check_next() {
    if (chunk_) return check_piece();
    if (position_ == 0) {
      looking_ = ahead_ ? std::exchange(ahead_, std::nullopt) : next_look();
      chunks_done_ = !looking_;
    }
    const StripePtr stripe = looking_ ? looking_->stripe.lock() : nullptr;
    const size_t position = position_;
    position_ = stripe ? (position_ + 1) % shape_.n() : 0;
    if (!stripe) return true;
    if (position == 0) right_ = 0;
    if (!is_set(map_.live_positions(*stripe), position)) {
      if (position_ == 0) forget_headers(*stripe);
      return true;
    }
    if (const Status loaded = rebuilder_.load_headers_paced(stripe); !loaded) {
      report_->lose("'" + looking_->key + "': " + loaded.error().what);
      tell_chunk();
      return true;
    }
    if (position == 0) look_at_all(stripe);
    if (is_set(right_, position)) {
      if (position_ == 0) forget_headers(*stripe);
      tell_chunk();
      return true;
    }
    if (ahead_) ahead_->all.reset();  // this one may need its memory
    chunk_ = Rebuilding{stripe, position};
    return check_piece();
  }

  // A scrub reads the headers of all stripes; those of others do not go for that.
  void forget_headers(Stripe& stripe) {
    if (looking_->had_headers) return;
    const auto map = map_.lock();
    map->headers.forget(stripe);
  }

  // Of the chunk that is looked at: some of its rows, as commits wait meanwhile.
  Result<bool> check_piece() {
    const StripePtr stripe = chunk_->stripe.lock();
    const bool live = stripe && is_set(map_.live_positions(*stripe), chunk_->position);
    const auto more = live ? rebuilder_.rebuild_step(*chunk_) : Result<bool>(false);
    if (!more && more.error().code == Code::over_budget) return more.error();
    if (more && *more) return true;
    const Rebuilding chunk = std::move(*chunk_);
    chunk_.reset();
    if (stripe && position_ == 0) forget_headers(*stripe);
    if (!live) return true;
    const size_t shard = stripe->shards[chunk.position];
    // it cannot be written
    if (!more) STOKER_TRY(logs_.drop_shards(shard_bit(shard), more.error().what));
    report_->blocks += chunk.done.blocks;
    report_->pages += chunk.done.pages;
    if (more && chunk.done.lost > 0)
      report_->lose(std::to_string(chunk.done.lost) + " blocks of '" + looking_->key + "' on '" +
                    shards_[shard].path + "' cannot be decoded: " + chunk.done.why);
    tell_chunk();
    return true;
  }

  void tell_chunk() {
    ++report_->chunks;
    report_->bytes += shape_.chunk_bytes;
  }

  Status keep_scrubbed(const ScrubReport& report, std::chrono::seconds pause);

  CommittedMap& map_;
  Shards& shards_;
  const Shape& shape_;
  Reader& reader_;
  LogSet& logs_;
  Rebuilder& rebuilder_;
  Joining& joining_;
  Folder& folder_;
  Resync& resync_;
  Pace& pace_;
  ShardSet& renewed_;
  const std::shared_ptr<ScrubReport> report_;
  const Asked asked_;
  bool begun_ = false, logs_begun_ = false, logs_done_ = false, chunks_done_ = false;
  std::deque<Region> areas_;                 // read next
  std::optional<PiecewiseRead> reading_;     // of the first of them
  AlignedBytes read_before_;                 // what the one before it was read into
  uint64_t images_ = 0;                      // written, when the shard's first area was begun with
  Stamp newest_image_ = 0;                   // of the areas of this shard
  Stamp begun_at_ = 0;                       // when the logs were
  std::map<size_t, Log> found_;              // by shard
  std::map<size_t, Unreadable> unreadable_;  // log or table, in part; by shard
  bool again_ = false;                       // the first area is read a second time
  std::optional<std::string> no_room_;       // for a second copy of what is damaged in a log
  size_t to_fold_ = 0, folded_ = 0;          // stripes, for that
  // stripes that this pass does not look at, from this one on
  Stamp made_since_ = 0;
  std::string key_;   // of the object whose stripe was begun last
  size_t index_ = 0;  // of its stripe that comes next
  std::optional<Looking> looking_, ahead_;
  size_t position_ = 0;              // of its chunk that is next
  uint32_t right_ = 0;               // its chunks of which all was seen to be right
  std::optional<Rebuilding> chunk_;  // of it, that is looked at
  uint64_t total_ = 0;               // chunks, when it began
};

// On the disks, for whoever opens the store next. One that found nothing not so soon after another.
Status Scrubbing::keep_scrubbed(const ScrubReport& report, std::chrono::seconds pause) {
  constexpr uint64_t kMost = UINT32_MAX;
  const uint64_t lost = report.lost.size() + report.unlisted;
  LastScrub last;
  last.ended_at = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(
                                            std::chrono::system_clock::now().time_since_epoch())
                                            .count());
  last.found = static_cast<uint32_t>(std::min(kMost, report.found() + lost));
  last.lost = static_cast<uint32_t>(std::min(kMost, lost));
  ShardSet set = 0;
  {
    const auto map = map_.lock();
    const uint64_t before = map->counts.scrubbed.ended_at;
    if (last.found == 0 && before <= last.ended_at &&
        last.ended_at - before < static_cast<uint64_t>(pause.count()))
      return {};
    map->counts.scrubbed = last;
    set = map->live;
  }
  for (size_t shard = 0; shard < shape_.shards; ++shard) {
    if ((set & shard_bit(shard)) != 0) shards_[shard].super.scrubbed = last;
  }
  std::string why;
  const ShardSet failed = shards_.write_superblocks(set, why);
  return failed == 0 ? Status() : logs_.drop_shards(failed, why);
}

std::shared_ptr<Scrubbing> Scrubber::begin(std::shared_ptr<ScrubReport> report) {
  return std::make_shared<Scrubbing>(parts_, folder_, resync_, pace_, renewed_, std::move(report),
                                     Scrubbing::Asked::by_somebody);
}

Result<bool> Scrubber::step(Scrubbing& pass) {
  STOKER_ASSIGN(const bool more, pass.step());
  const bool joins = parts_.joining.shard().has_value();
  if (!more || !joins) parts_.map.lock()->counts.doing = more ? pass.progress() : RepairProgress();
  return more;
}

// The same look at everything, without being asked and one after the other: a step whenever the
// rate allows it.
bool Scrubber::patrol_step() {
  const auto allowed = [&] {
    const auto map = parts_.map.lock();
    return patrols_ && !map->refused && std::chrono::steady_clock::now() >= patrol_after_;
  };
  if (!allowed() || patrol_pace_.wait_ns() > 0 || pace_.wait_ns() > 0) return false;
  if (!patrol_)
    patrol_ =
        std::make_shared<Scrubbing>(parts_, folder_, resync_, pace_, renewed_,
                                    std::make_shared<ScrubReport>(), Scrubbing::Asked::by_nobody);
  const uint64_t before = pace_.spent();
  const auto more = patrol_->step();
  patrol_pace_.spend(pace_.spent() - before);
  const ScrubReport& report = patrol_->report();
  bool news = false;
  {
    const auto map = parts_.map.lock();
    Patrol& told = map->counts.patrol;
    told.doing = more && *more ? patrol_->progress() : RepairProgress();
    if (more && *more) return true;
    if (more) {
      ++told.passes;
      told.found += report.found();
      news = report.lost != told.last.lost;
      told.last = report;
      told.stopped.clear();
    } else {
      news = std::exchange(told.stopped, more.error().what) != more.error().what;
      patrol_after_ = std::chrono::steady_clock::now() + kPatrolPause;
    }
  }
  if (!more && news)
    log().warn(
        "a pass of the background scrub of a coded store ended early, and another begins in a "
        "minute: {}",
        more.error().message());
  if (report.found() > 0)
    log().warn(
        "the background scrub of a coded store found and mended {} blocks, {} header pages, {} log "
        "records, {} tables, {} superblocks",
        report.blocks, report.pages, report.records, report.tables, report.superblocks);
  for (size_t i = 0; news && i < report.lost.size(); ++i)
    log().warn("the background scrub of a coded store: {}", report.lost[i]);
  if (news && report.unlisted > 0)
    log().warn("the background scrub of a coded store found {} more problems like these",
               report.unlisted);
  patrol_.reset();
  return more.has_value();
}

}  // namespace stoker::coded
