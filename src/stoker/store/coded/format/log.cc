#include "stoker/store/coded/format/log.h"

#include <algorithm>
#include <random>

#include "stoker/base/check.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {

SegmentRef ShardLog::hold(size_t segment) {
  STOKER_CHECK(segment < refs_.size());
  SegmentRef ref = refs_[segment].lock();
  if (!ref) {
    ref = std::make_shared<const Segment>(Segment{shard_, segment});
    refs_[segment] = ref;
  }
  return ref;
}

void ShardLog::resume(size_t segment, const SegmentEnd& end) {
  current_ = hold(segment);
  writer_ = LogWriter({store_, end.generation}, shape_.segment_bytes, end.cursor);
}

// The current one counts if nobody but us holds it: it can be begun anew.
size_t ShardLog::free_segments() const {
  return expired_segments() + (current_ && current_.use_count() == 1 ? 1 : 0);
}

size_t ShardLog::expired_segments() const {
  return static_cast<size_t>(
      std::count_if(refs_.begin(), refs_.end(), [](const auto& ref) { return ref.expired(); }));
}

bool ShardLog::fits(size_t bytes, size_t reserve) const {
  const uint64_t left = current_ ? shape_.segment_bytes - writer_.cursor().offset : 0;
  if (mutated(Mutation::reuse_segment_early)) return true;
  // What goes into the current segment keeps it; so the reserve is others. (Else commits eat it up:
  // each fold begins a segment of the reserve, and the commit behind it moves in.)
  if (bytes <= left) return expired_segments() >= reserve;
  // What does not go there goes into the next ones; a frame may leave up to its own size unused at
  // an end.
  const size_t segments = 1 + 2 * bytes / shape_.segment_bytes;
  return free_segments() >= segments + reserve;
}

void ShardLog::begin_segment() {
  current_.reset();
  size_t segment = 0;
  if (mutated(Mutation::reuse_segment_early)) {
    segment = next_count_ % refs_.size();
    refs_[segment].reset();
  }
  while (segment < refs_.size() && !refs_[segment].expired()) ++segment;
  STOKER_CHECK(segment < refs_.size());  // fits() was asked
  current_ = hold(segment);
  const LogIdentity identity{store_, next_count_++ << 32 | std::random_device{}()};
  writer_ = LogWriter(identity, shape_.segment_bytes);
}

LogFrame ShardLog::append(const FrameBuilder& frame) {
  if (!current_ || !writer_.fits(frame.payload_bytes())) begin_segment();
  std::vector<std::byte> payload(frame.payload_bytes());
  frame.payload({shard_, current_->index, writer_.cursor().offset}, payload);
  LogFrame made;
  made.segment = current_;
  made.bytes = AlignedBytes(frame.bytes());
  made.offset = shape_.segment_at(current_->index) + writer_.append(payload, made.bytes.span());
  made.blocks_at = made.offset + frame.blocks_at();
  STOKER_CHECK(made.offset + made.bytes.size() <= shape_.segment_at(current_->index + 1));
  STOKER_CHECK(frame.blocks_at() + frame.block_count() * kBlock == made.bytes.size());
  return made;
}

namespace {

// The frame at `at`, if it says of itself that it belongs there.
struct Found {
  uint64_t generation, end;
  LogCursor next;
  FrameContent content;
};
std::optional<Found> frame_at(const Shape& shape, const StoreId& store, const FrameHome& home,
                              std::span<const std::byte> bytes) {
  MemoryLogSource source(bytes);
  const auto frame = read_frame(source, store, home.offset);
  STOKER_CHECK(frame.has_value());  // memory does not fail
  if (!*frame) return {};
  auto content = decode_payload(shape, (*frame)->payload);
  if (!content || content->home != home) return {};
  content->sequence = (*frame)->sequence;
  return Found{(*frame)->generation, (*frame)->end, (*frame)->next(), std::move(*content)};
}

}  // namespace

SegmentEnd read_segment(const Shape& shape, const StoreId& store, size_t shard, size_t segment,
                        uint64_t floor, std::span<const std::byte> bytes,
                        const std::function<void(uint64_t at, FrameContent content)>& visit) {
  uint64_t generation = 0;
  for (uint64_t at = 0; at + kBlock <= bytes.size(); at += kBlock) {
    const auto found = frame_at(shape, store, {shard, segment, at}, bytes);
    if (found) generation = std::max(generation, found->generation);
    if (found && at == 0) break;
  }
  if (generation >> 32 < floor || generation == 0) return {};
  SegmentEnd end{generation, {}};
  for (uint64_t at = 0; at + kBlock <= bytes.size();) {
    auto found = frame_at(shape, store, {shard, segment, at}, bytes);
    const bool ours = found && found->generation == generation;
    if (ours) visit(at, std::move(found->content));
    if (ours) end.cursor = found->next;
    STOKER_CHECK(!ours || (found->end > at && found->end <= bytes.size()));
    at = ours ? found->end : at + kBlock;
  }
  return end;
}

}  // namespace stoker::coded
