// What recovery has in common. Runs alone, before the scheme serves.
//
// The rule that settles an update: it counts where each node of its group (its data chunk's and all
// parities') that is still there holds its record, or where a release said that everything up to it
// was settled; else it is dropped. In-place writes begin only when all records are durable, so a
// dropped update changed no base; an acknowledged one is on all nodes, so it is never dropped. The
// decision is made durable on all nodes, with a new epoch, before anything is changed by it: it
// stays so, whoever is lost next.
#include <algorithm>

#include "curm/scheme.h"

namespace stoker::curm {
namespace {

bool is_update(const Record& record) { return record.kind <= Record::Kind::parity; }

}  // namespace

uint64_t Scheme::Recovered::folded_of(const Chunk& chunk) const {
  const auto found = folded.find(chunk);
  return found == folded.end() ? 0 : found->second;
}

Result<Scheme::Recovered> Scheme::settle(const std::set<NodeId>& replaced) {
  Recovered found;
  std::map<uint64_t, std::set<NodeId>> holders;
  std::set<uint64_t> dropped;
  uint64_t watermark = 0;
  for (NodeId id = 0; id < geometry().nodes; ++id) {
    if (replaced.count(id) != 0) continue;
    STOKER_ASSIGN(NodeState state, setup_.substrate->scan(id));
    watermark = std::max(watermark, state.settled);
    found.folded.merge(state.folded);
    for (auto& [place, entry] : state.records) {
      numbers_->epoch = std::max(numbers_->epoch, entry.epoch);
      numbers_->seq = std::max(numbers_->seq, entry.seq);
      dropped.insert(entry.dropped.begin(), entry.dropped.end());
      if (is_update(entry)) holders[entry.seq].insert(id);
      if (entry.kind == Record::Kind::epoch) continue;
      found.places.push_back(place);
      (is_update(entry) ? found.updates : found.folds).push_back({id, place, std::move(entry)});
    }
  }
  numbers_->seq = std::max(numbers_->seq, watermark);
  for (const auto& [chunk, seq] : found.folded) numbers_->seq = std::max(numbers_->seq, seq);
  for (const Survivor& survivor : found.updates) {
    const Record& entry = survivor.record;
    if (entry.seq <= watermark) continue;
    std::vector<Chunk> group = {entry.chunk};
    for (int j = 0; j < m(); ++j) group.push_back(geometry().parity(entry.chunk.stripe, j));
    const bool all = std::all_of(group.begin(), group.end(), [&](const Chunk& chunk) {
      return replaced.count(node(chunk)) != 0 || holders[entry.seq].count(node(chunk)) != 0;
    });
    if (!all) dropped.insert(entry.seq);
  }
  const auto is_dropped = [&](const Survivor& survivor) {
    return dropped.count(survivor.record.seq) != 0;
  };
  found.updates.erase(std::remove_if(found.updates.begin(), found.updates.end(), is_dropped),
                      found.updates.end());
  const auto earlier = [](const Survivor& a, const Survivor& b) {
    return a.record.seq < b.record.seq;
  };
  // No record, no need to say that it is dropped: what can come back was found.
  std::erase_if(dropped, [&](uint64_t seq) { return holders.count(seq) == 0; });
  std::stable_sort(found.updates.begin(), found.updates.end(), earlier);
  std::stable_sort(found.folds.begin(), found.folds.end(), earlier);

  ++numbers_->epoch;
  Record epoch{Record::Kind::epoch,
               numbers_->epoch,
               ++numbers_->seq,
               {},
               {},
               {},
               {dropped.begin(), dropped.end()}};
  Round round;
  for (NodeId id = 0; id < geometry().nodes; ++id) {
    Errand& errand = round.to(id);
    errand.append(epoch);
    errand.flush();
  }
  STOKER_TRY(run(round));
  return found;
}

Status Scheme::roll_forward(const Survivor& stage) {
  Round round;
  Errand& errand = round.to(stage.node);
  for (const Record::Range& range : stage.record.ranges)
    errand.write(stage.record.chunk, range.offset, range.value);
  flush_and_mark(errand, stage.record.chunk, stage.record.seq);
  return run(round);
}

Status Scheme::roll_forward_stages(Recovered& recovered) {
  for (const Survivor& stage : recovered.folds) {
    if (stage.record.seq <= recovered.folded_of(stage.record.chunk)) continue;
    STOKER_TRY(roll_forward(stage));
    recovered.folded[stage.record.chunk] = stage.record.seq;
  }
  return {};
}

Status Scheme::rebuild_bases(const std::set<NodeId>& replaced, const Recovered& recovered) {
  const uint64_t bytes = geometry().chunk_bytes;
  for (uint64_t stripe = 0; stripe < geometry().stripes; ++stripe) {
    if (setup_.owns && !setup_.owns(stripe)) continue;
    std::vector<Slot> slots(geometry().chunks());
    std::vector<int> lost;
    uint64_t folded = 0;
    Round gather;
    for (int position = 0; position < k() + m(); ++position) {
      const Chunk chunk{stripe, position};
      if (replaced.count(node(chunk)) != 0) {
        lost.push_back(position);
      } else {
        slots[static_cast<size_t>(position)] = gather.to(node(chunk)).read(chunk, 0, bytes);
        folded = std::max(folded, recovered.folded_of(chunk));
      }
    }
    if (lost.empty()) continue;
    STOKER_TRY(run(gather));
    std::vector<Value> present;
    present.reserve(slots.size());
    for (const Slot& slot : slots) present.push_back(slot ? *slot : Value());
    Round place;
    for (const int position : lost) {
      const Chunk chunk{stripe, position};
      Errand& errand = place.to(node(chunk));
      errand.write(chunk, 0, decoded(code(), present, position));
      errand.mark(chunk, folded);
      errand.flush();
    }
    STOKER_TRY(run(place));
  }
  return {};
}

}  // namespace stoker::curm
