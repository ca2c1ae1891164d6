#include "stoker/store/record_log.h"

#include <cstring>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"

namespace stoker {
namespace {

// The bytes of a frame's header; read and written in place.
struct Header {
  uint32_t magic;
  uint32_t length;  // of the payload
  uint8_t store[16];
  uint64_t generation;
  uint64_t sequence;
  uint32_t previous_crc;
  uint32_t reserved[4];  // zero
  uint32_t crc;
};
static_assert(sizeof(Header) == kFrameHeaderBytes && offsetof(Header, crc) == kFrameCrcAt);

uint32_t frame_crc(std::span<const std::byte> frame) {
  const uint32_t head = crc32c(frame.data(), kFrameCrcAt);
  return crc32c(frame.data() + kFrameHeaderBytes, frame.size() - kFrameHeaderBytes, head);
}

bool is_frame_of(const Header& header, const StoreId& store, uint64_t room) {
  return header.magic == kFrameMagic &&
         std::memcmp(header.store, store.data(), store.size()) == 0 &&
         framed_bytes(header.length) <= room;
}

}  // namespace

uint64_t LogWriter::append(std::span<const std::byte> payload, std::span<std::byte> out) {
  STOKER_CHECK(fits(payload.size()) && out.size() == framed_bytes(payload.size()));
  Header header{};
  header.magic = kFrameMagic;
  header.length = static_cast<uint32_t>(payload.size());
  std::memcpy(header.store, identity_.store.data(), identity_.store.size());
  header.generation = identity_.generation;
  header.sequence = cursor_.sequence;
  header.previous_crc = cursor_.previous_crc;
  std::memcpy(out.data(), &header, sizeof header);
  if (!payload.empty()) std::memcpy(out.data() + kFrameHeaderBytes, payload.data(), payload.size());
  std::memset(out.data() + kFrameHeaderBytes + payload.size(), 0,
              out.size() - kFrameHeaderBytes - payload.size());
  const uint32_t crc = frame_crc(out);
  std::memcpy(out.data() + kFrameCrcAt, &crc, sizeof crc);
  const uint64_t offset = cursor_.offset;
  cursor_ = {offset + out.size(), cursor_.sequence + 1, crc};
  return offset;
}

Result<std::optional<LogRecord>> read_frame(LogSource& source, const StoreId& store,
                                            uint64_t offset) {
  using Found = std::optional<LogRecord>;
  if (offset + kIoAlign > source.size()) return Found();
  STOKER_ASSIGN(auto block, source.view(offset, kIoAlign));
  Header header;
  std::memcpy(&header, block.data(), sizeof header);
  if (!is_frame_of(header, store, source.size() - offset)) return Found();
  STOKER_ASSIGN(auto frame, source.view(offset, framed_bytes(header.length)));
  if (frame_crc(frame) != header.crc) return Found();
  return Found(LogRecord{offset, offset + frame.size(), header.generation, header.sequence,
                         header.previous_crc, header.crc,
                         frame.subspan(kFrameHeaderBytes, header.length)});
}

Result<std::optional<LogRecord>> find_frame(LogSource& source, const LogIdentity& identity,
                                            uint64_t offset, uint64_t sequence_min) {
  for (; offset + kIoAlign <= source.size(); offset += kIoAlign) {
    STOKER_ASSIGN(auto frame, read_frame(source, identity.store, offset));
    if (frame && frame->generation == identity.generation && frame->sequence >= sequence_min)
      return frame;
  }
  return std::optional<LogRecord>();
}

Result<std::optional<LogScan::Item>> LogScan::next() {
  STOKER_ASSIGN(auto frame, read_frame(source_, identity_.store, cursor_.offset));
  if (frame && frame->generation == identity_.generation &&
      (frame->follows(cursor_) || resynced_)) {
    resynced_ = false;
    cursor_ = frame->next();
    return std::optional<Item>(*frame);
  }
  STOKER_ASSIGN(auto later,
                find_frame(source_, identity_, cursor_.offset + kIoAlign, cursor_.sequence));
  if (!later) return std::optional<Item>();
  const LogGap gap{cursor_.offset, later->offset};
  cursor_.offset = later->offset;
  resynced_ = true;
  return std::optional<Item>(gap);
}

}  // namespace stoker
