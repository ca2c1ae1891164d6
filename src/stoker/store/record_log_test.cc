#include "stoker/store/record_log.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "stoker/base/crc32c.h"

namespace stoker {
namespace {

LogIdentity identity(uint64_t generation = 7) {
  LogIdentity id;
  for (size_t i = 0; i < id.store.size(); ++i) id.store[i] = static_cast<uint8_t>(i * 3 + 1);
  id.generation = generation;
  return id;
}

// An area in memory and the log written to it.
struct Area {
  explicit Area(size_t blocks, uint64_t generation = 7)
      : bytes(blocks * kIoAlign), writer(identity(generation), bytes.size()) {}
  uint64_t add(const std::string& payload) {
    const uint64_t at = writer.cursor().offset;
    writer.append(std::as_bytes(std::span(payload)),
                  std::span(bytes).subspan(at, framed_bytes(payload.size())));
    return at;
  }
  std::vector<std::byte> bytes;
  LogWriter writer;
};

// "a b [8192,12288) c": payloads and gaps.
std::string scanned(std::span<const std::byte> bytes, uint64_t generation = 7) {
  MemoryLogSource source(bytes);
  LogScan scan(source, identity(generation));
  std::string text;
  for (;;) {
    const auto item = scan.next();
    if (!item) return "error";
    if (!*item) return text;
    if (!text.empty()) text += ' ';
    if (const auto* gap = std::get_if<LogGap>(&**item)) {
      text += "[" + std::to_string(gap->offset) + "," + std::to_string(gap->end) + ")";
    } else {
      const auto payload = std::get<LogRecord>(**item).payload;
      text += std::string(reinterpret_cast<const char*>(payload.data()),
                          std::min<size_t>(payload.size(), 3));
    }
  }
}

TEST(RecordLog, ScansWhatWasWrittenInOrder) {
  Area area(16);
  EXPECT_EQ(scanned(area.bytes), "");
  EXPECT_EQ(area.add("a"), 0U);
  EXPECT_EQ(area.add(std::string(5000, 'b')), 4096U);
  EXPECT_EQ(area.add("c"), 4096U * 3);
  EXPECT_EQ(scanned(area.bytes), "a bbb c");
}

TEST(RecordLog, KnowsWhatFits) {
  Area area(3);
  EXPECT_TRUE(area.writer.fits(3 * kIoAlign - kFrameHeaderBytes));
  EXPECT_FALSE(area.writer.fits(3 * kIoAlign - kFrameHeaderBytes + 1));
  area.add(std::string(2 * kIoAlign - kFrameHeaderBytes, 'x'));
  EXPECT_TRUE(area.writer.fits(10));
  area.add("y");
  EXPECT_FALSE(area.writer.fits(0));
  EXPECT_EQ(scanned(area.bytes), "xxx y");
}

TEST(RecordLog, FramesOfAnOlderGenerationAreNotSeen) {
  Area area(8, 1);
  for (const char* payload : {"old1", "old2", "old3", "old4"}) area.add(payload);
  area.writer = LogWriter(identity(2), area.bytes.size());
  area.add("new");
  EXPECT_EQ(scanned(area.bytes, 2), "new");
  // whoever asks for it is told what is missing
  EXPECT_EQ(scanned(area.bytes, 1), "[0,4096) old old old");
}

TEST(RecordLog, ATornEndIsTheEnd) {
  Area area(8);
  area.add("a");
  const uint64_t at = area.add(std::string(6000, 'b'));
  // every sector lost in its turn
  for (uint64_t from = at; from < at + 2 * kIoAlign; from += 512) {
    auto torn = area.bytes;
    std::memset(torn.data() + from, 0, 512);
    const bool padding = from >= at + kFrameHeaderBytes + 6000;
    EXPECT_EQ(scanned(torn), padding ? "a bbb" : "a") << from;
  }
}

TEST(RecordLog, ADamagedFrameWithALaterOneIsAGapAndNeverTheEnd) {
  Area area(8);
  area.add("a");
  area.add("b");
  area.add("c");
  for (size_t bit = 0; bit < kIoAlign * 8; bit += 61) {
    auto flipped = area.bytes;
    flipped[kIoAlign + bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_EQ(scanned(flipped), "a [4096,8192) c") << bit;
  }
}

TEST(RecordLog, AnotherStoresFramesAreNotSeen) {
  Area area(4);
  area.add("a");
  MemoryLogSource source(area.bytes);
  LogIdentity other = identity();
  other.store[0] ^= 1;
  LogScan scan(source, other);
  const auto item = scan.next();
  ASSERT_TRUE(item);
  EXPECT_FALSE(item->has_value());
}

TEST(RecordLog, AFrameThatClaimsMoreThanTheAreaIsNone) {
  Area area(4);
  area.add("a");
  const uint32_t length = 0xFFFFFFF0;
  std::memcpy(area.bytes.data() + 4, &length, sizeof length);
  EXPECT_EQ(scanned(area.bytes), "");
}

TEST(RecordLog, AFrameInTheWrongChainIsNotTheNext) {
  Area area(4);
  area.add("a");
  Area other(4);
  other.add("z");
  other.add("y");  // same generation and sequence, another frame before it
  std::memcpy(area.bytes.data() + kIoAlign, other.bytes.data() + kIoAlign, kIoAlign);
  EXPECT_EQ(scanned(area.bytes), "a");
}

}  // namespace
}  // namespace stoker
