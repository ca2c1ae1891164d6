#include "curm/fl.h"

#include <algorithm>

namespace stoker::curm {

Slot FullLogging::read_newest(Errand& errand, const Chunk& chunk, uint64_t offset,
                              uint64_t bytes) const {
  const auto found = logged_.find(chunk);
  if (found == logged_.end()) return errand.read(chunk, offset, bytes);
  std::vector<std::pair<uint64_t, Step::Part>> parts;
  for (const auto& piece : found->second.newest.within(offset, bytes))
    parts.push_back({piece.at, {true, piece.at - piece.origin, piece.size(), piece.value}});
  for (const auto& gap : found->second.newest.gaps(offset, bytes))
    parts.push_back({gap.at, {false, gap.at, gap.size(), {}}});
  std::sort(parts.begin(), parts.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Step::Part> ordered;
  ordered.reserve(parts.size());
  for (const auto& [at, part] : parts) ordered.push_back(part);
  return errand.gather(chunk, std::move(ordered));
}

void FullLogging::index(const Chunk& chunk, uint64_t offset, uint64_t bytes,
                        const LogPlace& place) {
  Logged& logged = logged_[chunk];
  logged.newest.put(offset, bytes, place);
  logged.all.emplace_back(place, bytes);
}

Status FullLogging::update(const Update& update) {
  const Chunk data = update.chunk;
  const NodeId leader = node(data);
  const uint64_t seq = next_seq(), bytes = update.value.size();
  const Record entry = record(Record::Kind::value, seq, data, update.offset, update.value);
  Round in = enter(update, leader);
  const Slot old = read_newest(in.errands[0], data, update.offset, bytes);
  PlaceSlot place;
  if (!safe()) place = in.errands[0].append(entry);
  STOKER_TRY(run(in));

  Round out;
  out.from = leader;
  const std::vector<PlaceSlot> sent =
      send_delta(out, data, update.offset, difference(*old, update.value), seq);
  if (safe()) place = log(out.to(leader), entry);
  STOKER_TRY(run(out));
  index_delta(data, update.offset, bytes, seq, sent);
  index(data, update.offset, bytes, *place);
  return acknowledge(leader);
}

Result<Value> FullLogging::read(const Chunk& chunk, uint64_t offset, uint64_t bytes) {
  Round round;
  const Slot value = read_newest(round.to(node(chunk)), chunk, offset, bytes);
  STOKER_TRY(run(round));
  return *value;
}

Status FullLogging::fold_data(uint64_t stripe, uint64_t fold_seq) {
  Round round;
  round.background = true;
  std::vector<LogPlace> done;
  for (int position = 0; position < k(); ++position) {
    const Chunk chunk{stripe, position};
    const auto found = logged_.find(chunk);
    if (found == logged_.end()) continue;
    Errand& errand = round.to(node(chunk));
    std::vector<Step::Part> parts;
    std::map<LogPlace, uint64_t> begins;
    uint64_t begin = 0;
    for (const auto& [place, bytes] : found->second.all) {
      parts.push_back({true, 0, bytes, place});
      begins[place] = begin;
      begin += bytes;
      done.push_back(place);
    }
    const Slot log = errand.gather(chunk, std::move(parts));
    for (const auto& piece : found->second.newest.all()) {
      errand.write(chunk, piece.at,
                   errand.derive([log, from = begins[piece.value] + piece.at - piece.origin,
                                  bytes = piece.size()] { return log->slice(from, bytes); }));
    }
    // The log holds the bytes themselves: overwriting twice is harmless, and nothing need be
    // staged.
    if (safe()) flush_and_mark(errand, chunk, fold_seq);
  }
  STOKER_TRY(run(round));
  for (int position = 0; position < k(); ++position) logged_.erase({stripe, position});
  return release(done);
}

Status FullLogging::redo(const Survivor& survivor, bool alive) {
  const Record::Range& range = survivor.record.ranges[0];
  if (alive) index(survivor.record.chunk, range.offset, range.value.size(), survivor.place);
  return {};
}

Slot FullLogging::logical(Errand& errand, const Chunk& chunk) {
  return chunk.position < k() ? read_newest(errand, chunk, 0, geometry().chunk_bytes)
                              : DeltaLog::logical(errand, chunk);
}

std::function<void()> FullLogging::rebuilt(const Chunk& lost, Errand& errand) {
  return [this, lost, others = DeltaLog::rebuilt(lost, errand)] {
    logged_.erase(lost);
    others();
  };
}

}  // namespace stoker::curm
