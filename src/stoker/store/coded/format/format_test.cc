// The example of docs/formats/coded_store.md is decoded, and encoded to the same bytes.
#include "stoker/store/coded/format/format.h"

#include <gtest/gtest.h>

#include <random>

#include "stoker/base/crc32c.h"
#include "stoker/testing/format_example.h"
#include "stoker/testing/store_harness.h"

namespace stoker::coded {
namespace {

Bytes example(const std::string& name, size_t bytes) {
  return format_example("coded_store.md", name, bytes);
}

StoreId example_store() {
  StoreId id;
  for (size_t i = 0; i < id.size(); ++i) id[i] = static_cast<uint8_t>(0xA0 + i);
  return id;
}

Shape example_shape() {
  Shape shape;
  shape.k = 2;
  shape.m = 1;
  shape.shards = 3;
  shape.chunk_bytes = 64 << 10;
  shape.segment_bytes = 16 << 20;
  shape.area_bytes = 128 << 10;
  shape.segments = 8;
  shape.slots = 12;
  shape.object_chunk_bytes = 1 << 20;
  return shape;
}

// What the example says, and the bytes that it must be.
std::string example_superblock() {
  Superblock super;
  super.shape = example_shape();
  super.shard = 1;
  super.store = example_store();
  super.counter = 6;
  super.confirmed = super.proposed = {3, 7};
  super.incarnation = 0x22222222;
  super.incarnations[0] = 0x11111111;
  super.incarnations[1] = 0x22222222;
  super.incarnations[2] = 0x33333333;
  return encode_superblock(super);
}

Bytes example_page() {
  HeaderPage page;
  page.stripe = make_stamp(3, 1);
  page.counter = 1;
  page.chunk = 2;
  page.parity.resize(example_shape().rows(), {0, {0, 0}, {0, 0}});
  page.parity[0] = {0xC0C0C0C0, {make_stamp(3, 5), 0}, {0xD0D0D0D0, 0}};
  Bytes out(kBlock);
  encode_page(example_shape(), example_store(), page, out);
  return out;
}

Bytes example_frame() {
  const Bytes block(kBlock, std::byte{0x42});
  FrameBuilder frame;
  frame.add(
      ValItem{
          make_stamp(3, 6), false, make_stamp(3, 1), 0, 4, {crc32c(block.data(), block.size())}, 0},
      block);
  std::vector<std::byte> payload(frame.payload_bytes());
  frame.payload({1, 0, 0}, payload);
  LogWriter writer({example_store(), uint64_t{1} << 32 | 0x5EED}, 16 << 20);
  Bytes out(frame.bytes());
  writer.append(payload, out);
  return out;
}

TEST(CodedFormat, TheExampleSuperblock) {
  const std::string mine = example_superblock();
  const auto bytes = example("superblock", kSuperblockBytes);
  ASSERT_EQ(example_text(bytes), example_text(std::as_bytes(std::span(mine))));
  const auto found = decode_superblock(bytes);
  ASSERT_OK(found);
  ASSERT_TRUE(*found);
  EXPECT_EQ((*found)->shape, example_shape());
  EXPECT_EQ((*found)->shard, 1U);
  EXPECT_EQ((*found)->confirmed.number, 3U);
  EXPECT_EQ((*found)->confirmed.live, 7U);
  EXPECT_EQ((*found)->incarnations[2], 0x33333333U);
  EXPECT_EQ((*found)->scrubbed.ended_at, 0U)
      << "as in what was written before there was such a field";
  Superblock scrubbed = **found;
  scrubbed.scrubbed = {1'800'000'000, 3, 1};
  const std::string text = encode_superblock(scrubbed);
  const auto again = decode_superblock(std::as_bytes(std::span(text)));
  ASSERT_TRUE(again && *again);
  EXPECT_EQ((*again)->scrubbed.ended_at, 1'800'000'000U);
  EXPECT_EQ((*again)->scrubbed.found, 3U);
  EXPECT_EQ((*again)->scrubbed.lost, 1U);
}

TEST(CodedFormat, TheExampleFence) {
  const Fence fence{5, 0x1122334455667788};
  Bytes mine(kBlock);
  encode_fence(fence, mine);
  const auto bytes = example("fence", kBlock);
  ASSERT_EQ(example_text(bytes), example_text(mine));
  EXPECT_EQ(decode_fence(bytes), fence);
  for (const size_t at : {0U, 9U, 20U, 200U, 509U, 600U, 4095U}) {
    Bytes damaged = mine;
    damaged[at] ^= std::byte{4};
    EXPECT_EQ(decode_fence(damaged), std::nullopt) << at;
  }
  EXPECT_EQ(decode_fence(Bytes(kBlock)), std::nullopt);
}

TEST(CodedFormat, TheExampleHeaderPage) {
  const auto bytes = example("page", kBlock);
  ASSERT_EQ(example_text(bytes), example_text(example_page()));
  const auto page = decode_page(example_shape(), example_store(), make_stamp(3, 1), 2, 0, bytes);
  ASSERT_TRUE(page);
  EXPECT_EQ(page->parity.size(), 16U);
  EXPECT_EQ(page->parity[0].crc, 0xC0C0C0C0U);
  EXPECT_EQ(page->parity[0].versions[0], make_stamp(3, 5));
  EXPECT_FALSE(decode_page(example_shape(), example_store(), make_stamp(3, 2), 2, 0, bytes))
      << "of another stripe";
}

// Loading the headers of a stripe decodes hundreds of such rows.
TEST(CodedFormat, ADecodedHeaderPageTakesMemoryOnceForEachList) {
  Shape shape = example_shape();
  shape.k = 6;
  shape.m = 3;
  shape.shards = 9;
  for (const size_t chunk : {size_t{0}, shape.k}) {
    HeaderPage page;
    page.stripe = make_stamp(3, 1);
    page.counter = 1;
    page.chunk = chunk;
    const size_t rows = std::min(shape.rows_per_page(), shape.rows());
    if (chunk < shape.k) page.data.resize(rows);
    if (chunk >= shape.k)
      page.parity.assign(rows, {1, std::vector<Stamp>(shape.k), std::vector<uint32_t>(shape.k)});
    Bytes bytes(kBlock);
    encode_page(shape, example_store(), page, bytes);
    const auto found = decode_page(shape, example_store(), page.stripe, chunk, 0, bytes);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->data.size() + found->parity.size(), rows);
    EXPECT_EQ(found->data.capacity() + found->parity.capacity(), rows) << "none grew";
    for (const ParityEntry& entry : found->parity)
      EXPECT_EQ(entry.versions.capacity() + entry.crcs.capacity(), 2 * shape.k);
  }
}

TEST(CodedFormat, TheExampleFrame) {
  auto bytes = example("frame", 2 * kBlock);
  std::fill(bytes.begin() + kBlock, bytes.end(), std::byte{0x42});
  const Bytes mine = example_frame();
  ASSERT_EQ(example_text(std::span(bytes).first(kBlock)),
            example_text(std::span(mine).first(kBlock)));
  MemoryLogSource source(bytes);
  const auto frame = read_frame(source, example_store(), 0);
  ASSERT_TRUE(frame && *frame);
  const auto content = decode_payload(example_shape(), (*frame)->payload);
  ASSERT_OK(content);
  EXPECT_EQ(content->home, (FrameHome{1, 0, 0}));
  EXPECT_EQ(content->blocks_at, kBlock);
  const auto& val = std::get<ValItem>(content->items.at(0));
  EXPECT_EQ(val.stamp, make_stamp(3, 6));
  EXPECT_EQ(val.first, 4U);
  EXPECT_EQ(val.crcs.at(0), crc32c(bytes.data() + kBlock, kBlock));
}

// Cut or changed anywhere, a payload is refused or still obeys the rules; it never reads beyond its
// end.
TEST(CodedFormat, DamagedPayloadsAreRefusedOrObeyTheRules) {
  const Shape shape = example_shape();
  const Bytes block(2 * kBlock, std::byte{7});
  FrameBuilder builder;
  builder.add(ValItem{1, true, 2, 1, 3, {5, 6}, 0}, block);
  builder.add(CommitItem{9, "items"});
  builder.add(shape, StageItem{4, 2, 2, {{1, {7, {1, 2}, {3, 4}}}}, 0},
              std::span(block).first(kBlock));
  builder.add(FoldItem{4, 2, {{1, 0, 8}}});
  builder.add(RoundItem{
      12, 8, {7, 0, 5}, {{1, true, 2, 1, 3, {5, 6}, 0}, {3, false, 2, 0, 9, {4}, 0}}, {11, 12}});
  std::vector<std::byte> payload(builder.payload_bytes());
  builder.payload({0, 0, 0}, payload);
  const auto whole = decode_payload(shape, payload);
  ASSERT_OK(whole);
  ASSERT_EQ(whole->items.size(), 5U);
  const auto& round = std::get<RoundItem>(whole->items[4]);
  EXPECT_EQ(round.round, 12U);
  EXPECT_EQ(round.image, 8U);
  EXPECT_EQ(round.shards, (ShardsOfRounds{7, 0, 5}));
  ASSERT_EQ(round.vals.size(), 2U);
  EXPECT_TRUE(round.vals[0].needs_commit);
  EXPECT_EQ(round.vals[1].crcs, std::vector<uint32_t>{4});
  EXPECT_EQ(round.commits, (std::vector<Stamp>{11, 12}));
  std::mt19937_64 random(1);
  uint64_t refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    auto damaged = payload;
    for (uint64_t flips = random() % 3 + 1; flips > 0; --flips)
      damaged[random() % 360] ^= static_cast<std::byte>(1U << random() % 8);
    if (random() % 8 == 0) damaged.resize(random() % damaged.size());
    const auto content = decode_payload(shape, damaged);
    if (!content) {
      EXPECT_EQ(content.error().code, Code::corruption);
      ++refused;
      continue;
    }
    for (const Item& item : content->items) {
      if (const auto* val = std::get_if<ValItem>(&item)) {
        EXPECT_LT(val->chunk, shape.k);
        EXPECT_LE(val->first + val->crcs.size(), shape.rows());
      }
      if (const auto* told = std::get_if<RoundItem>(&item)) {
        for (const ValItem& val : told->vals) EXPECT_LE(val.first + val.crcs.size(), shape.rows());
      }
    }
  }
  EXPECT_GT(refused, 1000U);
}

}  // namespace
}  // namespace stoker::coded
