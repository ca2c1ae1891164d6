#include "curm/delta_log.h"

#include <algorithm>

namespace stoker::curm {

std::vector<PlaceSlot> DeltaLog::send_delta(Round& round, const Chunk& data, uint64_t offset,
                                            const Value& delta, uint64_t seq) const {
  std::vector<PlaceSlot> places;
  for (int j = 0; j < m(); ++j) {
    const Chunk parity = geometry().parity(data.stripe, j);
    Errand& errand = round.to(node(parity), delta.size());
    Record entry = record(Record::Kind::delta, seq, data, offset, delta);
    places.push_back(reserves() ? errand.append_behind(parity, std::move(entry))
                                : errand.append(std::move(entry)));
    if (safe()) errand.flush();
  }
  return places;
}

void DeltaLog::index_delta(const Chunk& data, uint64_t offset, uint64_t bytes, uint64_t seq,
                           const std::vector<PlaceSlot>& places) {
  for (int j = 0; j < m(); ++j)
    entries_[geometry().parity(data.stripe, j)].push_back(
        {data.position, offset, bytes, seq, *places[static_cast<size_t>(j)]});
  count_logged(data.stripe, bytes);
}

uint64_t DeltaLog::reserved_used(const Chunk& parity) const {
  uint64_t used = 0;
  if (const auto found = entries_.find(parity); found != entries_.end()) {
    for (const Entry& entry : found->second) used += entry.bytes;
  }
  return used;
}

// All entries' bytes, one after the other.
Slot DeltaLog::load(Errand& errand, const Chunk& parity, const Entries& entries) const {
  std::vector<Step::Part> parts;
  parts.reserve(entries.size());
  for (const Entry& entry : entries) parts.push_back({true, 0, entry.bytes, entry.place});
  return errand.gather(parity, std::move(parts));
}

// What the entries change of the parity.
DeltaLog::Changed DeltaLog::derive(Errand& errand, const Chunk& parity,
                                   const Entries& entries) const {
  Changed changed;
  RangeMap<int> dirty;
  if (reserves()) {
    dirty.put(0, geometry().chunk_bytes, 0);
  } else {
    for (const Entry& entry : entries) dirty.put(entry.offset, entry.bytes, 0);
  }
  const Slot deltas = load(errand, parity, entries);
  for (const auto& range : dirty.joined()) {
    const Slot was = errand.read(parity, range.at, range.size());
    changed.emplace_back(range.at, errand.derive([this, was, deltas, entries, at = range.at,
                                                  j = parity.position - k()] {
      Value now = *was;
      uint64_t begin = 0;
      for (const Entry& entry : entries) {
        now = advanced(code(), entry.data, j, now, at, deltas->slice(begin, entry.bytes),
                       entry.offset);
        begin += entry.bytes;
      }
      return now;
    }));
  }
  return changed;
}

PlaceSlot DeltaLog::fold_parity(Round& round, const Chunk& parity, uint64_t fold_seq) {
  const auto found = entries_.find(parity);
  if (found == entries_.end() || found->second.empty()) return nullptr;
  Errand& errand = round.to(node(parity));
  PlaceSlot staged;
  // The papers fold the differences of one data chunk after the other; the safe form is given what
  // is better, all at once.
  std::vector<Entries> batches(1, found->second);
  if (!safe() && !reserves()) {
    batches.assign(static_cast<size_t>(k()), {});
    for (const Entry& entry : found->second)
      batches[static_cast<size_t>(entry.data)].push_back(entry);
  }
  for (const Entries& batch : batches) {
    if (batch.empty()) continue;
    const Changed changed = derive(errand, parity, batch);
    if (safe()) staged = append_stage(errand, parity, fold_seq, changed);
    for (const auto& [at, value] : changed) errand.write(parity, at, value);
  }
  if (!safe()) return nullptr;
  flush_and_mark(errand, parity, fold_seq);
  return staged;
}

Status DeltaLog::fold(uint64_t stripe) {
  const uint64_t fold_seq = next_seq();
  Round round;
  round.background = true;
  std::vector<LogPlace> done;
  std::vector<PlaceSlot> stages;
  for (int j = 0; j < m(); ++j) {
    const Chunk parity = geometry().parity(stripe, j);
    stages.push_back(fold_parity(round, parity, fold_seq));
    for (const Entry& entry : entries_[parity]) done.push_back(entry.place);
  }
  STOKER_TRY(run(round));
  for (const PlaceSlot& stage : stages) {
    if (stage) done.push_back(*stage);
  }
  STOKER_TRY(fold_data(stripe, fold_seq));
  for (int j = 0; j < m(); ++j) entries_.erase(geometry().parity(stripe, j));
  count_folded(stripe);
  return release(done);
}

Status DeltaLog::recover(const std::set<NodeId>& replaced) {
  STOKER_ASSIGN(Recovered found, settle(replaced));
  STOKER_TRY(roll_forward_stages(found));
  std::set<uint64_t> stripes;
  for (const Survivor& survivor : found.updates) {
    const Record& entry = survivor.record;
    const Chunk mine = chunk_on(entry.chunk.stripe, survivor.node);
    const bool alive = entry.seq > found.folded_of(mine);
    stripes.insert(mine.stripe);
    if (entry.kind == Record::Kind::delta) {
      if (alive)
        entries_[mine].push_back({entry.chunk.position, entry.ranges[0].offset,
                                  entry.ranges[0].value.size(), entry.seq, survivor.place});
    } else {
      STOKER_TRY(redo(survivor, alive));
    }
  }
  // Every node brings its own log into its base; then the bases agree, and what is lost is decoded
  // from them.
  for (const uint64_t stripe : stripes) STOKER_TRY(fold(stripe));
  STOKER_TRY(rebuild_bases(replaced, found));
  return release(found.places);
}

std::function<void()> DeltaLog::rebuilt(const Chunk& lost, Errand& /*errand*/) {
  return [this, lost] { entries_.erase(lost); };  // their content is in the new base
}

Slot DeltaLog::logical(Errand& errand, const Chunk& chunk) {
  const auto found = entries_.find(chunk);
  if (chunk.position < k() || found == entries_.end()) return Scheme::logical(errand, chunk);
  const Entries entries = found->second;
  const Slot base = Scheme::logical(errand, chunk);
  const Slot deltas = load(errand, chunk, entries);
  return errand.derive([this, base, deltas, entries, j = chunk.position - k()] {
    Value now = *base;
    uint64_t begin = 0;
    for (const Entry& entry : entries) {
      now =
          advanced(code(), entry.data, j, now, 0, deltas->slice(begin, entry.bytes), entry.offset);
      begin += entry.bytes;
    }
    return now;
  });
}

}  // namespace stoker::curm
