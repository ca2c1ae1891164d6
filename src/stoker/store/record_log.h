// Record log: frames in a fixed area that is written front to back, each on a fresh 4 KiB block.
//
// Knows nothing of what the records mean. A frame names the store, the generation of the log, its
// sequence in it and the CRC of the frame before it. So bytes of an older log in the same area do
// not pass for a record, nor does a torn or misplaced write. A block that holds a frame is never
// rewritten within a generation. docs/formats/local_store.md gives the bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>

#include "stoker/base/bytes.h"
#include "stoker/base/result.h"

namespace stoker {

using StoreId = std::array<uint8_t, 16>;

inline constexpr uint32_t kFrameMagic = 0x314C4B53;  // "SKL1"
inline constexpr size_t kFrameHeaderBytes = 64;
// the CRC covers every other byte of the frame, padding included
inline constexpr size_t kFrameCrcAt = 60;

constexpr uint64_t framed_bytes(uint64_t payload_bytes) {
  return align_up(kFrameHeaderBytes + payload_bytes, kIoAlign);
}

struct LogIdentity {
  StoreId store{};
  uint64_t generation = 0;
};

// Where the next frame of a log belongs and what it must say.
struct LogCursor {
  uint64_t offset = 0;
  uint64_t sequence = 0;
  uint32_t previous_crc = 0;
};

struct LogRecord {
  uint64_t offset = 0, end = 0;  // of the frame in the area
  uint64_t generation = 0;
  uint64_t sequence = 0;
  uint32_t previous_crc = 0, crc = 0;
  std::span<const std::byte> payload;  // valid until the source is viewed again

  bool follows(const LogCursor& cursor) const {
    return sequence == cursor.sequence && previous_crc == cursor.previous_crc;
  }
  LogCursor next() const { return {end, sequence + 1, crc}; }
};

// Bytes that are no frame of the log although a later frame of it stands behind them.
struct LogGap {
  uint64_t offset = 0, end = 0;
};

// The bytes of an area, read as needed. One thread.
class LogSource {
 public:
  virtual ~LogSource() = default;
  virtual uint64_t size() const = 0;
  // [offset, offset + bytes) of the area, which must lie inside; valid until the next call.
  virtual Result<std::span<const std::byte>> view(uint64_t offset, uint64_t bytes) = 0;
};

class MemoryLogSource final : public LogSource {
 public:
  explicit MemoryLogSource(std::span<const std::byte> bytes) : bytes_(bytes) {}
  uint64_t size() const override { return bytes_.size(); }
  Result<std::span<const std::byte>> view(uint64_t offset, uint64_t bytes) override {
    STOKER_CHECK(offset <= bytes_.size() && bytes <= bytes_.size() - offset);
    return bytes_.subspan(offset, bytes);
  }

 private:
  std::span<const std::byte> bytes_;
};

// Frames records one after the other. Owns no memory; who writes the frames out decides when they
// count.
class LogWriter {
 public:
  LogWriter() = default;
  // Goes on from `cursor`, where no frame stands that counts.
  LogWriter(const LogIdentity& identity, uint64_t area_bytes, const LogCursor& cursor = {})
      : identity_(identity), area_bytes_(area_bytes), cursor_(cursor) {}

  const LogIdentity& identity() const { return identity_; }
  const LogCursor& cursor() const { return cursor_; }
  bool fits(uint64_t payload_bytes) const {
    STOKER_CHECK(cursor_.offset <= area_bytes_ && is_aligned(cursor_.offset, kIoAlign));
    return framed_bytes(payload_bytes) <= area_bytes_ - cursor_.offset;
  }
  // Makes the frame in `out` (framed_bytes(payload.size()) bytes) and moves on; returns the frame's
  // offset in the area.
  uint64_t append(std::span<const std::byte> payload, std::span<std::byte> out);

 private:
  LogIdentity identity_;
  uint64_t area_bytes_ = 0;
  LogCursor cursor_;
};

// The intact frame of this store that starts at `offset`, of whatever generation; none if there is
// none. Errors: of the source.
Result<std::optional<LogRecord>> read_frame(LogSource& source, const StoreId& store,
                                            uint64_t offset);
// The first intact frame of this log at or behind `offset` with at least this sequence.
Result<std::optional<LogRecord>> find_frame(LogSource& source, const LogIdentity& identity,
                                            uint64_t offset, uint64_t sequence_min);

// The records of one log in order, and the gaps between them; what a gap means belongs to the
// owner.
class LogScan {
 public:
  using Item = std::variant<LogRecord, LogGap>;
  LogScan(LogSource& source, const LogIdentity& identity) : source_(source), identity_(identity) {}
  // None: the end of the log (nothing of it stands behind).
  Result<std::optional<Item>> next();
  const LogCursor& cursor() const { return cursor_; }

 private:
  LogSource& source_;
  const LogIdentity identity_;
  LogCursor cursor_;
  // the frame at the cursor was found behind a gap: its chain cannot be checked
  bool resynced_ = false;
};

}  // namespace stoker
