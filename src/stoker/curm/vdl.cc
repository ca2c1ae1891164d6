#include "stoker/curm/vdl.h"

#include <algorithm>

namespace stoker::curm {

Status Vdl::update(const Update& update) {
  const uint64_t seq = next_seq();
  Record entry = record(Record::Kind::value, seq, update.chunk, update.offset, update.value);
  entry.needs_commit = true;
  Round round;
  std::vector<PlaceSlot> slots = {log(round.to(node(update.chunk), update.value.size()), entry)};
  for (int j = 0; j < m(); ++j) slots.push_back(log(round.to(node(geometry().parity(update.chunk.stripe, j)), update.value.size()), entry));
  STOKER_TRY(run(round));
  STOKER_TRY(acknowledge(kClient));
  std::vector<LogPlace> places;
  places.reserve(slots.size());
  for (const PlaceSlot& slot : slots) places.push_back(*slot);
  count_logged(update.chunk.stripe, update.value.size());
  std::vector<LogPlace> overtaken = put(update, seq, std::move(places));
  return overtaken.empty() ? Status() : release(overtaken);
}

// Makes an update the newest of its range. The places of records that it overtook, where they are let go of.
std::vector<LogPlace> Vdl::put(const Update& update, uint64_t seq, std::vector<LogPlace> places) {
  const uint64_t bytes = update.value.size();
  Dirty& dirty = dirty_[update.chunk.stripe];
  RangeMap<uint64_t>& owners = dirty.owners[update.chunk.position];
  std::set<uint64_t> covered;
  for (const auto& piece : owners.within(update.offset, bytes)) covered.insert(piece.value);
  owners.put(update.offset, bytes, seq);
  dirty.newest[update.chunk.position].put(update.offset, bytes, update.value);
  dirty.logged[seq] = {update.chunk.position, update.offset, bytes, std::move(places)};
  std::vector<LogPlace> overtaken;
  if (!lets_go_early()) return overtaken;
  for (const uint64_t each : covered) {
    const auto logged = dirty.logged.find(each);
    const auto left = owners.within(logged->second.offset, logged->second.bytes);
    if (std::any_of(left.begin(), left.end(), [each](const auto& piece) { return piece.value == each; })) continue;
    count_dead(update.chunk.stripe, logged->second.bytes);
    overtaken.insert(overtaken.end(), logged->second.places.begin(), logged->second.places.end());
    dirty.logged.erase(logged);
  }
  return overtaken;
}

Result<Value> Vdl::read(const Chunk& chunk, uint64_t offset, uint64_t bytes) {
  Round round;
  const Slot base = round.to(node(chunk)).read(chunk, offset, bytes);
  STOKER_TRY(run(round));
  Value value = *base;
  const auto dirty = dirty_.find(chunk.stripe);
  if (dirty == dirty_.end()) return value;
  const auto newest = dirty->second.newest.find(chunk.position);
  if (newest == dirty->second.newest.end()) return value;
  for (const auto& piece : newest->second.within(offset, bytes)) value = overlaid(value, piece.at - offset, piece.value.slice(piece.at - piece.origin, piece.size()));
  return value;
}

Status Vdl::bring_in(uint64_t stripe, const Fold::Newest& newest, Why why) {
  const uint64_t fold_seq = next_seq();
  Fold fold(*setup().substrate, geometry(), code(), stripe, newest);
  STOKER_TRY(fold.read_data([this, why](int dirty) { return (why == Why::write && dirty == k()) || reconstructs(dirty); }, why == Why::fold));

  std::map<Chunk, Fold::Ranges> changed = fold.data();
  std::vector<PlaceSlot> places;
  Round stage;
  stage.background = why == Why::fold;
  if (why == Why::write && safe()) {
    for (const auto& [chunk, ranges] : changed) {
      Errand& errand = stage.to(node(chunk));
      for (const auto& [at, value] : ranges) errand.sent += value->size();
      places.push_back(append_stage(errand, chunk, fold_seq, ranges));
    }
  }
  for (int j = 0; j < m(); ++j) {
    const Chunk parity = geometry().parity(stripe, j);
    Errand& errand = stage.to(node(parity));
    changed[parity] = fold.parity(errand, j);
    if (safe()) places.push_back(append_stage(errand, parity, fold_seq, changed[parity]));
  }
  STOKER_TRY(run(stage));
  if (safe()) {
    Round commit;
    commit.background = why == Why::fold;
    for (const auto& [chunk, ranges] : changed) {
      Record entry = record(Record::Kind::commit, fold_seq, chunk, 0, {});
      entry.ranges.clear();
      places.push_back(log(commit.to(node(chunk)), std::move(entry)));
    }
    STOKER_TRY(run(commit));
  }
  if (why == Why::write && safe()) STOKER_TRY(acknowledge(kClient));
  Round place;
  place.background = why == Why::fold;
  for (const auto& [chunk, ranges] : changed) {
    Errand& errand = place.to(node(chunk));
    for (const auto& [at, value] : ranges) errand.write(chunk, at, value);
    if (safe()) flush_and_mark(errand, chunk, fold_seq);
  }
  STOKER_TRY(run(place));
  if (why == Why::write && !safe()) STOKER_TRY(acknowledge(kClient));
  std::vector<LogPlace> done;
  done.reserve(places.size());
  for (const PlaceSlot& each : places) done.push_back(*each);
  return release(done);
}

Status Vdl::write_through(uint64_t stripe, const Fold::Newest& newest) { return bring_in(stripe, newest, Why::write); }

Status Vdl::fold(uint64_t stripe) {
  const auto found = dirty_.find(stripe);
  if (found == dirty_.end()) return {};
  if (safe() || reconstructs(k())) {
    STOKER_TRY(bring_in(stripe, found->second.newest, Why::fold));
  } else {  // one data chunk after the other, as published
    for (const auto& [position, ranges] : found->second.newest) STOKER_TRY(bring_in(stripe, {{position, ranges}}, Why::fold));
  }
  std::vector<LogPlace> places;
  for (const auto& [seq, logged] : found->second.logged) places.insert(places.end(), logged.places.begin(), logged.places.end());
  dirty_.erase(found);
  count_folded(stripe);
  return release(places);
}

// A commit that a crash in its round left on some nodes only is put on all that it will move a chunk of, before any chunk moves by it: who is lost
// next must not take the decision along, and a node tells by its own commit which of its blocks may be torn.
Status Vdl::spread_commits(Recovered& found) {
  std::map<std::pair<uint64_t, uint64_t>, std::set<NodeId>> holders;  // by stripe, seq
  for (const Survivor& each : found.folds) {
    if (each.record.kind == Record::Kind::commit) holders[{each.record.chunk.stripe, each.record.seq}].insert(each.node);
  }
  Round round;
  std::vector<PlaceSlot> places;
  for (auto& [fold, has] : holders) {
    const auto& [stripe, seq] = fold;
    std::set<NodeId> all;
    const auto takes_part = [&, of = stripe, at = seq](const Survivor& each) {
      const Record& entry = each.record;
      if (entry.chunk.stripe != of || each.node != node(entry.chunk) || entry.seq <= found.folded_of(entry.chunk)) return;
      if (entry.kind == Record::Kind::stage ? entry.seq == at : entry.kind == Record::Kind::value && entry.seq <= at) all.insert(each.node);
    };
    std::for_each(found.folds.begin(), found.folds.end(), takes_part);
    std::for_each(found.updates.begin(), found.updates.end(), takes_part);
    for (const NodeId id : all) {
      if (has.count(id) != 0) continue;
      Errand& errand = round.to(id);
      Record commit = record(Record::Kind::commit, seq, chunk_on(stripe, id), 0, {});
      commit.ranges.clear();
      places.push_back(errand.append(std::move(commit)));
      errand.flush();
    }
  }
  if (places.empty()) return {};
  STOKER_TRY(run(round));
  for (const PlaceSlot& each : places) found.places.push_back(*each);
  return {};
}

// Folds that a commit decided: parities and written-through data from their stages, other data from its own records.
Status Vdl::resolve_folds(Recovered& found) {
  STOKER_TRY(spread_commits(found));
  std::set<std::pair<uint64_t, uint64_t>> committed;  // stripe, seq
  for (const Survivor& each : found.folds) {
    if (each.record.kind == Record::Kind::commit) committed.insert({each.record.chunk.stripe, each.record.seq});
  }
  for (const auto& [stripe, seq] : committed) {
    for (const Survivor& each : found.folds) {
      const Record& entry = each.record;
      if (entry.kind != Record::Kind::stage || entry.seq != seq || entry.chunk.stripe != stripe || seq <= found.folded_of(entry.chunk)) continue;
      STOKER_TRY(roll_forward(each));
      found.folded[entry.chunk] = seq;
    }
    std::map<Chunk, Survivor> joined;
    for (const Survivor& each : found.updates) {
      const Chunk data = each.record.chunk;
      if (data.stripe != stripe || each.node != node(data) || each.record.seq > seq || each.record.seq <= found.folded_of(data)) continue;
      Survivor& all = joined.try_emplace(data, Survivor{each.node, {}, record(Record::Kind::stage, seq, data, 0, {})}).first->second;
      all.record.ranges.push_back(each.record.ranges[0]);  // in order of seq: later ones lie over earlier ones
    }
    for (const auto& [data, all] : joined) {
      STOKER_TRY(roll_forward(all));
      found.folded[data] = seq;
    }
  }
  return {};
}

// The live records, wherever they were found. They are folded before a recovery ends, so a node that came back blank needs none of them: it counts
// only from then on.
void Vdl::take_up(const Recovered& found) {
  for (const Survivor& each : found.updates) {
    const Chunk data = each.record.chunk;
    if (each.record.seq <= found.folded_of(chunk_on(data.stripe, each.node))) continue;
    auto& logged = dirty_[data.stripe].logged;
    if (const auto known = logged.find(each.record.seq); known != logged.end()) {
      known->second.places.push_back(each.place);
      continue;
    }
    const Record::Range& range = each.record.ranges[0];
    put({data, range.offset, range.value}, each.record.seq, {each.place});  // what it overtakes is released at the end, like all that was found
  }
}

Status Vdl::recover(const std::set<NodeId>& replaced) {
  STOKER_ASSIGN(Recovered found, settle(replaced));
  STOKER_TRY(resolve_folds(found));
  STOKER_TRY(rebuild_bases(replaced, found));
  take_up(found);
  std::vector<uint64_t> stripes;
  stripes.reserve(dirty_.size());
  for (const auto& [stripe, dirty] : dirty_) stripes.push_back(stripe);
  for (const uint64_t stripe : stripes) STOKER_TRY(fold(stripe));
  return release(found.places);
}

std::function<void()> Vdl::rebuilt(const Chunk& lost, Errand& errand) {
  std::vector<std::pair<uint64_t, PlaceSlot>> places;
  if (const auto dirty = dirty_.find(lost.stripe); dirty != dirty_.end()) {
    for (const auto& [position, owners] : dirty->second.owners) {
      if (lost.position < k() && position != lost.position) continue;
      for (const auto& piece : owners.all()) {
        const auto value = dirty->second.newest[position].within(piece.at, piece.size()).front();
        errand.sent += piece.size();
        Record again = record(Record::Kind::value, piece.value, {lost.stripe, position}, piece.at, value.value.slice(value.at - value.origin, value.size()));
        again.needs_commit = true;
        places.emplace_back(piece.value, errand.append(std::move(again)));
      }
    }
  }
  return [this, stripe = lost.stripe, places] {
    for (const auto& [seq, place] : places) dirty_[stripe].logged[seq].places.push_back(*place);
  };
}

}  // namespace stoker::curm
