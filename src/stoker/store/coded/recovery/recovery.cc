#include "stoker/store/coded/recovery/recovery.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "stoker/base/log.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {
namespace {}  // namespace

Status Recovery::run(bool read_only) {
  if (const auto there = static_cast<size_t>(std::popcount(shards_.knowing()));
      there < shape_.present_min()) {
    return fail(Code::not_found,
                "only {} of the {} shards are there: fewer than {} cannot tell which writes are "
                "the latest; bring more disks back{}",
                there, shape_.shards, shape_.present_min(), shards_.missing());
  }
  ShardSet current = shards_.current();
  found_ = read_shards(shards_, current);
  current &= ~found_.dark;
  ShardSet whole = current;  // without those of which something cannot be read
  for (const auto& [shard, blocks] : found_.unreadable) {
    whole &= ~shard_bit(shard);
    log().warn("{} blocks of the log or table of a shard cannot be read, and count as damaged: {}",
               blocks.size(), std::exchange(shards_[shard].trouble, {}));
  }
  bool writable = !read_only && shape_.writable(whole);
  if (shards_.fresh() && !writable)
    return fail(Code::io,
                "the new shards cannot be read: make the store again, on disks that work");
  if (current == 0)
    return fail(Code::not_found,
                "none of the present shards holds the latest writes: bring more disks back");
  if (!found_.has_image)
    return fail(Code::corruption,
                "no shard has an intact object table: bring missing disks back, or restore the "
                "store from a copy");
  {
    const auto map = map_.lock();
    map->live = current;
    for (size_t shard = 0; shard < shape_.shards; ++shard)
      map->epoch =
          std::max(map->epoch,
                   (current & shard_bit(shard)) != 0 ? shards_[shard].super.confirmed.number : 0);
  }
  logs_.found_image(found_.image_stamp);
  STOKER_TRY(load_table());
  STOKER_TRY(load_raw());
  choose_folds();
  choose_vals();
  find_gone();
  let_go();
  const auto refuse = [this](Error why) { map_.lock()->refused = std::move(why); };
  if (read_only) {
    refuse(fail(Code::read_only, "the store {} was opened read-only; open it for writing",
                map_.name()));
  } else if (!hidden_.empty()) {
    writable = false;
    refuse(fail(Code::read_only,
                "{}. Readable data is served: bring missing disks back, or copy intact objects "
                "into a new store",
                hidden_));
  } else if (!writable && shape_.writable(current)) {
    refuse(fail(Code::read_only,
                "sectors of the log or table of '{}' cannot be read. {} more shards are like that, "
                "and others are missing, so they may hold the last copy of some data. Readable "
                "data is served: bring missing disks back",
                shards_[found_.unreadable.begin()->first].path, found_.unreadable.size() - 1));
  } else if (!writable) {
    const auto missing =
        static_cast<size_t>(shape_.shards) - static_cast<size_t>(std::popcount(current));
    refuse(fail(Code::read_only,
                "{} of the {} shards are missing or not up to date, too many for writing. Readable "
                "data is served: bring disks back",
                missing, shape_.shards));
  }
  return writable ? settle() : Status();
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
  for (const std::string& piece : found_.image)
    STOKER_TRY(map->table.apply(shape_, piece, resolve));
  Version version = number_of(found_.image_stamp);
  for (const auto& [stamp, found] : found_.commits) {
    if (stamp <= found_.image_stamp) continue;
    STOKER_TRY(map->table.apply(shape_, found.items, resolve));
    version = std::max(version, number_of(stamp));
  }
  for (const Stamp stamp : found_.commits_told) version = std::max(version, number_of(stamp));
  for (const auto& [key, object] : map->table.objects()) {
    if (object->known) map->classes.set(class_id(key), class_volume(key), *object->known);
    for (const StripePtr& stripe : object->stripes) {
      if (stripe) object_of_[stripe->id] = key;
    }
  }
  for (const auto& [key, found] : found_.vals) {
    const Stamp stamp = found.item.stamp;
    if (stamp <= found_.image_stamp || found.item.needs_commit) continue;
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
  for (const auto& [key, found] : found_.vals) wanted.insert(found.item.stripe);
  for (const auto& [key, found] : found_.folds) wanted.insert(found.item.stripe);
  for (const uint64_t id : wanted) {
    const StripePtr stripe = find_stripe(id);
    if (!stripe) continue;
    HeaderRead read{stripe.get(), RawHeaders(shape_)};
    reader_.read_headers({&read, 1}, Priority::demand);
    if (!read.any)
      log().warn("no header of stripe {} of {} can be read: {}", id, map_.name(), read.why);
    raw_.emplace(id, std::move(read.raw));
  }
  return {};
}

// Folds that were decided and are not done everywhere: their blocks lie in the log, and stand for
// the base until they are written there.
void Recovery::choose_folds() {
  for (auto& [key, found] : found_.folds) {
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
    for (const auto& [stage_key, stage] : found_.stages) {
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
      for (auto val = found_.vals.lower_bound({row.version, stripe->id, row.chunk, 0});
           val != found_.vals.end(); ++val) {
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
        const auto stage = found_.stages.find({found.item.fold, stripe->id, shape_.k + j, row});
        if (stage == found_.stages.end() || outdone.contains(row)) continue;
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
    if (const StripePtr stripe = find_stripe(id))
      stripe->headers = std::make_shared<Headers>(raw.merge(shape_));
  }
  for (auto& [key, found] : found_.vals) {
    const StripePtr stripe = find_stripe(found.item.stripe);
    if (!stripe || !found_.counts(found)) continue;
    if (found.item.needs_commit && found_.commits.contains(found.item.stamp))
      found.val->commit = found_.commits.at(found.item.stamp).record;
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
  logs_.rounds().resume(found_.rounds.last(), found_.rounds.shards_of_last());
  for (const auto& [key, count] : blocks) {
    gone.push_back("an update of '" + key +
                   "' that was acknowledged is damaged in all logs: " + std::to_string(count) +
                   " of its blocks are lost, and an error until they are written again");
  }
  for (const Stamp stamp : found_.commits_told) {
    if (stamp > found_.image_stamp && !found_.commits.contains(stamp))
      hidden_ = "commit " + std::to_string(number_of(stamp)) +
                " is damaged in all logs, and what it changed is not known";
  }
  if (found_.image_told > found_.image_stamp)
    hidden_ = "the object table as of commit " + std::to_string(number_of(found_.image_told)) +
              " is damaged on all shards, and an older one is in its place";
  if (!gone.empty() && hidden_.empty()) {
    std::vector<uint64_t> from;
    for (size_t shard = 0; shard < shape_.shards; ++shard)
      from.push_back(shards_[shard].super.first_round);
    const ShardSet hiding = found_.rounds.hiding(shape_, map->live, from);
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
    log().warn("the coded store {} has lost data, as too many shards are missing or damaged: {}",
               map_.name(), each);
}

// Segments with nothing in them that is needed are free from here on: what is appended next must go
// somewhere.
void Recovery::let_go() {
  std::erase_if(found_.vals, [&](const auto& each) {
    return each.second.val.use_count() == 1 && each.second.item.stamp <= found_.image_stamp;
  });
  std::erase_if(found_.commits, [&](const auto& each) {
    return each.second.record.use_count() == 1 && each.first <= found_.image_stamp;
  });
  std::erase_if(found_.folds, [](const auto& each) { return !each.second.undone; });
  std::erase_if(found_.stages, [&](const auto& each) {
    return !found_.folds.contains({std::get<0>(each.first), std::get<1>(each.first)});
  });
}

}  // namespace stoker::coded
