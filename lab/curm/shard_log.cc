#include "curm/shard_log.h"

#include <algorithm>
#include <random>

#include "stoker/base/check.h"
#include "stoker/base/log.h"

namespace stoker::curm {
namespace {

// missing segments in a row; what is behind more is not found
constexpr size_t kHolesLookedPast = 64;
// of records that are framed together; one record alone may be longer
constexpr uint64_t kFrameMax = kMiB;

uint64_t random_generation(uint64_t count) { return count << 32 | std::random_device{}(); }

}  // namespace

void ShardLog::become(const NodeHead& head, FileId parity_file) {
  const std::lock_guard lock(mutex_);
  id_ = head.incarnation;
  node_ = head.node;
  parity_file_ = parity_file;
  for (Segment& segment : segments_) segment = {.file = segment.file};
  pending_.clear();
  records_.clear();
  reserves_.clear();
  epochs_.clear();
  new_epochs_.clear();
  current_ = SIZE_MAX;
  durable_ = {};
  next_count_ = 1;
  begun_ = 0;
  settled_ = 0;
}

// What is there and not of full size was being made when the power went, or was cut: made anew, or
// -1.
Result<FileId> ShardLog::open_segment(size_t index, bool create) {
  OpenFile file;
  file.path = path_ + "/log." + std::to_string(index);
  file.create = create;
  file.reserve_bytes = layout_.segment_bytes;
  STOKER_ASSIGN(const FileInfo info, loop_.open(file));
  if (info.bytes >= layout_.segment_bytes) return info.id;
  if (create) return lengthened(info);
  STOKER_TRY(loop_.close(info.id));
  return FileId{-1};
}

// A file that is not empty is not allocated by opening it. Its new size is durable with the begin
// frame.
Result<FileId> ShardLog::lengthened(const FileInfo& file) {
  const AlignedBytes last(kShardBlock);
  std::fill(last.span().begin(), last.span().end(), std::byte{0});
  IoBatch write(loop_, Priority::demand);
  write.write(file.id, layout_.segment_bytes - kShardBlock, last.slice());
  const Status done = write.run();
  if (done) return file.id;
  if (const Status closed = loop_.close(file.id); !closed)
    log().warn("{}", closed.error().message());
  return done.error();
}

Status ShardLog::open_segments() {
  size_t missing = 0;
  for (size_t index = 0; missing <= kHolesLookedPast; ++index) {
    const auto file = open_segment(index, false);
    if (!file && file.error().code != Code::not_found) return file.error();
    missing = file ? 0 : missing + 1;
    if (!file) continue;
    const std::lock_guard lock(mutex_);
    segments_.resize(index + 1);
    segments_[index].file = *file;
  }
  // The last one may have been on its way.
  if (!segments_.empty() && segments_.back().file < 0) {
    const std::lock_guard lock(mutex_);
    segments_.pop_back();
  }
  return {};
}

Status ShardLog::close() {
  Status done;
  for (const FileId file : files()) {
    if (const Status closed = loop_.close(file); !closed) done = closed;
  }
  segments_.clear();
  return done;
}

std::vector<FileId> ShardLog::files() const {
  std::vector<FileId> files;
  files.reserve(segments_.size());
  for (const Segment& segment : segments_) {
    if (segment.file >= 0) files.push_back(segment.file);
  }
  return files;
}

uint64_t ShardLog::queue(Record record) {
  const std::lock_guard lock(mutex_);
  pending_.push_back({next_id_, std::move(record)});
  return next_id_++;
}

std::optional<StoredRecord> ShardLog::find(uint64_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = records_.find(id);
  return found == records_.end() ? std::optional<StoredRecord>() : found->second;
}

// With the mutex held.
void ShardLog::index(uint64_t id, StoredRecord record) {
  if (record.place.reserve) {
    ++reserves_[layout_.chunk_in(node_, false, record.place.index)].live;
  } else {
    ++segments_[record.place.index].live;
  }
  records_.emplace(id, std::move(record));
}

// With the mutex held.
void ShardLog::forget(uint64_t id) {
  const auto found = records_.find(id);
  if (found == records_.end()) return;
  const FramePlace& place = found->second.place;
  if (place.reserve) {
    const auto reserve = reserves_.find(layout_.chunk_in(node_, false, place.index));
    if (--reserve->second.live == 0)
      reserve->second.writer = LogWriter(
          {id_, random_generation((reserve->second.writer.identity().generation >> 32) + 1)},
          layout_.reserve_bytes);
  } else {
    --segments_[place.index].live;
  }
  records_.erase(found);
}

void ShardLog::release(const std::vector<LogPlace>& places, uint64_t settled) {
  const std::lock_guard lock(mutex_);
  settled_ = std::max(settled_, settled);
  for (const LogPlace& place : places) forget(place.id);
}

size_t ShardLog::live() const {
  const std::lock_guard lock(mutex_);
  return pending_.size() +
         static_cast<size_t>(std::count_if(records_.begin(), records_.end(), [](const auto& each) {
           return each.second.kind != Record::Kind::epoch;
         }));
}

std::optional<ShardWrite> ShardLog::reserve(const Chunk& parity, const Record& record,
                                            uint64_t& id) {
  ShardFrame frame;
  frame.add(record);
  const std::lock_guard lock(mutex_);
  const auto [found, fresh] = reserves_.try_emplace(parity);
  LogWriter& writer = found->second.writer;
  if (fresh) writer = LogWriter({id_, random_generation(1)}, layout_.reserve_bytes);
  if (!writer.fits(frame.bytes() - kFrameHeaderBytes)) return {};
  const FramePlace place{node_, true, static_cast<uint32_t>(layout_.slot(parity)),
                         writer.cursor().offset};
  const std::vector<std::byte> payload = frame.payload({place, settled_, {}, 0});
  ShardWrite write;
  write.file = parity_file_;
  write.bytes = AlignedBytes(frame.bytes());
  write.offset = layout_.reserve_at(parity) + writer.append(payload, write.bytes.span());
  id = next_id_++;
  index(id,
        {place, parity_file_, write.offset + frame.blocks_at(), record.payload_bytes(),
         block_crcs(write.bytes.span().subspan(frame.blocks_at())), record.kind, record.scheme});
  return write;
}

// ---- writing
// -------------------------------------------------------------------------------------------------

// Into the current segment. Where nothing waits, it is durable already: by the last flush of the
// node.
Status ShardLog::write_now(std::vector<ShardWrite>& writes, Mutation unflushed) {
  if (writes.empty()) return {};
  IoBatch batch(loop_, Priority::demand);
  for (const ShardWrite& write : writes) batch.write(write.file, write.offset, write.bytes.slice());
  STOKER_TRY(batch.run());
  writes.clear();
  IoBatch sync(loop_, Priority::demand);
  if (!mutated(unflushed)) sync.sync(current_file());
  STOKER_TRY(sync.run());
  durable();
  return {};
}

// Everything in the segment before is durable when the first frame of the next says so; and that
// frame is, before anything else of its generation is written. It goes into the block that does not
// hold the last one's: what is torn then was never needed.
Status ShardLog::begin_segment(std::vector<ShardWrite>& writes) {
  STOKER_TRY(write_now(writes, Mutation::skip_full_segment_flush));
  size_t next = 0;
  {
    const std::lock_guard lock(mutex_);
    while (next < segments_.size() && (segments_[next].live != 0 || next == current_)) ++next;
  }
  if (next == segments_.size() || segments_[next].file < 0) {
    STOKER_ASSIGN(const FileId file, open_segment(next, true));
    const std::lock_guard lock(mutex_);
    if (next == segments_.size()) segments_.emplace_back();
    segments_[next].file = file;
  }
  const uint64_t count = next_count_++;
  const LogIdentity identity{id_, random_generation(count)};
  ShardWrite begin;
  LogWriter first(identity, layout_.segment_bytes,
                  {segments_[next].begin == 0 ? kShardBlock : 0, 0, 0});
  uint64_t settled = 0;
  {
    const std::lock_guard lock(mutex_);
    settled = settled_;
    segments_[next] = {segments_[next].file, count, kFramesAt, 0, first.cursor().offset};
  }
  current_ = next;
  begun_ = std::max(begun_, static_cast<uint32_t>(next) + 1);
  const ShardFrame nothing;
  const FramePlace place{node_, false, static_cast<uint32_t>(next), first.cursor().offset};
  begin.bytes = AlignedBytes(nothing.bytes());
  begin.file = segments_[next].file;
  begin.offset =
      first.append(nothing.payload({place, settled, durable_, begun_}), begin.bytes.span());
  writer_ = LogWriter(identity, layout_.segment_bytes, {kFramesAt, 1, first.cursor().previous_crc});
  writes.push_back(std::move(begin));
  return write_now(writes, Mutation::skip_begin_flush);
}

void ShardLog::close_frame(ShardFrame& frame,
                           std::vector<std::pair<uint64_t, StoredRecord>>& inside,
                           std::vector<ShardWrite>& writes) {
  if (frame.empty()) return;
  const std::lock_guard lock(mutex_);
  Segment& segment = segments_[current_];
  const FramePlace place{node_, false, static_cast<uint32_t>(current_), writer_.cursor().offset};
  ShardWrite write;
  write.file = segment.file;
  write.bytes = AlignedBytes(frame.bytes());
  write.offset =
      writer_.append(frame.payload({place, settled_, durable_, begun_}), write.bytes.span());
  segment.end = writer_.cursor().offset;
  for (auto& [id, record] : inside) {
    record.place = place;
    record.file = segment.file;
    record.at += write.offset + frame.blocks_at();
    if (record.kind == Record::Kind::epoch) new_epochs_.emplace_back(record.scheme, id);
    index(id, std::move(record));
  }
  writes.push_back(std::move(write));
  inside.clear();
  frame = ShardFrame();
}

Status ShardLog::frame(std::vector<ShardWrite>& writes) {
  std::deque<Pending> waiting;
  {
    const std::lock_guard lock(mutex_);
    waiting.swap(pending_);
  }
  ShardFrame frame;
  std::vector<std::pair<uint64_t, StoredRecord>> inside;
  uint64_t body = 0;
  for (Pending& each : waiting) {
    const uint64_t stored = stored_bytes(each.record);
    const auto fits = [&](uint64_t bytes) {
      return current_ != SIZE_MAX && writer_.fits(bytes - kFrameHeaderBytes);
    };
    if (!frame.empty() && (body + stored > kFrameMax || !fits(frame.bytes_with(each.record)))) {
      close_frame(frame, inside, writes);
      body = 0;
    }
    if (frame.empty() && !fits(ShardFrame().bytes_with(each.record))) {
      if (kFramesAt + ShardFrame().bytes_with(each.record) > layout_.segment_bytes) {
        return fail(
            Code::invalid_argument,
            "a record of {} does not fit a segment of {}: take larger segments or smaller chunks",
            human_bytes(stored), human_bytes(layout_.segment_bytes));
      }
      STOKER_TRY(begin_segment(writes));
    }
    frame.add(each.record);
    StoredRecord record;
    record.at = body;  // behind the others of its frame
    record.bytes = each.record.payload_bytes() - 8 * each.record.dropped.size();
    record.kind = each.record.kind;
    record.scheme = each.record.scheme;
    std::vector<std::byte> bytes;
    for (const auto* ranges : {&each.record.ranges, &each.record.before}) {
      for (const Record::Range& range : *ranges)
        bytes.insert(bytes.end(), range.value.bytes().begin(), range.value.bytes().end());
    }
    bytes.resize(stored);
    record.crcs = block_crcs(bytes);
    body += stored;
    inside.emplace_back(each.id, std::move(record));
  }
  close_frame(frame, inside, writes);
  return {};
}

void ShardLog::durable() {
  const std::lock_guard lock(mutex_);
  if (current_ < segments_.size()) durable_ = {segments_[current_].count, segments_[current_].end};
  for (const auto& [scheme, id] : new_epochs_) {
    for (const uint64_t older : epochs_[scheme]) forget(older);
    epochs_[scheme] = {id};
  }
  new_epochs_.clear();
}

}  // namespace stoker::curm
