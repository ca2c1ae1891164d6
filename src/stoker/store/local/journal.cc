#include "stoker/store/local/journal.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <set>

#include "stoker/base/check.h"
#include "stoker/base/log.h"

namespace stoker::local {
namespace {

constexpr size_t kImagePartBytes = kMiB;
constexpr uint64_t kWindowBytes = kMiB;

std::optional<FrameKind> kind_of(std::span<const std::byte> payload) {
  if (payload.size() < sizeof(FrameKind)) return std::nullopt;
  FrameKind kind;
  std::memcpy(&kind, payload.data(), sizeof kind);
  return kind;
}

// Counts up in the high half; the low half is random, so that what an unfinished attempt at the
// same number left behind in an area never passes for a part of this one.
uint64_t next_generation(uint64_t newest) {
  std::random_device random;
  return ((newest >> 32) + 1) << 32 | random();
}

}  // namespace

// An area on a volume, read through a window that grows to the largest frame. A block that cannot
// be read is a damaged frame.
class Journal::Source final : public LogSource {
 public:
  Source(Loop& loop, FileId file, uint64_t at, uint64_t bytes, size_t copy)
      : loop_(&loop), file_(file), at_(at), bytes_(bytes), copy_(copy) {}
  uint64_t size() const override { return bytes_; }
  size_t copy() const { return copy_; }
  // Offsets of blocks in the area that could not be read, as far as it was looked at.
  const std::set<uint64_t>& unreadable() const { return unreadable_; }

  Result<std::span<const std::byte>> view(uint64_t offset, uint64_t bytes) override {
    STOKER_CHECK(offset <= bytes_ && bytes <= bytes_ - offset);
    if (offset < from_ || offset + bytes > to_) STOKER_TRY(load(offset, bytes));
    return std::span<const std::byte>(window_.data() + (offset - from_), bytes);
  }

 private:
  Status load(uint64_t offset, uint64_t bytes) {
    from_ = align_down(offset, kBlock);
    const uint64_t want =
        std::min(bytes_ - from_, std::max(align_up(offset + bytes, kBlock) - from_, kWindowBytes));
    if (window_.size() < want) window_ = AlignedBytes(want);
    to_ = from_;
    const auto lost = read_what_can_be(*loop_, Priority::demand, file_, at_ + from_,
                                       window_.slice().sub(0, want));
    if (!lost) return lost.error().with("reading the journal");
    for (const uint64_t at : *lost) unreadable_.insert(at - at_);
    to_ = from_ + want;
    return {};
  }

  Loop* loop_;
  FileId file_;
  uint64_t at_, bytes_;
  size_t copy_;
  AlignedBytes window_;
  uint64_t from_ = 0, to_ = 0;
  std::set<uint64_t> unreadable_;
};

Status FrameReader::apply(std::span<const std::byte> payload) {
  ByteReader in(payload);
  const auto kind = in.get<FrameKind>();
  const auto items = in.get_bytes(in.left());
  switch (kind) {
    case FrameKind::image:
      if (image_complete_) break;
      ++parts_;
      return map_.apply(items, freed_);
    case FrameKind::image_end:
      if (image_complete_ || ByteReader(items).get<uint32_t>() != parts_) break;
      image_complete_ = true;
      return {};
    case FrameKind::seal:
      if (!image_complete_ || sealed_) break;
      sealed_ = true;
      return {};
    case FrameKind::record:
      if (!sealed_) break;
      ++records_;
      freed_.clear();
      return map_.apply(items, freed_);
  }
  return fail(Code::corruption,
              "the journal is damaged: a frame of kind {} stands where none of that kind can",
              static_cast<unsigned>(kind));
}

Error opening_error(const Error& error, const std::string& path) {
  Error named = error.with("the store '" + path + "'");
  if (error.code == Code::corruption)
    named.what +=
        ". Without its map nothing in it can be found: restore the store from a copy, or make a "
        "new one elsewhere";
  return named;
}

Journal::Journal(Loop& loop, const VolumeSet& volumes)
    : loop_(loop), store_(volumes[0].header.store), area_bytes_(volumes[0].header.area_bytes) {
  for (const Volume& volume : volumes.all()) {
    for (size_t copy = 0; copy < 2; ++copy) {
      if (volume.header.journal_at[copy] == 0) continue;
      copies_[copy].file = volume.file.id;
      copies_[copy].at = volume.header.journal_at[copy];
    }
  }
}

std::vector<Journal::Source> Journal::sources_of(uint64_t generation) {
  std::vector<Source> sources;
  for (size_t copy = 0; copy < 2; ++copy) {
    for (size_t area = 0; area < 2; ++area) {
      if (copies_[copy].generations[area] != generation) continue;
      sources.emplace_back(loop_, copies_[copy].file, copies_[copy].at + area * area_bytes_,
                           area_bytes_, copy);
    }
  }
  return sources;
}

// Of the area's first frame; where that is damaged, the newest of any frame in it.
Result<uint64_t> Journal::newest_generation(LogSource& source) const {
  STOKER_ASSIGN(auto first, read_frame(source, store_, 0));
  if (first && first->sequence == 0) return first->generation;
  uint64_t newest = 0;
  for (uint64_t at = 0; at + kBlock <= source.size(); at += kBlock) {
    STOKER_ASSIGN(auto frame, read_frame(source, store_, at));
    if (frame) newest = std::max(newest, frame->generation);
  }
  return newest;
}

Result<std::unique_ptr<Map>> Journal::recover(const MapLimits& limits) {
  std::set<uint64_t, std::greater<>> found;
  for (size_t copy = 0; copy < 2; ++copy) {
    if (copies_[copy].file < 0)
      return fail(Code::corruption, "the volumes name no place for journal copy {}", copy);
    for (size_t area = 0; area < 2; ++area) {
      Source source(loop_, copies_[copy].file, copies_[copy].at + area * area_bytes_, area_bytes_,
                    copy);
      STOKER_ASSIGN(copies_[copy].generations[area], newest_generation(source));
      if (copies_[copy].generations[area] != 0) found.insert(copies_[copy].generations[area]);
    }
  }
  if (!found.empty()) generation_max_ = *found.begin();
  for (const uint64_t generation : found) {
    auto map = std::make_unique<Map>(limits);
    STOKER_ASSIGN(const bool complete, load(generation, *map));
    if (!complete) continue;  // cut off before it came into use: the one before it still holds
    settle(generation);
    return map;
  }
  return fail(Code::corruption,
              "both copies of the journal are damaged, and no complete map is left: restore what "
              "the store held from a copy");
}

// False: its image was never finished. Each frame is taken from a copy that has it intact.
Result<bool> Journal::load(uint64_t generation, Map& map) {
  auto sources = sources_of(generation);
  FrameReader reader(map);
  LogCursor cursor;
  mended_.clear();
  for (;;) {
    std::optional<LogRecord> frame;
    size_t bad = 0;
    for (Source& source : sources) {
      STOKER_ASSIGN(auto candidate, read_frame(source, store_, cursor.offset));
      if (candidate && candidate->generation == generation && candidate->follows(cursor)) {
        frame = candidate;
        if (bad > 0)
          mended_.push_back("frame " + std::to_string(cursor.sequence) +
                            " is missing or damaged in journal copy " +
                            std::to_string(sources[0].copy()));
        break;
      }
      ++bad;
    }
    if (!frame) break;
    STOKER_TRY(reader.apply(frame->payload));
    cursor = frame->next();
  }
  if (!reader.image_complete()) {
    STOKER_ASSIGN(const bool sealed, sealed_anywhere(sources, generation));
    if (!sealed) return false;
    return fail(Code::corruption,
                "both copies of the journal are damaged, and no complete map is left: restore what "
                "the store held from a copy");
  }
  size_t ends_unread = 0;
  for (Source& source : sources) {
    STOKER_ASSIGN(auto later, find_frame(source, {store_, generation}, cursor.offset + kBlock,
                                         cursor.sequence + 1));
    if (later)
      return fail(Code::corruption,
                  "record {} of the journal is damaged in both copies, and later ones follow it",
                  cursor.sequence);
    ends_unread += source.unreadable().contains(cursor.offset) ? 1 : 0;
  }
  if (ends_unread == sources.size()) {
    return fail(Code::corruption,
                "the journal cannot be read, in any copy, where its last record may stand");
  }
  records_ = reader.records();
  return true;
}

Result<bool> Journal::sealed_anywhere(std::vector<Source>& sources, uint64_t generation) const {
  for (Source& source : sources) {
    for (uint64_t at = 0;;) {
      STOKER_ASSIGN(auto frame, find_frame(source, {store_, generation}, at, 0));
      if (!frame) break;
      const auto kind = kind_of(frame->payload);
      if (kind == FrameKind::seal || kind == FrameKind::record) return true;
      at = frame->end;
    }
  }
  return false;
}

// Notes in which area each copy holds the generation, in whatever condition: the next one goes to
// the other area, since both copies together may be needed to read this one. A copy that has none
// of it keeps its newer area.
void Journal::settle(uint64_t generation) {
  generation_ = generation;
  for (Copy& copy : copies_) {
    if (copy.generations[0] == generation) {
      copy.area = 0;
    } else if (copy.generations[1] == generation) {
      copy.area = 1;
    } else {
      copy.area = copy.generations[1] > copy.generations[0] ? 1 : 0;
    }
  }
}

Status Journal::begin(const Map& map) {
  const uint64_t generation = next_generation(generation_max_);
  generation_max_ = generation;
  writer_ = LogWriter({store_, generation}, area_bytes_);
  for (Copy& copy : copies_) {
    STOKER_CHECK(copy.area < 2);
    copy.area = 1 - copy.area;
  }
  uint32_t parts = 0;
  STOKER_TRY(map.image(kImagePartBytes, [&](std::string_view items) {
    ++parts;
    return write_frame(FrameKind::image, items);
  }));
  STOKER_TRY(
      write_frame(FrameKind::image_end, {reinterpret_cast<const char*>(&parts), sizeof parts}));
  STOKER_TRY(sync());
  STOKER_TRY(write_frame(FrameKind::seal, {}));
  STOKER_TRY(sync());
  for (Copy& copy : copies_) copy.generations[copy.area] = generation;
  generation_ = generation;
  records_ = 0;
  return {};
}

Status Journal::append(std::string_view items) {
  // a begin() that failed left nothing to append to
  STOKER_CHECK(writer_.identity().generation == generation_);
  STOKER_TRY(write_frame(FrameKind::record, items));
  ++records_;
  return sync();
}

Status Journal::write_frame(FrameKind kind, std::string_view body) {
  const size_t payload = sizeof kind + body.size();
  if (!writer_.fits(payload))
    return fail(Code::out_of_space,
                "the journal is too small for the map of the store: make a store for more objects "
                "(objects_max), or with larger chunks");
  std::string bytes(reinterpret_cast<const char*>(&kind), sizeof kind);
  bytes.append(body);
  const uint64_t framed = framed_bytes(payload);
  if (frame_.size() < framed || frame_.size() > 4 * (framed + kImagePartBytes))
    frame_ = AlignedBytes(framed);
  const Slice frame = frame_.slice().sub(0, framed);
  const uint64_t offset = writer_.append(std::as_bytes(std::span(bytes)), frame.span());
  IoBatch batch(loop_, Priority::demand);
  for (const Copy& copy : copies_) {
    STOKER_CHECK(copy.file >= 0 && offset + framed <= area_bytes_);
    batch.write(copy.file, copy.at + copy.area * area_bytes_ + offset, frame);
  }
  return batch.run();
}

Status Journal::sync() {
  IoBatch batch(loop_, Priority::demand);
  batch.sync(copies_[0].file);
  if (copies_[1].file != copies_[0].file) batch.sync(copies_[1].file);
  return batch.run();
}

Result<CopyReport> Journal::check(size_t copy) {
  CopyReport report;
  for (Source& source : sources_of(generation_)) {
    if (source.copy() != copy) continue;
    LogScan scan(source, {store_, generation_});
    for (;;) {
      STOKER_ASSIGN(auto item, scan.next());
      if (!item) break;
      if (const auto* gap = std::get_if<LogGap>(&*item)) {
        const auto unread = source.unreadable().lower_bound(gap->offset);
        const bool cannot = unread != source.unreadable().end() && *unread < gap->end;
        report.damage.push_back("journal copy " + std::to_string(copy) +
                                (cannot ? " cannot be read" : " is damaged") + " at byte " +
                                std::to_string(cannot ? *unread : gap->offset) + " of its area");
        continue;
      }
      const auto kind = kind_of(std::get<LogRecord>(*item).payload);
      report.image = report.image || kind == FrameKind::image_end;
      report.seal = report.seal || kind == FrameKind::seal;
      if (kind == FrameKind::record) ++report.records;
    }
    const auto behind = source.unreadable().lower_bound(scan.cursor().offset);
    if (behind != source.unreadable().end()) {
      report.unread_behind = "journal copy " + std::to_string(copy) + " cannot be read at byte " +
                             std::to_string(*behind) + " of its area, behind its last intact frame";
    }
  }
  return report;
}

}  // namespace stoker::local
