#include "curm/parix.h"

#include <string>

namespace stoker::curm {

Status Parix::update(const Update& update) {
  const Chunk data = update.chunk;
  const NodeId leader = node(data);
  const uint64_t seq = next_seq(), bytes = update.value.size();
  const auto first = touched_[data].gaps(update.offset, bytes);
  Round in = enter(update, leader);
  Slot old;
  if (!first.empty()) {
    std::vector<Step::Part> parts;
    parts.reserve(first.size());
    for (const auto& gap : first) parts.push_back({false, gap.at, gap.size(), {}});
    old = in.errands[0].gather(data, std::move(parts));
  }
  if (!safe()) in.errands[0].write(data, update.offset, update.value);
  STOKER_TRY(run(in));

  Record entry = record(Record::Kind::value, seq, data, update.offset, update.value);
  const Record intent = entry;
  Record original = record(Record::Kind::original, seq, data, 0, {});
  original.ranges.clear();
  uint64_t begin = 0, original_bytes = 0;
  for (const auto& gap : first) {
    original.ranges.push_back({gap.at, old->slice(begin, gap.size())});
    begin += gap.size();
  }
  original_bytes = begin;
  if (safe()) entry.before = original.ranges;
  Round out;
  out.from = leader;
  std::vector<PlaceSlot> places;
  places.reserve(static_cast<size_t>(m()));
  for (int j = 0; j < m(); ++j)
    places.push_back(
        log(out.to(node(geometry().parity(data.stripe, j)), entry.payload_bytes()), entry));
  PlaceSlot mine;
  if (safe()) mine = log(out.to(leader), intent);
  STOKER_TRY(run(out));
  for (int j = 0; j < m(); ++j)
    index(geometry().parity(data.stripe, j), *places[static_cast<size_t>(j)], entry);

  if (!safe() && !first.empty()) {  // what the parities asked for
    Round more;
    more.from = leader;
    places.clear();
    for (int j = 0; j < m(); ++j)
      places.push_back(
          more.to(node(geometry().parity(data.stripe, j)), original_bytes).append(original));
    STOKER_TRY(run(more));
    for (int j = 0; j < m(); ++j)
      index(geometry().parity(data.stripe, j), *places[static_cast<size_t>(j)], original);
  }
  touched_[data].put(update.offset, bytes, true);
  count_logged(data.stripe, bytes + original_bytes);
  STOKER_TRY(acknowledge(leader));
  if (!safe()) return {};
  intents_[data].push_back(*mine);
  return overwrite(update);
}

void Parix::index(const Chunk& parity, const LogPlace& place, const Record& record) {
  Side& side = sides_[parity];
  Known& known = side.known[record.chunk.position];
  side.places.push_back(place);
  uint64_t begin = 0;
  for (const Record::Range& range : record.ranges) {
    (record.kind == Record::Kind::original ? known.original : known.newest)
        .put(range.offset, range.value.size(), {place, begin});
    begin += range.value.size();
  }
  for (const Record::Range& range : record.before) {
    known.original.put(range.offset, range.value.size(), {place, begin});
    begin += range.value.size();
  }
}

Parix::Changed Parix::read_differences(Errand& errand, const Chunk& parity,
                                       const Known& known) const {
  Changed reads;
  const auto parts_of = [](const std::vector<RangeMap<Where>::Piece>& pieces) {
    std::vector<Step::Part> parts;
    parts.reserve(pieces.size());
    for (const auto& piece : pieces)
      parts.push_back(
          {true, piece.value.begin + piece.at - piece.origin, piece.size(), piece.value.place});
    return parts;
  };
  for (const auto& range : known.newest.joined()) {
    const Slot newest =
        errand.gather(parity, parts_of(known.newest.within(range.at, range.size())));
    const Slot original =
        errand.gather(parity, parts_of(known.original.within(range.at, range.size())));
    reads.emplace_back(
        range.at, errand.derive([newest, original] { return difference(*newest, *original); }));
  }
  return reads;
}

PlaceSlot Parix::fold_parity(Errand& errand, const Chunk& parity, const std::map<int, Known>& batch,
                             uint64_t fold_seq) {
  RangeMap<int> dirty;
  std::map<int, Changed> differences;
  for (const auto& [data, known] : batch) {
    differences[data] = read_differences(errand, parity, known);
    for (const auto& range : known.newest.joined()) dirty.put(range.at, range.size(), 0);
  }
  Changed changed;
  for (const auto& range : dirty.joined()) {
    const Slot was = errand.read(parity, range.at, range.size());
    changed.emplace_back(
        range.at, errand.derive([this, was, differences, at = range.at, j = parity.position - k()] {
          Value now = *was;
          for (const auto& [data, reads] : differences) {
            for (const auto& [from, difference] : reads)
              now = advanced(code(), data, j, now, at, *difference, from);
          }
          return now;
        }));
  }
  PlaceSlot staged;
  if (safe()) staged = append_stage(errand, parity, fold_seq, changed);
  for (const auto& [at, value] : changed) errand.write(parity, at, value);
  return staged;
}

Status Parix::fold(uint64_t stripe) {
  const uint64_t fold_seq = next_seq();
  std::vector<LogPlace> done;
  std::vector<PlaceSlot> stages;
  Round round;
  round.background = true;
  for (int j = 0; j < m(); ++j) {
    const Chunk parity = geometry().parity(stripe, j);
    const auto side = sides_.find(parity);
    if (side == sides_.end()) continue;
    done.insert(done.end(), side->second.places.begin(), side->second.places.end());
    Errand& errand = round.to(node(parity));
    if (!safe()) {
      for (const auto& [data, known] : side->second.known)
        fold_parity(errand, parity, {{data, known}}, fold_seq);
      continue;
    }
    stages.push_back(fold_parity(errand, parity, side->second.known, fold_seq));
    flush_and_mark(errand, parity, fold_seq);
  }
  fold_overwritten(round, stripe, fold_seq, intents_, done);
  STOKER_TRY(run(round));
  for (const PlaceSlot& stage : stages) done.push_back(*stage);
  for (int j = 0; j < m(); ++j) sides_.erase(geometry().parity(stripe, j));
  for (int position = 0; position < k(); ++position) touched_.erase({stripe, position});
  count_folded(stripe);
  return release(done);
}

Status Parix::recover(const std::set<NodeId>& replaced) {
  STOKER_ASSIGN(Recovered found, settle(replaced));
  STOKER_TRY(roll_forward_stages(found));
  std::set<uint64_t> stripes;
  for (const Survivor& survivor : found.updates) {
    const Record& entry = survivor.record;
    const Chunk mine = chunk_on(entry.chunk.stripe, survivor.node);
    stripes.insert(mine.stripe);
    if (entry.seq <= found.folded_of(mine)) continue;
    if (mine.position >= k()) {
      index(mine, survivor.place, entry);
      continue;
    }
    STOKER_TRY(overwrite({mine, entry.ranges[0].offset, entry.ranges[0].value}));
    intents_[mine].push_back(survivor.place);
  }
  for (const auto& [parity, side] : sides_) {
    for (const auto& [data, known] : side.known) {
      for (const auto& range : known.newest.joined()) {
        if (!known.original.gaps(range.at, range.size()).empty())
          return fail(Code::corruption,
                      "the log of a parity of stripe {} lacks what was before an update: rebuild "
                      "this node from the others",
                      parity.stripe);
      }
    }
  }
  for (const uint64_t stripe : stripes) STOKER_TRY(fold(stripe));
  STOKER_TRY(rebuild_bases(replaced, found));
  return release(found.places);
}

Slot Parix::logical(Errand& errand, const Chunk& chunk) {
  Slot base = Scheme::logical(errand, chunk);
  const auto side = sides_.find(chunk);
  if (side == sides_.end()) return base;
  std::map<int, Changed> differences;
  for (const auto& [data, known] : side->second.known)
    differences[data] = read_differences(errand, chunk, known);
  return errand.derive([this, base, differences, j = chunk.position - k()] {
    Value now = *base;
    for (const auto& [data, reads] : differences) {
      for (const auto& [from, difference] : reads)
        now = advanced(code(), data, j, now, 0, *difference, from);
    }
    return now;
  });
}

std::function<void()> Parix::rebuilt(const Chunk& lost, Errand& /*errand*/) {
  return [this, lost] {
    sides_.erase(lost);
    intents_.erase(lost);
  };
}

}  // namespace stoker::curm
