#include "curm/fo.h"

namespace stoker::curm {

Status FullOverwrite::update(const Update& update) {
  const Chunk data = update.chunk;
  const NodeId leader = node(data);
  const uint64_t seq = next_seq(), bytes = update.value.size();
  Round in = enter(update, leader);
  const Slot old = in.errands[0].read(data, update.offset, bytes);
  if (!safe()) in.errands[0].write(data, update.offset, update.value);
  STOKER_TRY(run(in));

  const Value delta = difference(*old, update.value);
  Round out;
  out.from = leader;
  std::vector<std::pair<Chunk, Slot>> overwrites = {{data, std::make_shared<Value>(update.value)}};
  std::map<Chunk, PlaceSlot> places;
  for (int j = 0; j < m(); ++j) {
    const Chunk parity = geometry().parity(data.stripe, j);
    Errand& errand = out.to(node(parity), bytes);
    const Slot was = errand.read(parity, update.offset, bytes);
    const Slot now = errand.derive([this, was, delta, data, j, at = update.offset] {
      return advanced(code(), data.position, j, *was, at, delta, at);
    });
    overwrites.emplace_back(parity, now);
    if (safe()) {
      places[parity] = errand.append_when_ready(
          [intent = record(Record::Kind::parity, seq, data, update.offset, {}), now]() mutable {
            intent.ranges[0].value = *now;
            return intent;
          });
      errand.flush();
    } else {
      errand.write(parity, update.offset, now);
    }
  }
  if (safe())
    places[data] =
        log(out.to(leader), record(Record::Kind::value, seq, data, update.offset, update.value));
  STOKER_TRY(run(out));
  STOKER_TRY(acknowledge(leader));
  if (!safe()) return {};

  Round place;
  place.from = leader;
  for (const auto& [chunk, value] : overwrites)
    place.to(node(chunk)).write(chunk, update.offset, value);
  STOKER_TRY(run(place));
  for (const auto& [chunk, intent] : places) intents_[chunk].push_back(*intent);
  count_logged(data.stripe, bytes);
  return {};
}

Status FullOverwrite::fold(uint64_t stripe) {
  Round round;
  round.background = true;
  std::vector<LogPlace> done;
  fold_overwritten(round, stripe, next_seq(), intents_, done);
  STOKER_TRY(run(round));
  count_folded(stripe);
  return release(done);
}

Status FullOverwrite::recover(const std::set<NodeId>& replaced) {
  STOKER_ASSIGN(Recovered found, settle(replaced));
  // Overwriting again, in order, is harmless: an intent holds the bytes themselves.
  for (const Survivor& survivor : found.updates) {
    const Chunk mine = chunk_on(survivor.record.chunk.stripe, survivor.node);
    if (survivor.record.seq <= found.folded_of(mine)) continue;
    Round round;
    Errand& errand = round.to(survivor.node);
    for (const Record::Range& range : survivor.record.ranges)
      errand.write(mine, range.offset, range.value);
    STOKER_TRY(run(round));
    intents_[mine].push_back(survivor.place);
  }
  STOKER_TRY(rebuild_bases(replaced, found));
  std::set<uint64_t> stripes;
  for (const auto& [chunk, places] : intents_) stripes.insert(chunk.stripe);
  for (const uint64_t stripe : stripes) STOKER_TRY(fold(stripe));
  return release(found.places);
}

// Its intents went with it; the new base is flushed.
std::function<void()> FullOverwrite::rebuilt(const Chunk& lost, Errand& /*errand*/) {
  return [this, lost] { intents_.erase(lost); };
}

}  // namespace stoker::curm
