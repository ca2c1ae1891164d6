#include "curm/fold.h"

#include <bit>
#include <set>
#include <tuple>

#include "stoker/base/check.h"

namespace stoker::curm {

Status Fold::read_data(const std::function<bool(int)>& reconstructs, bool background) {
  std::set<uint64_t> cuts;
  for (const auto& [position, ranges] : newest_) {
    for (const auto& range : ranges.joined()) cuts.insert({range.at, range.end});
  }
  std::map<int, RangeMap<int>> wanted;
  for (auto cut = cuts.begin(); cut != cuts.end() && std::next(cut) != cuts.end(); ++cut) {
    const uint64_t at = *cut, bytes = *std::next(cut) - at;
    uint32_t dirty = 0;
    for (const auto& [position, ranges] : newest_)
      dirty |= ranges.within(at, bytes).empty() ? 0U : 1U << position;
    if (dirty == 0) continue;
    const bool columns = reconstructs(std::popcount(dirty));
    (columns ? by_columns_ : by_delta_).put(at, bytes, 0);
    for (int position = 0; position < geometry_.k; ++position) {
      const bool is_dirty = (dirty >> position & 1) != 0;
      if (is_dirty != columns) wanted[position].put(at, bytes, 0);
    }
  }
  Round round;
  round.background = background;
  std::vector<std::pair<int, std::pair<uint64_t, Slot>>> slots;
  for (const auto& [position, ranges] : wanted) {
    const Chunk chunk{stripe_, position};
    Errand& errand = round.to(geometry_.node(chunk));
    for (const auto& range : ranges.joined(gap_max_))
      slots.push_back({position, {range.at, errand.read(chunk, range.at, range.size())}});
    for (const auto& range : ranges.joined()) errand.answered += range.size();
  }
  if (!round.errands.empty()) STOKER_TRY(substrate_.run(round));
  for (const auto& [position, read] : slots)
    base_[position].put(read.first, read.second->size(), *read.second);
  return {};
}

// The newest bytes of a data chunk in a range of which each byte is dirty or was read.
Value Fold::newest(int position, uint64_t at, uint64_t bytes) const {
  std::vector<RangeMap<Value>::Piece> pieces;
  if (const auto base = base_.find(position); base != base_.end())
    pieces = base->second.within(at, bytes);
  if (const auto dirty = newest_.find(position); dirty != newest_.end()) {
    for (auto& piece : dirty->second.within(at, bytes)) pieces.push_back(std::move(piece));
  }
  Value value;
  RangeMap<int> covered;
  for (const auto& piece : pieces) {
    const Value part = piece.value.slice(piece.at - piece.origin, piece.size());
    if (value.size() == 0)
      value = part.has_bytes() ? Value::of(std::vector<std::byte>(bytes)) : Value::sized(bytes);
    value = part.size() == bytes ? part : overlaid(value, piece.at - at, part);
    covered.put(piece.at, piece.size(), 0);
  }
  STOKER_CHECK(covered.gaps(at, bytes).empty());
  return value;
}

Fold::Ranges Fold::parity(Errand& errand, int index) const {
  const Chunk chunk = geometry_.parity(stripe_, index);
  Ranges changed;
  RangeMap<Slot> read;
  for (const auto& range : by_delta_.joined(gap_max_))
    read.put(range.at, range.size(), errand.read(chunk, range.at, range.size()));
  for (const auto& range : by_delta_.joined()) {
    std::vector<std::tuple<int, uint64_t, Value>> deltas;  // position, offset, old ^ new
    for (const auto& [position, ranges] : newest_) {
      for (const auto& piece : ranges.within(range.at, range.size())) {
        for (const auto& old : base_.at(position).within(piece.at, piece.size())) {
          const Value now = piece.value.slice(old.at - piece.origin, old.size());
          deltas.emplace_back(position, old.at,
                              difference(old.value.slice(old.at - old.origin, old.size()), now));
          errand.sent += now.size();
        }
      }
    }
    const auto was = read.within(range.at, range.size()).at(0);
    changed.emplace_back(range.at, errand.derive([this, was, deltas, index, at = range.at] {
      Value now = was.value->slice(at - was.origin, was.size());
      for (const auto& [position, from, delta] : deltas)
        now = advanced(code_, position, index, now, at, delta, from);
      return now;
    }));
  }
  for (const auto& range : by_columns_.joined()) {
    std::vector<Value> columns;
    columns.reserve(geometry_.chunks());
    for (int position = 0; position < geometry_.k; ++position)
      columns.push_back(newest(position, range.at, range.size()));
    columns.resize(geometry_.chunks());
    changed.emplace_back(range.at,
                         std::make_shared<Value>(decoded(code_, columns, chunk.position)));
    errand.sent += range.size();
  }
  return changed;
}

std::map<Chunk, Fold::Ranges> Fold::data() const {
  std::map<Chunk, Ranges> changed;
  for (const auto& [position, ranges] : newest_) {
    for (const auto& range : ranges.joined())
      changed[{stripe_, position}].emplace_back(
          range.at, std::make_shared<Value>(newest(position, range.at, range.size())));
  }
  return changed;
}

}  // namespace stoker::curm
