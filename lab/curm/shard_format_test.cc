// The example of docs/formats/curm_shards.md is decoded, and encoded to the same bytes.
#include "curm/shard_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "stoker/base/crc32c.h"
#include "stoker/testing/format_example.h"

namespace stoker::curm {
namespace {

using Bytes = std::vector<std::byte>;

Bytes example(const std::string& name, size_t bytes) {
  return format_example("curm_shards.md", name, bytes);
}

StoreId id_from(uint8_t first) {
  StoreId id;
  for (size_t i = 0; i < id.size(); ++i) id[i] = static_cast<uint8_t>(first + i);
  return id;
}

ShardLayout example_layout() { return {{2, 1, 3, 64 << 10, 5}, 32 << 10, 16 << 20}; }

TEST(ShardFormat, TheHeadOfTheDocument) {
  const NodeHead head{example_layout(), id_from(0xA0), id_from(0xB0), 1, 6, 3, 3, true};
  const std::string bytes = encode_head(head);
  const Bytes encoded(reinterpret_cast<const std::byte*>(bytes.data()),
                      reinterpret_cast<const std::byte*>(bytes.data()) + bytes.size());
  EXPECT_EQ(example_text(encoded), example_text(example("head", kHeadBytes)));
  const auto found = decode_head(example("head", kHeadBytes));
  ASSERT_TRUE(found && *found);
  EXPECT_EQ((*found)->layout.geometry.stripes, 5U);
  EXPECT_EQ((*found)->confirmed, 3U);
  EXPECT_TRUE((*found)->member);
}

TEST(ShardFormat, TheFormatBeforeIsReadAndNoOther) {
  Bytes sector = example("head", kHeadBytes);
  const auto of_version = [&](uint8_t version) {
    sector[8] = static_cast<std::byte>(version);
    const uint32_t crc = crc32c(sector.data(), kHeadBytes - 4);
    std::memcpy(sector.data() + kHeadBytes - 4, &crc, 4);
    return decode_head(sector);
  };
  EXPECT_TRUE(of_version(2) && *of_version(2));
  EXPECT_THAT(of_version(1).error().what, testing::HasSubstr("replay again, into a new folder"));
  EXPECT_THAT(of_version(4).error().what, testing::HasSubstr("use a newer one"));
}

TEST(ShardFormat, TheHeaderOfTheDocument) {
  const ShardLayout layout = example_layout();
  ChunkHeader header{2, 7, std::vector<BlockMark>(layout.blocks())};
  header.blocks[1] = 0xC1C1C1C1;
  header.said = {7, 2};
  Bytes encoded(layout.header_bytes());
  encode_header(layout, id_from(0xB0), {4, 2}, header, encoded);
  EXPECT_EQ(example_text(encoded), example_text(example("header", encoded.size())));
  const auto found =
      decode_header(layout, id_from(0xB0), {4, 2}, example("header", encoded.size()));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->folded, 7U);
  EXPECT_EQ(found->blocks, header.blocks);
  EXPECT_EQ(found->said, header.said);
  EXPECT_FALSE(decode_header(layout, id_from(0xB0), {4, 1}, encoded));
  EXPECT_FALSE(decode_header(layout, id_from(0xB1), {4, 2}, encoded));
}

TEST(ShardFormat, TheFrameOfTheDocument) {
  Record record{
      Record::Kind::value, 2, 8, {4, 0}, {{4096, Value::of(Bytes(4096, std::byte{0x42}))}}};
  record.scheme = 5;
  record.needs_commit = true;
  ShardFrame frame;
  frame.add(record);
  const FrameHead head{{1, false, 0, kFramesAt}, 6, {1, kFramesAt}, 2};
  Bytes encoded(frame.bytes());
  LogWriter writer({id_from(0xB0), uint64_t{1} << 32 | 0x5eed}, 16 << 20,
                   {kFramesAt, 1, 0x01020304});
  writer.append(frame.payload(head), encoded);
  Bytes said = example("frame", encoded.size());
  std::fill(said.begin() + 4096, said.end(), std::byte{0x42});
  EXPECT_EQ(example_text(Bytes(encoded.begin(), encoded.begin() + 4096)),
            example_text(Bytes(said.begin(), said.begin() + 4096)));
  const auto found = decode_frame(example_layout(), std::span(said).subspan(kFrameHeaderBytes));
  ASSERT_TRUE(found) << found.error().message();
  ASSERT_EQ(found->records.size(), 1U);
  EXPECT_EQ(found->head.place, head.place);
  EXPECT_EQ(found->head.durable, head.durable);
  EXPECT_EQ(found->head.segments, 2U);
  EXPECT_EQ(found->records[0].payload_at, 4096U);
  EXPECT_EQ(found->records[0].record.scheme, 5);
  EXPECT_TRUE(found->records[0].record.needs_commit);
  EXPECT_EQ(found->records[0].record.ranges[0].value.bytes()[7], std::byte{0x42});
}

TEST(ShardFormat, RecordsComeBackAsTheyWere) {
  std::mt19937_64 random(7);
  const ShardLayout layout = example_layout();
  for (int i = 0; i < 200; ++i) {
    ShardFrame frame;
    std::vector<Record> records;
    for (uint64_t n = random() % 4; n > 0; --n) {
      Record& record = records.emplace_back();
      record.kind = static_cast<Record::Kind>(random() % 7);
      record.epoch = random();
      record.seq = random();
      record.chunk = {random() % 5, static_cast<int>(random() % 3)};
      for (auto* ranges : {&record.ranges, &record.before}) {
        for (uint64_t r = random() % 3; r > 0; --r) {
          const uint64_t bytes = random() % 9000;
          Bytes content(bytes);
          for (std::byte& each : content) each = static_cast<std::byte>(random());
          ranges->push_back({random() % ((64 << 10) - bytes), Value::of(std::move(content))});
        }
      }
      for (uint64_t d = random() % 3; d > 0; --d) record.dropped.push_back(random());
      EXPECT_EQ(frame.bytes_with(record), [&] {
        ShardFrame with = frame;
        with.add(record);
        return with.bytes();
      }());
      frame.add(record);
    }
    const auto found = decode_frame(layout, frame.payload({{2, true, 1, 0}, 5, {3, 4}, 6}));
    ASSERT_TRUE(found) << found.error().message();
    ASSERT_EQ(found->records.size(), records.size());
    for (size_t n = 0; n < records.size(); ++n) {
      const Record& read = found->records[n].record;
      EXPECT_EQ(read.kind, records[n].kind);
      EXPECT_EQ(read.dropped, records[n].dropped);
      ASSERT_EQ(read.before.size(), records[n].before.size());
      for (size_t r = 0; r < read.before.size(); ++r)
        EXPECT_TRUE(std::equal(
            read.before[r].value.bytes().begin(), read.before[r].value.bytes().end(),
            records[n].before[r].value.bytes().begin(), records[n].before[r].value.bytes().end()));
    }
  }
}

TEST(ShardFormat, EveryChunkHasASlotOfItsOwn) {
  const ShardLayout layout{{4, 2, 7, 8192, 40}, 8192, 1 << 20};
  ASSERT_EQ(layout.problem(), "");
  std::set<std::tuple<NodeId, bool, uint64_t>> taken;
  for (uint64_t stripe = 0; stripe < 40; ++stripe) {
    for (int position = 0; position < 6; ++position) {
      const Chunk chunk{stripe, position};
      const NodeId node = layout.geometry.node(chunk);
      EXPECT_TRUE(taken.insert({node, layout.is_data(chunk), layout.slot(chunk)}).second);
      EXPECT_LT(layout.slot(chunk), layout.slots(layout.is_data(chunk)));
      EXPECT_EQ(layout.chunk_in(node, layout.is_data(chunk), layout.slot(chunk)), chunk);
    }
  }
}

}  // namespace
}  // namespace stoker::curm
