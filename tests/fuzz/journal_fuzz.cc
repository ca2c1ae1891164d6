// The reader of journal areas and volume headers on any bytes: it neither crashes nor takes damage
// for a map that cannot be.
//
// Input: the content of an area. So that mutations get past the checksums, frames whose magic is
// right have their CRC and chain set right first.
#include <cstdint>
#include <cstring>
#include <vector>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"
#include "stoker/store/local/allocator.h"
#include "stoker/store/local/format.h"
#include "stoker/store/local/journal.h"
#include "stoker/store/local/map.h"
#include "stoker/store/record_log.h"

namespace {

using namespace stoker;
using namespace stoker::local;

constexpr uint64_t kGeneration = 1;

// Makes the frames that follow each other from offset 0 intact; they keep their payload.
void mend(std::vector<std::byte>& area) {
  uint32_t previous = 0;
  uint64_t sequence = 0;
  for (size_t at = 0; at + kIoAlign <= area.size();) {
    uint32_t magic = 0;
    uint32_t length = 0;
    std::memcpy(&magic, area.data() + at, 4);
    std::memcpy(&length, area.data() + at + 4, 4);
    const uint64_t bytes = framed_bytes(length);
    if (magic != kFrameMagic || bytes > area.size() - at) return;
    std::memset(area.data() + at + 8, 0, 16);
    std::memcpy(area.data() + at + 24, &kGeneration, 8);
    std::memcpy(area.data() + at + 32, &sequence, 8);
    std::memcpy(area.data() + at + 40, &previous, 4);
    uint32_t crc = crc32c(area.data() + at, kFrameCrcAt);
    crc = crc32c(area.data() + at + kFrameHeaderBytes, bytes - kFrameHeaderBytes, crc);
    std::memcpy(area.data() + at + kFrameCrcAt, &crc, 4);
    previous = crc;
    ++sequence;
    at += bytes;
  }
}

void read_area(std::span<const std::byte> area) {
  MemoryLogSource source(area);
  LogScan scan(source, {StoreId{}, kGeneration});
  Map map(MapLimits{{{16, 4096}, {16, 4096}}, 4096});
  FrameReader reader(map);
  uint64_t end = 0;
  for (auto item = *scan.next(); item; item = *scan.next()) {
    const auto* record = std::get_if<LogRecord>(&*item);
    const uint64_t from = record != nullptr ? record->offset : std::get<LogGap>(*item).offset;
    STOKER_CHECK(from == end);  // frames and gaps tile the area
    end = record != nullptr ? record->end : std::get<LogGap>(*item).end;
    STOKER_CHECK(end > from && end <= area.size());
    if (record == nullptr || !reader.apply(record->payload)) break;
  }
  Allocator allocator(map.limits());
  if (!allocator.take_all(map)) return;
  uint64_t named = 0;
  map.each_extent([&named](const Extent& extent) { named += extent.blocks * kBlock; });
  STOKER_CHECK(named + allocator.free_bytes() == allocator.capacity_bytes());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 256 * 1024) return 0;
  // Blocks are mostly padding: an input gives the first bytes of each, after its count of blocks.
  std::vector<std::byte> area;
  for (size_t at = 0; at + 3 <= size;) {
    const size_t bytes = std::min<size_t>(
        size - at - 3, static_cast<size_t>(data[at]) | static_cast<size_t>(data[at + 1]) << 8);
    const size_t blocks =
        std::max<size_t>(1, std::max<size_t>(data[at + 2] % 4, (bytes + kIoAlign - 1) / kIoAlign));
    const size_t to = area.size();
    area.resize(to + blocks * kIoAlign);
    std::memcpy(area.data() + to, data + at + 3, bytes);
    at += 3 + bytes;
  }
  read_area(area);
  mend(area);
  read_area(area);
  std::vector<std::byte> sector(kHeaderBytes);
  std::memcpy(sector.data(), data, std::min(size, sector.size()));
  if (const auto header = decode_header(sector); header && *header) {
    const std::string again = encode_header(**header);
    STOKER_CHECK(decode_header(std::as_bytes(std::span(again))).has_value());
  }
  return 0;
}
