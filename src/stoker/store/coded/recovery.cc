#include "stoker/store/coded/recovery.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "stoker/base/crc32c.h"
#include "stoker/base/log.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {
namespace {

constexpr const char* kWhere = "store/coded/recovery";
constexpr size_t kFoldAtOnce = 16;  // stripes

}  // namespace

Status Recovery::run(bool read_only) {
  if (const auto there = static_cast<size_t>(std::popcount(shards_.knowing()));
      there < shape_.present_min()) {
    return make_error(
        Code::not_found,
        "only " + std::to_string(there) + " of the " + std::to_string(shape_.shards) +
            " shards are there: with fewer than " + std::to_string(shape_.present_min()) +
            " it cannot be told what was written last; bring more disks back" + shards_.missing(),
        kWhere);
  }
  ShardSet current = shards_.current();
  current &= ~read_all(current);
  ShardSet whole = current;  // without those of which something cannot be read
  for (const auto& [shard, blocks] : unreadable_) {
    whole &= ~shard_bit(shard);
    log().warn("{} blocks of the log or table of a shard cannot be read, and count as damaged: {}",
               blocks.size(), std::exchange(shards_[shard].trouble, {}));
  }
  bool writable = !read_only && shape_.writable(whole);
  if (shards_.fresh() && !writable)
    return make_error(Code::io,
                      "the shards that were just made cannot be read: make the store once more, on "
                      "disks that work",
                      kWhere);
  if (current == 0)
    return make_error(
        Code::not_found,
        "none of the shards that are there holds what was written last: bring more disks back",
        kWhere);
  if (!image_found_)
    return make_error(Code::corruption,
                      "no shard has an intact object table: bring missing disks back, or restore "
                      "the store from a copy",
                      kWhere);
  {
    const auto map = map_.lock();
    map->live = current;
    for (size_t shard = 0; shard < shape_.shards; ++shard)
      map->epoch =
          std::max(map->epoch,
                   (current & shard_bit(shard)) != 0 ? shards_[shard].super.confirmed.number : 0);
  }
  logs_.found_image(image_stamp_);
  STOKER_TRY(load_table());
  STOKER_TRY(load_raw());
  choose_folds();
  choose_vals();
  find_gone();
  let_go();
  const auto refuse = [this](Error why) { map_.lock()->refused = std::move(why); };
  if (read_only) {
    refuse(make_error(Code::read_only, "it was opened to read only", kWhere));
  } else if (!hidden_.empty()) {
    writable = false;
    refuse(make_error(Code::read_only,
                      hidden_ + "; what can be read is served: bring missing disks back, or "
                                "copy what is right into a new store",
                      kWhere));
  } else if (!writable && shape_.writable(current)) {
    refuse(
        make_error(Code::read_only,
                   "sectors of the log or table of '" + shards_[unreadable_.begin()->first].path +
                       "' cannot be read, and with " + std::to_string(unreadable_.size() - 1) +
                       " more such shards and those that are missing they may be the last copy of "
                       "something; what can be read is served: bring missing disks back",
                   kWhere));
  } else if (!writable) {
    const auto missing =
        static_cast<size_t>(shape_.shards) - static_cast<size_t>(std::popcount(current));
    refuse(
        make_error(Code::read_only,
                   std::to_string(missing) + " of the " + std::to_string(shape_.shards) +
                       " shards are missing or not up to date, too many to write to it; what can "
                       "be read is served: bring disks back",
                   kWhere));
  }
  return writable ? settle() : Status();
}

ShardSet Recovery::read_all(ShardSet current) {
  for (size_t shard = 0; shard < shape_.shards; ++shard) {
    if ((current & shard_bit(shard)) == 0) continue;
    read_images(shard);
    read_log(shard);
  }
  for (size_t shard = 0; shard < shape_.shards; ++shard) {
    if ((current & ~readable_ & shard_bit(shard)) != 0) unreadable_.erase(shard);
  }
  return current & ~readable_;
}

AlignedBytes Recovery::read_area(size_t shard, uint64_t offset, size_t bytes) {
  for (;;) {
    AlignedBytes memory(bytes);
    Area area{shard, offset, memory.slice()};
    const std::string why = read_areas(shards_, Priority::demand, {&area, 1});
    if (memory.lost()) continue;  // the disk was given up, and refuses from then on
    if (!why.empty()) shards_[shard].trouble = why;
    if (area.any()) readable_ |= shard_bit(shard);
    for (size_t block = 0; block < area.readable.size(); ++block) {
      if (!area.readable[block]) unreadable_[shard].push_back(offset + block * kBlock);
    }
    return memory;
  }
}

void Recovery::read_images(size_t shard) {
  std::optional<TableImage> newest;
  for (size_t area = 0; area < 2; ++area) {
    const AlignedBytes bytes = read_area(shard, shape_.area_at(area), shape_.area_bytes);
    auto image = read_table_image(shards_.store(), bytes.span());
    if (!image || (newest && image->stamp < newest->stamp)) continue;
    newest = std::move(image);
    shards_[shard].image_area = area;
  }
  if (!newest || (image_found_ && newest->stamp <= image_stamp_)) return;
  image_found_ = true;
  image_stamp_ = newest->stamp;
  image_ = std::move(newest->pieces);
}

void Recovery::read_log(size_t shard) {
  Shard& each = shards_[shard];
  SegmentEnd newest;
  size_t newest_at = 0;
  for (size_t segment = 0; segment < shape_.segments; ++segment) {
    const AlignedBytes bytes = read_area(shard, shape_.segment_at(segment), shape_.segment_bytes);
    SegmentRef ref;
    std::vector<FoundRounds::Frame> frames;
    const SegmentEnd end =
        read_segment(shape_, shards_.store(), shard, segment, each.super.log_floor, bytes.span(),
                     [&](uint64_t at, FrameContent content) {
                       if (!ref) ref = each.log->hold(segment);
                       frames.push_back({at, content.end, content.sequence, 0});
                       for (const Item& item : content.items) {
                         if (const auto* round = std::get_if<RoundItem>(&item))
                           frames.back().round = round->round;
                       }
                       take(shard, ref, shape_.segment_at(segment) + at, std::move(content));
                     });
    rounds_.take(shard, frames);
    each.log->seen(std::max(end.count(), each.super.log_floor));
    if (end.generation <= newest.generation) continue;
    newest = end;
    newest_at = segment;
  }
  if (newest.generation != 0) each.log->resume(newest_at, newest);
}

Recovery::FoundVal& Recovery::found_val(const ValItem& item) {
  FoundVal& found = vals_[{item.stamp, item.stripe, item.chunk, item.first}];
  if (!found.val) {
    found.item = item;
    found.val = std::make_shared<Val>(
        Val{item.stamp, item.stripe, item.chunk, item.first, item.crcs, {}, {}, nullptr});
  }
  // settled once, and appended again since
  if (!item.needs_commit) found.item.needs_commit = false;
  return found;
}

// What was durable on all shards concerned: where no log has it intact it is known all the same.
void Recovery::take_round(const SegmentRef& segment, const RoundItem& round) {
  if (mutated(Mutation::ignore_told)) return;
  rounds_.tell(round);
  image_told_ = std::max(image_told_, round.image);
  commits_told_.insert(round.commits.begin(), round.commits.end());
  for (const ValItem& item : round.vals) {
    FoundVal& found = found_val(item);
    if (!found.told) found.val->told = found.told = std::make_shared<Told>();
    found.told->held.push_back(segment);
  }
}

void Recovery::take(size_t shard, const SegmentRef& segment, uint64_t frame_at,
                    FrameContent content) {
  const auto place = [&](size_t block) {
    return Place{shard, frame_at + content.blocks_at + block * kBlock};
  };
  for (Item& item : content.items) {
    if (auto* val = std::get_if<ValItem>(&item)) {
      FoundVal& found = found_val(*val);
      if ((found.seen & shard_bit(shard)) != 0 || found.val->crcs != val->crcs) continue;
      found.seen |= shard_bit(shard);
      found.val->places.push_back(place(val->at));
      found.val->held.push_back(segment);
    } else if (auto* commit = std::get_if<CommitItem>(&item)) {
      FoundCommit& found = commits_[commit->stamp];
      if (!found.record)
        found.record = std::make_shared<CommitRecord>(CommitRecord{commit->stamp, {}});
      found.items = std::move(commit->items);
      found.seen |= shard_bit(shard);
      found.record->held.push_back(segment);
    } else if (auto* stage = std::get_if<StageItem>(&item)) {
      for (size_t i = 0; i < stage->rows.size(); ++i)
        stages_[{stage->fold, stage->stripe, stage->chunk, stage->rows[i].row}] = {
            std::move(stage->rows[i].entry), place(stage->at + i), segment};
    } else if (auto* fold = std::get_if<FoldItem>(&item)) {
      FoundFold& found = folds_[{fold->fold, fold->stripe}];
      found.item = std::move(*fold);
      found.seen |= shard_bit(shard);
      found.held.push_back(segment);
    } else if (const auto* round = std::get_if<RoundItem>(&item)) {
      take_round(segment, *round);
    }
  }
}

// The image, then the COMMITs above it.
Status Recovery::load_table() {
  const auto resolve = [this](uint64_t id, std::vector<uint32_t> slots) -> StripePtr {
    std::vector<size_t> shards = placement(shape_, id);
    if (find_stripe(id) || !map_.slots().take(shards, slots)) return nullptr;
    auto stripe = std::make_shared<Stripe>(id, std::move(shards), std::move(slots), map_.slots());
    stripes_[id] = stripe;
    return stripe;
  };
  const auto map = map_.lock();
  for (const std::string& piece : image_) STOKER_TRY(map->table.apply(shape_, piece, resolve));
  Version version = number_of(image_stamp_);
  for (const auto& [stamp, found] : commits_) {
    if (stamp <= image_stamp_) continue;
    STOKER_TRY(map->table.apply(shape_, found.items, resolve));
    version = std::max(version, number_of(stamp));
  }
  for (const Stamp stamp : commits_told_) version = std::max(version, number_of(stamp));
  for (const auto& [key, object] : map->table.objects()) {
    if (object->known) map->classes.set(class_id(key), class_volume(key), *object->known);
    for (const StripePtr& stripe : object->stripes) {
      if (stripe) object_of_[stripe->id] = key;
    }
  }
  for (const auto& [key, found] : vals_) {
    const Stamp stamp = found.item.stamp;
    if (stamp <= image_stamp_ || found.item.needs_commit) continue;
    version = std::max(version, number_of(stamp));
    if (const auto object = object_of_.find(found.item.stripe); object != object_of_.end()) {
      Version& number = map->table.find(object->second)->number;
      number = std::max(number, number_of(stamp));
    }
  }
  map->version = version;
  return {};
}

StripePtr Recovery::find_stripe(uint64_t id) const {
  const auto at = stripes_.find(id);
  return at == stripes_.end() ? nullptr : at->second.lock();
}

// The headers of all stripes that the logs speak of, source by source.
Status Recovery::load_raw() {
  std::set<uint64_t> wanted;
  for (const auto& [key, found] : vals_) wanted.insert(found.item.stripe);
  for (const auto& [key, found] : folds_) wanted.insert(found.item.stripe);
  for (const uint64_t id : wanted) {
    const StripePtr stripe = find_stripe(id);
    if (!stripe) continue;
    HeaderRead read{stripe.get(), RawHeaders(shape_)};
    reader_.read_headers({&read, 1}, Priority::demand);
    if (!read.any) log().warn("none of the headers of stripe {} can be read: {}", id, read.why);
    raw_.emplace(id, std::move(read.raw));
  }
  return {};
}

// Folds that were decided and are not done everywhere: their blocks lie in the log, and stand for
// the base until they are written there.
void Recovery::choose_folds() {
  for (auto& [key, found] : folds_) {
    const StripePtr stripe = find_stripe(found.item.stripe);
    if (!stripe) continue;
    RawHeaders& raw = raw_.at(stripe->id);
    const Headers newest = raw.merge(shape_);
    const uint32_t live = map_.live_positions(*stripe);
    bool undone = false;
    std::set<size_t> rows;
    // rows of which a later fold is in the base: that shard or page has lost them, and gets them
    // from the others
    std::set<size_t> outdone;
    const auto above = [&](size_t row, size_t chunk, Stamp version) {
      const Stamp now = newest.versions[row * shape_.k + chunk];
      return now != kUnknown && now > version;
    };
    for (const FoldRow& row : found.item.rows) {
      rows.insert(row.row);
      if (above(row.row, row.chunk, row.version)) outdone.insert(row.row);
    }
    for (const auto& [stage_key, stage] : stages_) {
      if (std::get<0>(stage_key) != found.item.fold || std::get<1>(stage_key) != stripe->id)
        continue;
      for (size_t c = 0; c < shape_.k; ++c) {
        if (above(std::get<3>(stage_key), c, stage.entry.versions[c]))
          outdone.insert(std::get<3>(stage_key));
      }
    }
    for (const FoldRow& row : found.item.rows) {
      auto& entry = raw.data[row.chunk][row.row];
      if (outdone.contains(row.row) || (live >> row.chunk & 1) == 0 ||
          (entry && entry->version >= row.version))
        continue;
      for (auto val = vals_.lower_bound({row.version, stripe->id, row.chunk, 0});
           val != vals_.end(); ++val) {
        const ValItem& item = val->second.item;
        if (item.stamp != row.version || item.stripe != stripe->id || item.chunk != row.chunk)
          break;
        if (row.row < item.first || row.row >= item.first + item.crcs.size() ||
            val->second.seen == 0)
          continue;
        const size_t index = row.row - item.first;
        entry = DataEntry{row.version, item.crcs[index]};
        Place place = val->second.val->places.front();
        place.offset += index * kBlock;
        stripe->overrides[row.row * shape_.n() + row.chunk] = {place, val->second.val, index};
        undone = true;
      }
    }
    for (size_t j = 0; j < shape_.m; ++j) {
      if ((live >> (shape_.k + j) & 1) == 0) continue;
      for (const size_t row : rows) {
        const auto stage = stages_.find({found.item.fold, stripe->id, shape_.k + j, row});
        if (stage == stages_.end() || outdone.contains(row)) continue;
        auto& entry = raw.parity[j][row];
        bool done = entry.has_value();
        for (size_t c = 0; done && c < shape_.k; ++c)
          done = entry->versions[c] >= stage->second.entry.versions[c];
        if (done) continue;
        entry = stage->second.entry;
        stripe->overrides[row * shape_.n() + shape_.k + j] = {stage->second.place, nullptr, 0};
        undone = true;
      }
    }
    found.undone = undone;
  }
}

// Of each block the newest VAL that counts and that the base has not got.
void Recovery::choose_vals() {
  const auto map = map_.lock();
  for (const auto& [id, raw] : raw_) {
    if (const StripePtr stripe = find_stripe(id)) stripe->headers = raw.merge(shape_);
  }
  for (auto& [key, found] : vals_) {
    const StripePtr stripe = find_stripe(found.item.stripe);
    if (!stripe || !counts(found)) continue;
    if (found.item.needs_commit && commits_.contains(found.item.stamp))
      found.val->commit = commits_.at(found.item.stamp).record;
    std::vector<Place>& places = found.val->places;
    const size_t home = stripe->shards[found.item.chunk];
    std::stable_partition(places.begin(), places.end(),
                          [home](const Place& place) { return place.shard == home; });
    for (size_t i = 0; i < found.item.crcs.size(); ++i) {
      const size_t block = (found.item.first + i) * shape_.k + found.item.chunk;
      // of an unknown block no VAL is believed either: it may be an old one
      if (found.item.stamp <= stripe->headers->versions[block] &&
          !mutated(Mutation::believe_old_vals))
        continue;
      const auto at = stripe->overlay.find(block);
      if (at != stripe->overlay.end() && at->second.val->stamp > found.item.stamp) continue;
      stripe->overlay[block] = {found.val, i};
      map->dirty[stripe->id] = stripe;
    }
  }
}

// More was damaged than may be. A record that is told of and in no log is an error when it is read,
// until it is written again; where nobody knows what a lost one changed, nothing is written any
// more.
void Recovery::find_gone() {
  std::map<std::string, size_t> blocks;
  const auto map = map_.lock();
  std::vector<std::string>& gone = map->counts.gone;
  std::set<const Val*> untold;
  for (const auto& [id, weak] : map->dirty) {
    const StripePtr stripe = weak.lock();
    for (const auto& [block, newer] : stripe->overlay) {
      if (newer.val->places.empty()) ++blocks[object_of_.at(id)];
      if (!newer.val->told && untold.insert(newer.val.get()).second) logs_.rounds().add(newer.val);
    }
  }
  logs_.rounds().resume(rounds_.last(), rounds_.shards_of_last());
  for (const auto& [key, count] : blocks) {
    gone.push_back("an update of '" + key +
                   "' that was acknowledged is damaged in all logs: " + std::to_string(count) +
                   " of its blocks are lost, and an error until they are written again");
  }
  for (const Stamp stamp : commits_told_) {
    if (stamp > image_stamp_ && !commits_.contains(stamp))
      hidden_ = "commit " + std::to_string(number_of(stamp)) +
                " is damaged in all logs, and what it changed is not known";
  }
  if (image_told_ > image_stamp_)
    hidden_ = "the object table as of commit " + std::to_string(number_of(image_told_)) +
              " is damaged on all shards, and an older one is in its place";
  if (!gone.empty() && hidden_.empty()) {
    std::vector<uint64_t> from;
    for (size_t shard = 0; shard < shape_.shards; ++shard)
      from.push_back(shards_[shard].super.first_round);
    const ShardSet hiding = rounds_.hiding(shape_, map->live, from);
    std::string names;
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((hiding & shard_bit(shard)) != 0)
        names += (names.empty() ? "'" : ", '") + shards_[shard].path + "'";
    }
    if (hiding != 0)
      hidden_ = "records in the logs of " + names +
                " are damaged, or these are older copies, and nothing tells what they changed";
  }
  if (!hidden_.empty()) gone.push_back(hidden_);
  for (const std::string& each : gone)
    log().warn("a coded store has lost more than it can bear: {}", each);
}

// Segments with nothing in them that is needed are free from here on: what is appended next must go
// somewhere.
void Recovery::let_go() {
  std::erase_if(vals_, [&](const auto& each) {
    return each.second.val.use_count() == 1 && each.second.item.stamp <= image_stamp_;
  });
  std::erase_if(commits_, [&](const auto& each) {
    return each.second.record.use_count() == 1 && each.first <= image_stamp_;
  });
  std::erase_if(folds_, [](const auto& each) { return !each.second.undone; });
  std::erase_if(stages_, [&](const auto& each) {
    return !folds_.contains({std::get<0>(each.first), std::get<1>(each.first)});
  });
}

// What could not be read was not seen, so it must not be seen later either: it becomes zeros. At
// least one copy of all that stood there is elsewhere.
Status Recovery::make_readable() {
  AlignedBytes zeros(kBlock);
  std::memset(zeros.data(), 0, zeros.size());
  ShardBatch batch(shards_, Priority::demand);
  ShardSet touched = 0;
  for (const auto& [shard, blocks] : unreadable_) {
    if ((map_.live() & shard_bit(shard)) == 0) continue;
    for (const uint64_t at : blocks) batch.write(shard, at, zeros.slice());
    touched |= shard_bit(shard);
  }
  if (const ShardSet failed = batch.run(); failed != 0)
    STOKER_TRY(logs_.drop_shards(failed, batch.why()));
  return logs_.flush(touched);
}

Status Recovery::settle() {
  STOKER_TRY(logs_.change_epoch(map_.live()));
  STOKER_TRY(make_readable());
  if (!mutated(Mutation::settle_nothing)) {
    STOKER_TRY(append_commits());
    STOKER_TRY(append_vals());
  }
  STOKER_TRY(append_folds());
  STOKER_TRY(logs_.flush(map_.live()));
  STOKER_TRY(roll_forward());
  if (full_ != 0)
    STOKER_TRY(logs_.drop_shards(full_, "its log has lost more than it has room for"));
  STOKER_TRY(catch_up());
  STOKER_TRY(joining_.checkpoint());  // above all old COMMITs: none of them is ever chosen late
  return restore_reserve();           // also for the next opening
}

// A log that lacks more than it has room for gets nothing: its shard is left out and gets a new
// one, or a single disk would keep the store closed. Not before the others have what was seen on
// it, and what a decided fold needs of it is in the bases.
Status Recovery::append(std::map<size_t, FrameBuilder>& frames,
                        std::map<size_t, LogFrame>& written) {
  if (const ShardSet full = full_ | logs_.without_room(frames);
      shape_.writable(map_.live() & ~full))
    full_ = full;
  std::erase_if(frames, [this](const auto& each) { return (full_ & shard_bit(each.first)) != 0; });
  return logs_.append(frames, 0, written);
}

Status Recovery::append_commits() {
  std::map<size_t, FrameBuilder> frames;
  std::vector<CommitRecord*> records;  // in these
  const auto write = [&]() -> Status {
    std::map<size_t, LogFrame> written;
    STOKER_TRY(append(frames, written));
    for (const auto& [shard, frame] : written) {
      for (CommitRecord* record : records) record->held.push_back(frame.segment);
    }
    frames.clear();
    records.clear();
    return {};
  };
  const ShardSet live = map_.live();
  for (const auto& [stamp, found] : commits_) {
    size_t largest = 0;
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((live & ~found.seen & shard_bit(shard)) == 0) continue;
      frames[shard].add(CommitItem{stamp, found.items});
      largest = std::max(largest, frames[shard].bytes());
    }
    records.push_back(found.record.get());
    if (largest > shape_.segment_bytes / 2) STOKER_TRY(write());
  }
  return write();
}

// Only now: with its COMMIT on all shards a VAL of a transaction cannot come to stand alone.
Status Recovery::append_vals() {
  std::map<size_t, FrameBuilder> frames;
  std::vector<AlignedBytes> memory;
  struct Home {
    Val* val;
    size_t shard, at;
  };
  std::vector<Home> homes;
  const ShardSet live = map_.live();
  const auto write = [&]() -> Status {
    std::map<size_t, LogFrame> written;
    STOKER_TRY(append(frames, written));
    for (const Home& home : homes) {
      const auto frame = written.find(home.shard);
      if (frame == written.end()) continue;
      home.val->places.push_back({home.shard, frame->second.blocks_at + home.at * kBlock});
      home.val->held.push_back(frame->second.segment);
    }
    frames.clear();
    homes.clear();
    memory.clear();
    return {};
  };
  for (auto& [key, found] : vals_) {
    const StripePtr stripe = find_stripe(found.item.stripe);
    if (!stripe || !counts(found)) continue;
    const auto& val = found.val;
    const bool newest = std::any_of(stripe->overlay.begin(), stripe->overlay.end(),
                                    [&val](const auto& each) { return each.second.val == val; });
    ShardSet lacking = 0;
    for (size_t c = 0; c < shape_.n(); ++c) {
      if (c == found.item.chunk || c >= shape_.k)
        lacking |= shard_bit(stripe->shards[c]) & live & ~found.seen;
    }
    if (!newest || lacking == 0) continue;
    AlignedBytes& blocks = memory.emplace_back();
    do {
      blocks = AlignedBytes(found.item.crcs.size() * kBlock);
      reader_.fetch_records({{Run::From::log, stripe, found.item.chunk, found.item.first,
                              found.item.crcs.size(), found.val, 0, blocks.data()}},
                            Priority::demand);
    } while (blocks.lost());
    size_t largest = 0;
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((lacking & shard_bit(shard)) == 0) continue;
      homes.push_back({found.val.get(), shard, frames[shard].block_count()});
      frames[shard].add(found.item, blocks.span());
      largest = std::max(largest, frames[shard].bytes());
    }
    if (largest > shape_.segment_bytes / 2) STOKER_TRY(write());
  }
  return write();
}

Status Recovery::append_folds() {
  std::map<size_t, FrameBuilder> frames;
  const ShardSet live = map_.live();
  for (const auto& [key, found] : folds_) {
    const StripePtr stripe = find_stripe(found.item.stripe);
    uint32_t concerned = 0;
    for (const FoldRow& row : found.item.rows) concerned |= uint32_t{1} << row.chunk;
    for (size_t c = 0; c < shape_.n(); ++c) {
      const ShardSet shard = shard_bit(stripe->shards[c]);
      if ((c >= shape_.k || (concerned >> c & 1) != 0) && (live & ~found.seen & shard) != 0)
        frames[stripe->shards[c]].add(found.item);
    }
  }
  std::map<size_t, LogFrame> written;
  STOKER_TRY(append(frames, written));
  for (auto& [key, found] : folds_) {
    for (const auto& [shard, frame] : written) found.held.push_back(frame.segment);
  }
  return {};
}

Status Recovery::roll_forward() {
  std::set<uint64_t> stripes;
  for (const auto& [key, found] : folds_) stripes.insert(found.item.stripe);
  for (const uint64_t id : stripes) STOKER_TRY(roll_forward(find_stripe(id)));
  return {};
}

// What nothing was found for, or was lost since, comes from the others.
Status Recovery::catch_up() {
  for (const auto& [id, raw] : raw_) {
    const StripePtr stripe = find_stripe(id);
    if (!stripe) continue;
    for (size_t position = 0; position < shape_.n(); ++position) {
      if ((map_.live_positions(*stripe) >> position & 1) == 0 || !lags(*stripe, raw, position))
        continue;
      const auto rebuilt = rebuilder_.rebuild(stripe, position);
      if (rebuilt) continue;
      const ShardSet shard = shard_bit(stripe->shards[position]);
      // it cannot be written
      if (rebuilt.error().code == Code::io && shape_.writable(map_.live() & ~shard)) {
        STOKER_TRY(logs_.drop_shards(shard, rebuilt.error().what));
        continue;
      }
      log().warn("{}", rebuilt.error().message());
      const auto map = map_.lock();
      map->bad[{id, position}] = stripe;  // by a repair, then
    }
  }
  return {};
}

// Whether the shard's own header does not say of every row what the headers together say.
bool Recovery::lags(const Stripe& stripe, const RawHeaders& raw, size_t position) const {
  for (size_t row = 0; row < shape_.rows(); ++row) {
    if (position >= shape_.k) {
      if (stripe.headers->unsound[row * shape_.m + position - shape_.k]) return true;
    } else if (const auto& entry = raw.data[position][row];
               !entry || entry->version != stripe.headers->versions[row * shape_.k + position]) {
      return true;
    }
  }
  return false;
}

// Blocks in place, durable, then their header pages, durable.
Status Recovery::roll_forward(const StripePtr& stripe) {
  Headers& headers = *stripe->headers;
  const uint32_t live = map_.live_positions(*stripe);
  ShardBatch blocks(shards_, Priority::demand);
  std::vector<AlignedBytes> memory;
  std::set<std::pair<size_t, size_t>> pages;  // position, page
  ShardSet touched = 0;
  for (const auto& [at, over] : stripe->overrides) {
    const size_t row = at / shape_.n();
    const size_t position = at % shape_.n();
    if ((live >> position & 1) == 0) continue;
    AlignedBytes& block = memory.emplace_back(kBlock);
    if (over.val) {
      auto read = reader_.read_val(stripe, over.val, over.index, 1, Priority::demand);
      if (!read) {  // no log has it intact: decoded from the others, if they have it
        raw_.at(stripe->id).data[position][row].reset();
        continue;
      }
      block = std::move(*read);
    } else {
      ShardBatch read(shards_, Priority::demand);
      read.read(over.place.shard, over.place.offset, block.slice());
      const bool intact = read.run() == 0 &&
                          crc32c(block.data(), kBlock) == headers.crcs[row * shape_.n() + position];
      if (!intact) {
        headers.unsound[row * shape_.m + position - shape_.k] = true;
        continue;
      }
    }
    blocks.write(stripe->shards[position], shape_.block_at(stripe->slots[position], row),
                 block.slice());
    pages.emplace(position, row / shape_.rows_per_page());
    touched |= shard_bit(stripe->shards[position]);
  }
  if (const ShardSet failed = blocks.run(); failed != 0)
    STOKER_TRY(logs_.drop_shards(failed, blocks.why()));
  STOKER_TRY(logs_.flush(touched));
  const auto write = [&](const std::set<std::pair<size_t, size_t>>& those) -> Status {
    ShardBatch batch(shards_, Priority::demand);
    for (const auto& [position, page] : those) {
      const HeaderPage header = page_of(shape_, stripe->id, headers, position, page);
      headers.counters[position * shape_.pages() + page] = header.counter;
      encode_page(shape_, shards_.store(), header, memory.emplace_back(kBlock).span());
      batch.write(stripe->shards[position],
                  shape_.page_at(stripe->slots[position], page, header.counter),
                  memory.back().slice());
    }
    if (const ShardSet failed = batch.run(); failed != 0)
      STOKER_TRY(logs_.drop_shards(failed, batch.why()));
    return logs_.flush(touched);
  };
  // Of a page that could not be read both copies: the one that is left may have a higher counter.
  std::set<std::pair<size_t, size_t>> unread = pages;
  std::erase_if(unread, [&](const auto& at) {
    return headers.counters[at.first * shape_.pages() + at.second] != 0;
  });
  STOKER_TRY(write(pages));
  if (!unread.empty()) STOKER_TRY(write(unread));
  stripe->overrides.clear();
  return {};
}

// Crash after crash must not eat up the segments that opening needs.
Status Recovery::restore_reserve() {
  while (logs_.free_segments() < LogSet::kReserve) {
    const auto folded = folder_.step({kFoldAtOnce});
    if (folded) STOKER_TRY(joining_.checkpoint());
    if (!folded || *folded == 0) {
      log().warn("the logs of the coded store are nearly full and cannot be folded");
      return {};
    }
  }
  return {};
}

}  // namespace stoker::coded
