#include "curm/vdl.h"

#include <algorithm>

namespace stoker::curm {

Status Vdl::update(const Update& update) {
  const uint64_t seq = next_seq();
  Record entry = record(Record::Kind::value, seq, update.chunk, update.offset, update.value);
  entry.needs_commit = true;
  Round round;
  std::vector<PlaceSlot> slots = {log(round.to(node(update.chunk), update.value.size()), entry)};
  for (int j = 0; j < m(); ++j)
    slots.push_back(
        log(round.to(node(geometry().parity(update.chunk.stripe, j)), update.value.size()), entry));
  STOKER_TRY(run(round));
  STOKER_TRY(acknowledge(kClient));
  std::vector<LogPlace> places;
  places.reserve(slots.size());
  for (const PlaceSlot& slot : slots) places.push_back(*slot);
  count_logged(update.chunk.stripe, update.value.size());
  std::vector<LogPlace> overtaken = put(update, seq, std::move(places));
  return overtaken.empty() ? Status() : release(overtaken);
}

std::vector<LogPlace> Vdl::put(const Update& update, uint64_t seq, std::vector<LogPlace> places) {
  Overlay& overlay = dirty_[update.chunk.stripe];
  std::vector<LogPlace> let_go;
  for (const uint64_t overtaken :
       overlay.put(seq, {update.chunk.position, update.offset, update.value.size(),
                         std::move(places), safe() ? Value() : update.value})) {
    if (!lets_go_early()) break;
    const Overlay::Logged logged = overlay.forget(overtaken);
    count_dead(update.chunk.stripe, logged.bytes);
    let_go.insert(let_go.end(), logged.places.begin(), logged.places.end());
  }
  return let_go;
}

Result<Value> Vdl::read(const Chunk& chunk, uint64_t offset, uint64_t bytes) {
  Round round;
  const Slot base = round.to(node(chunk)).read(chunk, offset, bytes);
  std::vector<Overlay::Piece> newest;
  if (const auto dirty = dirty_.find(chunk.stripe); dirty != dirty_.end()) {
    newest = dirty->second.newest(chunk.position, offset, bytes);
    dirty->second.ask(round, chunk, newest);
  }
  STOKER_TRY(run(round));
  Value value = *base;
  for (const Overlay::Piece& piece : newest)
    value = overlaid(value, piece.at - offset, piece.value());
  return value;
}

// What a fold brings in, out of the logs.
Result<Fold::Newest> Vdl::newest_of(uint64_t stripe, const Overlay& overlay) {
  Round round;
  round.background = true;
  std::map<int, std::vector<Overlay::Piece>> pieces;
  for (int position = 0; position < k(); ++position) {
    pieces[position] = overlay.newest(position, 0, geometry().chunk_bytes);
    overlay.ask(round, {stripe, position}, pieces[position]);
  }
  if (!round.errands.empty()) STOKER_TRY(run(round));
  Fold::Newest newest;
  for (const auto& [position, read] : pieces) {
    for (const Overlay::Piece& piece : read)
      newest[position].put(piece.at, piece.bytes, piece.value());
  }
  return newest;
}

Status Vdl::bring_in(uint64_t stripe, const Fold::Newest& newest, Why why) {
  const uint64_t fold_seq = next_seq();
  Fold fold(*setup().substrate, geometry(), code(), stripe, newest, setup().gap_max);
  STOKER_TRY(fold.read_data(
      [this, why](int dirty) { return (why == Why::write && dirty == k()) || reconstructs(dirty); },
      why == Why::fold));

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

Status Vdl::write_through(uint64_t stripe, const Fold::Newest& newest) {
  return bring_in(stripe, newest, Why::write);
}

Status Vdl::fold(uint64_t stripe) {
  const auto found = dirty_.find(stripe);
  if (found == dirty_.end()) return {};
  STOKER_ASSIGN(const Fold::Newest newest, newest_of(stripe, found->second));
  if (safe() || reconstructs(k())) {
    STOKER_TRY(bring_in(stripe, newest, Why::fold));
  } else {  // one data chunk after the other, as published
    for (const auto& [position, ranges] : newest)
      STOKER_TRY(bring_in(stripe, {{position, ranges}}, Why::fold));
  }
  const std::vector<LogPlace> places = found->second.places();
  dirty_.erase(found);
  count_folded(stripe);
  return release(places);
}

// A commit that a crash in its round left on some nodes only is put on all that it will move a
// chunk of, before any chunk moves by it: who is lost next must not take the decision along, and a
// node tells by its own commit which of its blocks may be torn.
Status Vdl::spread_commits(Recovered& found) {
  std::map<std::pair<uint64_t, uint64_t>, std::set<NodeId>> holders;  // by stripe, seq
  for (const Survivor& each : found.folds) {
    if (each.record.kind == Record::Kind::commit)
      holders[{each.record.chunk.stripe, each.record.seq}].insert(each.node);
  }
  Round round;
  std::vector<PlaceSlot> places;
  for (auto& [fold, has] : holders) {
    const auto& [stripe, seq] = fold;
    std::set<NodeId> all;
    const auto takes_part = [&, of = stripe, at = seq](const Survivor& each) {
      const Record& entry = each.record;
      if (entry.chunk.stripe != of || each.node != node(entry.chunk) ||
          entry.seq <= found.folded_of(entry.chunk))
        return;
      if (entry.kind == Record::Kind::stage ? entry.seq == at
                                            : entry.kind == Record::Kind::value && entry.seq <= at)
        all.insert(each.node);
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

// Folds that a commit decided: parities and written-through data from their stages, other data from
// its own records.
Status Vdl::resolve_folds(Recovered& found) {
  STOKER_TRY(spread_commits(found));
  std::set<std::pair<uint64_t, uint64_t>> committed;  // stripe, seq
  for (const Survivor& each : found.folds) {
    if (each.record.kind == Record::Kind::commit)
      committed.insert({each.record.chunk.stripe, each.record.seq});
  }
  for (const auto& [stripe, seq] : committed) {
    for (const Survivor& each : found.folds) {
      const Record& entry = each.record;
      if (entry.kind != Record::Kind::stage || entry.seq != seq || entry.chunk.stripe != stripe ||
          seq <= found.folded_of(entry.chunk))
        continue;
      STOKER_TRY(roll_forward(each));
      found.folded[entry.chunk] = seq;
    }
    std::map<Chunk, Survivor> joined;
    for (const Survivor& each : found.updates) {
      const Chunk data = each.record.chunk;
      if (data.stripe != stripe || each.node != node(data) || each.record.seq > seq ||
          each.record.seq <= found.folded_of(data))
        continue;
      Survivor& all =
          joined
              .try_emplace(data,
                           Survivor{each.node, {}, record(Record::Kind::stage, seq, data, 0, {})})
              .first->second;
      // in order of seq: later ones lie over earlier ones
      all.record.ranges.push_back(each.record.ranges[0]);
    }
    for (const auto& [data, all] : joined) {
      STOKER_TRY(roll_forward(all));
      found.folded[data] = seq;
    }
  }
  return {};
}

// The live records, wherever they were found: on the nodes of their group that came back blank.
Status Vdl::append_again(Recovered& found, const std::set<NodeId>& replaced) {
  std::map<NodeId, std::vector<const Record*>> missing;
  for (const Survivor& each : found.updates) {
    const Chunk data = each.record.chunk;
    const uint64_t seq = each.record.seq;
    if (seq <= found.folded_of(chunk_on(data.stripe, each.node))) continue;
    if (Overlay& overlay = dirty_[data.stripe]; overlay.knows(seq)) {
      overlay.add_place(seq, each.place, each.node == node(data));
      continue;
    }
    const Record::Range& range = each.record.ranges[0];
    // what it overtakes is released at the end, like all that was found
    put({data, range.offset, range.value}, seq, {each.place});
    if (replaced.count(node(data)) != 0) missing[node(data)].push_back(&each.record);
    for (int j = 0; j < m(); ++j) {
      const NodeId parity = node(geometry().parity(data.stripe, j));
      if (replaced.count(parity) != 0) missing[parity].push_back(&each.record);
    }
  }
  Round round;
  std::vector<std::pair<const Record*, PlaceSlot>> places;
  for (const auto& [id, records] : missing) {
    Errand& errand = round.to(id);
    for (const Record* each : records) places.emplace_back(each, errand.append(*each));
    errand.flush();
  }
  STOKER_TRY(run(round));
  for (const auto& [each, place] : places) {
    dirty_[each->chunk.stripe].add_place(each->seq, *place, place->node == node(each->chunk));
    found.places.push_back(*place);  // of overtaken ones, too
  }
  return {};
}

Status Vdl::recover(const std::set<NodeId>& replaced) {
  STOKER_ASSIGN(Recovered found, settle(replaced));
  STOKER_TRY(resolve_folds(found));
  STOKER_TRY(rebuild_bases(replaced, found));
  STOKER_TRY(append_again(found, replaced));
  std::vector<uint64_t> stripes;
  stripes.reserve(dirty_.size());
  for (const auto& [stripe, dirty] : dirty_) stripes.push_back(stripe);
  for (const uint64_t stripe : stripes) STOKER_TRY(fold(stripe));
  return release(found.places);
}

// The live records of the lost chunk, or for a parity of all data chunks, as another has them.
void Vdl::pick_up(const Chunk& lost, Round& gather) {
  picked_.clear();
  const auto dirty = dirty_.find(lost.stripe);
  if (dirty == dirty_.end()) return;
  for (int position = 0; position < k(); ++position) {
    if (lost.position < k() && position != lost.position) continue;
    std::vector<Overlay::Piece> records = dirty->second.live(position);
    dirty->second.ask(gather, {lost.stripe, position}, records);
    picked_.insert(picked_.end(), records.begin(), records.end());
  }
}

std::function<void()> Vdl::rebuilt(const Chunk& lost, Errand& errand) {
  std::vector<std::pair<uint64_t, PlaceSlot>> places;
  for (const Overlay::Piece& each : std::exchange(picked_, {})) {
    errand.sent += each.bytes;
    Record again =
        record(Record::Kind::value, each.seq,
               {lost.stripe, dirty_[lost.stripe].position_of(each.seq)}, each.at, each.value());
    again.needs_commit = true;
    places.emplace_back(each.seq, errand.append(std::move(again)));
  }
  return [this, lost, places] {
    const auto dirty = dirty_.find(lost.stripe);
    if (dirty == dirty_.end()) return;
    dirty->second.lose_places(node(lost));
    for (const auto& [seq, place] : places)
      dirty->second.add_place(seq, *place, lost.position < k());
  };
}

}  // namespace stoker::curm
