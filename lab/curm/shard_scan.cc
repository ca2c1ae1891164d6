// What a node's log holds when it is opened.
//
// Frames say up to where the log was durable when they were made. What is missing below that was
// damaged, and the node counts as lost; what is missing behind it may just as well never have been
// written.
#include <algorithm>

#include "curm/shard_log.h"
#include "stoker/base/check.h"

namespace stoker::curm {
namespace {

struct Frame {
  LogRecord record;
  FrameContent content;
};

// The intact frame at `offset` that says of itself that it belongs there.
std::optional<Frame> frame_at(const ShardLayout& layout, const StoreId& id, LogSource& source,
                              FramePlace place, uint64_t offset) {
  place.offset = offset;
  const auto found = read_frame(source, id, offset);
  STOKER_CHECK(found.has_value());  // memory does not fail
  if (!*found) return {};
  auto content = decode_frame(layout, (*found)->payload);
  if (!content || !(content->head.place == place)) return {};
  return Frame{**found, std::move(*content)};
}

}  // namespace

struct ShardLog::Found {
  struct Piece {
    LogEnd at;
    size_t segment = 0;
    FrameContent content;
  };
  std::vector<Piece> frames;
  std::map<uint64_t, uint64_t> ends;    // of what stands without a gap, by count
  std::map<uint64_t, uint64_t> claims;  // how far a segment was durable, by count
  uint64_t settled = 0;
  uint32_t begun = 0;  // segments, say the frames
  std::string damage;
  void claim(const FrameHead& head) {
    begun = std::max(begun, head.segments);
    claims[head.durable.count] = std::max(claims[head.durable.count], head.durable.offset);
    settled = std::max(settled, head.settled);
  }
};

// Segments are made one after the other, each begun before the next is made: none is missing but
// the last.
Status ShardLog::load_segment(size_t index, Found& found) {
  Segment& segment = segments_[index];
  if (segment.file < 0) {
    found.damage = "segment " + std::to_string(index) + " of its log is gone or cut short";
    return {};
  }
  AlignedBytes bytes(layout_.segment_bytes);
  IoBatch batch(loop_, Priority::demand);
  batch.read(segment.file, 0, bytes.slice());
  STOKER_TRY(batch.run());
  MemoryLogSource source(bytes.span());
  const FramePlace place{node_, false, static_cast<uint32_t>(index), 0};
  std::optional<Frame> begin;
  for (const uint64_t at : {uint64_t{0}, kShardBlock}) {
    auto each = frame_at(layout_, id_, source, place, at);
    if (each && each->content.records.empty() &&
        (!begin || each->record.generation > begin->record.generation))
      begin = std::move(each);
  }
  const uint64_t generation = begin ? begin->record.generation : 0, count = generation >> 32;
  LogCursor cursor{kFramesAt, 1, begin ? begin->record.crc : 0};
  bool whole = true;
  for (uint64_t at = kFramesAt; at + kShardBlock <= bytes.size();) {
    auto each = frame_at(layout_, id_, source, place, at);
    if (!each || each->record.generation < generation) {
      at += kShardBlock;
      continue;
    }
    if (each->record.generation > generation) {
      found.damage = "the beginning of segment " + std::to_string(index) + " of its log is damaged";
      return {};
    }
    whole = whole && at == cursor.offset && each->record.follows(cursor);
    if (whole) cursor = each->record.next();
    found.claim(each->content.head);
    at = each->record.end;
    found.frames.push_back({{count, each->record.offset}, index, std::move(each->content)});
  }
  if (!begin) return {};
  found.claim(begin->content.head);
  found.ends[count] = cursor.offset;
  segment = {segment.file, count, bytes.size(), 0, begin->record.offset};
  next_count_ = std::max(next_count_, count + 1);
  return {};
}

void ShardLog::take(FrameContent content, FileId file, uint64_t frame_at, NodeState& state) {
  for (FrameRecord& each : content.records) {
    const uint64_t id = next_id_++;
    StoredRecord stored{
        content.head.place,         file,
        frame_at + each.payload_at, each.record.payload_bytes() - 8 * each.record.dropped.size(),
        std::move(each.crcs),       each.record.kind,
        each.record.scheme};
    if (each.record.kind == Record::Kind::epoch) epochs_[each.record.scheme].push_back(id);
    index(id, std::move(stored));
    state.records.emplace_back(LogPlace{node_, id, content.head.place.reserve},
                               std::move(each.record));
  }
}

// Appends to a reserve are flushed one by one, so there are no gaps but by damage; except that its
// first frame may be torn by the one that begins it anew, when all that it held is dead.
Status ShardLog::load_reserve(const Chunk& parity, NodeState& state, std::string& damage) {
  AlignedBytes bytes(layout_.reserve_bytes);
  IoBatch batch(loop_, Priority::demand);
  batch.read(parity_file_, layout_.reserve_at(parity), bytes.slice());
  STOKER_TRY(batch.run());
  MemoryLogSource source(bytes.span());
  const FramePlace place{node_, true, static_cast<uint32_t>(layout_.slot(parity)), 0};
  std::vector<Frame> frames;
  uint64_t generation = 0, end = 0;
  for (uint64_t at = 0; at + kShardBlock <= bytes.size();) {
    auto each = frame_at(layout_, id_, source, place, at);
    at = each ? each->record.end : at + kShardBlock;
    if (!each || each->record.generation < generation) continue;
    if (each->record.generation > generation) frames.clear();
    generation = each->record.generation;
    frames.push_back(std::move(*each));
  }
  if (frames.empty()) return {};
  const auto folded = state.folded.find(parity);
  const bool headless = frames[0].record.offset != 0;
  bool gap = false;
  for (Frame& each : frames) {
    gap = gap || each.record.offset != end;
    end = each.record.end;
    for (const FrameRecord& record : each.content.records) {
      const bool alive = folded == state.folded.end() || record.record.seq > folded->second;
      if (gap && (alive || !headless))
        damage =
            "a record in the reserve of stripe " + std::to_string(parity.stripe) + " is damaged";
    }
    take(std::move(each.content), parity_file_, layout_.reserve_at(parity) + each.record.offset,
         state);
  }
  // Full until it is let go of.
  reserves_[parity].writer =
      LogWriter({id_, generation}, layout_.reserve_bytes, {layout_.reserve_bytes, 0, 0});
  return {};
}

Status ShardLog::load(NodeState& state, std::string& damage) {
  Found found;
  for (size_t index = 0; index < segments_.size() && found.damage.empty(); ++index)
    STOKER_TRY(load_segment(index, found));
  for (size_t index = 0; index < found.begun && found.damage.empty(); ++index) {
    if (index >= segments_.size() || segments_[index].count == 0)
      found.damage = "segment " + std::to_string(index) +
                     " of its log is gone: it was begun, and says nothing of it";
  }
  begun_ = found.begun;
  for (const auto& [count, offset] : found.claims) {
    const auto end = found.ends.find(count);
    if (end != found.ends.end() && end->second < offset)
      found.damage = "a record of its log is damaged";
    if (end == found.ends.end() && count != 0 && count == found.claims.rbegin()->first)
      found.damage = "a segment of its log is gone";
  }
  damage = found.damage;
  if (!damage.empty()) return {};
  std::sort(found.frames.begin(), found.frames.end(),
            [](const Found::Piece& a, const Found::Piece& b) { return a.at < b.at; });
  const std::lock_guard lock(mutex_);
  for (Found::Piece& piece : found.frames) {
    const uint64_t offset = piece.at.offset;
    take(std::move(piece.content), segments_[piece.segment].file, offset, state);
  }
  if (layout_.reserve_bytes != 0) {
    for (uint64_t slot = 0; slot < layout_.slots(false) && damage.empty(); ++slot) {
      const Chunk parity = layout_.chunk_in(node_, false, slot);
      if (parity.stripe < layout_.geometry.stripes) STOKER_TRY(load_reserve(parity, state, damage));
    }
  }
  settled_ = state.settled = found.settled;
  return {};
}

}  // namespace stoker::curm
