#include "curm/pl.h"

#include <algorithm>

namespace stoker::curm {

Status ParityLogging::update(const Update& update) {
  const Chunk data = update.chunk;
  const NodeId leader = node(data);
  const uint64_t seq = next_seq(), bytes = update.value.size();
  Round in = enter(update, leader);
  const Slot old = in.errands[0].read(data, update.offset, bytes);
  if (!safe()) in.errands[0].write(data, update.offset, update.value);
  STOKER_TRY(run(in));

  Round out;
  out.from = leader;
  const std::vector<PlaceSlot> sent =
      send_delta(out, data, update.offset, difference(*old, update.value), seq);
  PlaceSlot intent;
  if (safe())
    intent =
        log(out.to(leader), record(Record::Kind::value, seq, data, update.offset, update.value));
  STOKER_TRY(run(out));
  index_delta(data, update.offset, bytes, seq, sent);
  STOKER_TRY(acknowledge(leader));
  if (!safe()) return {};
  intents_[data].push_back(*intent);
  return overwrite(update);
}

// The chunks hold the newest bytes already: they are made durable, then their intents go.
Status ParityLogging::fold_data(uint64_t stripe, uint64_t fold_seq) {
  if (!safe()) return {};
  Round round;
  round.background = true;
  std::vector<LogPlace> done;
  fold_overwritten(round, stripe, fold_seq, intents_, done);
  STOKER_TRY(run(round));
  return release(done);
}

Status ParityLogging::redo(const Survivor& survivor, bool alive) {
  if (!alive) return {};
  const Record::Range& range = survivor.record.ranges[0];
  STOKER_TRY(overwrite({survivor.record.chunk, range.offset, range.value}));
  intents_[survivor.record.chunk].push_back(survivor.place);
  return {};
}

std::function<void()> ParityLogging::rebuilt(const Chunk& lost, Errand& errand) {
  return [this, lost, others = DeltaLog::rebuilt(lost, errand)] {
    intents_.erase(lost);
    others();
  };
}

Status ReservedParityLogging::update(const Update& update) {
  const uint64_t room = setup().reserved_bytes;
  for (uint64_t at = 0; at < update.value.size(); at += room) {
    const uint64_t bytes = std::min(room, update.value.size() - at);
    if (reserved_used(geometry().parity(update.chunk.stripe, 0)) + bytes > room)
      STOKER_TRY(fold(update.chunk.stripe));
    STOKER_TRY(
        ParityLogging::update({update.chunk, update.offset + at, update.value.slice(at, bytes)}));
  }
  return {};
}

}  // namespace stoker::curm
