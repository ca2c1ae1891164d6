#include "curm/scheme.h"

#include <algorithm>
#include <string>

#include "stoker/base/check.h"

namespace stoker::curm {

Status Scheme::update_together(const std::vector<Update>& pieces) {
  for (const Update& piece : pieces) STOKER_TRY(update(piece));
  return {};
}

Result<Value> Scheme::read(const Chunk& chunk, uint64_t offset, uint64_t bytes) {
  Round round;
  const Slot value = round.to(node(chunk)).read(chunk, offset, bytes);
  STOKER_TRY(run(round));
  return *value;
}

Chunk Scheme::chunk_on(uint64_t stripe, NodeId wanted) const {
  for (int position = 0; position < k() + m(); ++position) {
    if (node({stripe, position}) == wanted) return {stripe, position};
  }
  STOKER_CHECK(false);
  return {};
}

Record Scheme::record(Record::Kind kind, uint64_t seq, const Chunk& chunk, uint64_t offset,
                      Value value) const {
  return {kind, numbers_->epoch, seq, chunk, {{offset, std::move(value)}}, {}, {}};
}

Round Scheme::enter(const Update& update, NodeId leader) {
  Round round;
  round.kind = Round::Kind::entry;
  round.to(leader, update.value.size());
  return round;
}

Status Scheme::acknowledge(NodeId leader) {
  Round round;
  round.from = leader;
  round.kind = Round::Kind::acknowledge;
  return run(round);
}

PlaceSlot Scheme::log(Errand& errand, Record record) const {
  PlaceSlot place = errand.append(std::move(record));
  if (safe()) errand.flush();
  return place;
}

PlaceSlot Scheme::append_stage(Errand& errand, const Chunk& chunk, uint64_t fold_seq,
                               const Changed& changed) const {
  PlaceSlot place = errand.append_when_ready(
      [stage = record(Record::Kind::stage, fold_seq, chunk, 0, {}), changed]() mutable {
        stage.ranges.clear();
        for (const auto& [at, value] : changed) stage.ranges.push_back({at, *value});
        return stage;
      });
  errand.flush();
  return place;
}

Status Scheme::overwrite(const Update& update) {
  Round round;
  round.from = node(update.chunk);
  round.to(round.from).write(update.chunk, update.offset, update.value);
  return run(round);
}

void Scheme::fold_overwritten(Round& round, uint64_t stripe, uint64_t fold_seq, Intents& intents,
                              std::vector<LogPlace>& done) const {
  for (auto each = intents.lower_bound({stripe, 0});
       each != intents.end() && each->first.stripe == stripe; each = intents.erase(each)) {
    flush_and_mark(round.to(node(each->first)), each->first, fold_seq);
    done.insert(done.end(), each->second.begin(), each->second.end());
  }
}

void Scheme::flush_and_mark(Errand& errand, const Chunk& chunk, uint64_t fold_seq) {
  errand.flush();
  errand.mark(chunk, fold_seq);
  errand.flush();
}

Status Scheme::release(const std::vector<LogPlace>& places) {
  std::map<NodeId, std::vector<LogPlace>> by_node;
  for (const LogPlace& place : places) by_node[place.node].push_back(place);
  Round round;
  round.background = true;
  for (auto& [id, mine] : by_node) round.to(id).release(std::move(mine), numbers_->seq);
  return run(round);
}

Slot Scheme::logical(Errand& errand, const Chunk& chunk) {
  return errand.read(chunk, 0, geometry().chunk_bytes);
}

Result<Value> Scheme::rebuild(const Chunk& lost) {
  const bool room = geometry().nodes > k() + m();
  const NodeId spare = room ? node({lost.stripe, k() + m()}) : node(lost);
  std::vector<Slot> slots(geometry().chunks());
  Round gather;
  gather.from = spare;
  gather.background = true;
  int taken = 0;
  for (int position = 0; position < k() + m() && taken < k(); ++position) {
    if (position == lost.position) continue;
    Errand& errand = gather.to(node({lost.stripe, position}));
    slots[static_cast<size_t>(position)] = logical(errand, {lost.stripe, position});
    errand.answered = geometry().chunk_bytes;
    ++taken;
  }
  pick_up(lost, gather);
  STOKER_TRY(run(gather));
  std::vector<Value> present;
  present.reserve(slots.size());
  for (const Slot& slot : slots) present.push_back(slot ? *slot : Value());
  Value whole = decoded(code(), present, lost.position);
  Round place;
  place.from = spare;
  place.background = true;
  Errand& errand = place.to(spare);
  errand.write(lost, 0, whole);
  const auto done = rebuilt(lost, errand);
  errand.flush();
  STOKER_TRY(run(place));
  done();
  return whole;
}

void Scheme::count_logged(uint64_t stripe, uint64_t bytes) {
  Dirt& dirt = dirt_[stripe];
  by_touch_.erase(dirt.touched);
  dirt.bytes += bytes;
  dirt.touched = ++touches_;
  by_touch_[dirt.touched] = stripe;
  logged_bytes_ += bytes;
}

void Scheme::count_dead(uint64_t stripe, uint64_t bytes) {
  dirt_[stripe].bytes -= bytes;
  logged_bytes_ -= bytes;
}

void Scheme::count_folded(uint64_t stripe) {
  const auto dirt = dirt_.find(stripe);
  if (dirt == dirt_.end()) return;
  logged_bytes_ -= dirt->second.bytes;
  by_touch_.erase(dirt->second.touched);
  dirt_.erase(dirt);
}

std::vector<uint64_t> Scheme::pending() const {
  std::vector<uint64_t> stripes;
  stripes.reserve(by_touch_.size());
  for (const auto& [touched, stripe] : by_touch_) stripes.push_back(stripe);
  return stripes;
}

Status Scheme::fold_all() {
  for (const uint64_t stripe : pending()) STOKER_TRY(fold(stripe));
  return {};
}

std::vector<uint64_t> Scheme::make_room(uint64_t /*logged_bytes_max*/) const { return pending(); }

uint64_t Scheme::logged_bytes(uint64_t stripe) const {
  const auto dirt = dirt_.find(stripe);
  return dirt == dirt_.end() ? 0 : dirt->second.bytes;
}

}  // namespace stoker::curm
