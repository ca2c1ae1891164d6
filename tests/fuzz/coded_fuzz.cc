// The parsers of a coded store's shards on any bytes: superblocks, fences, header pages,
// records of the log, table items. They neither crash nor take what breaks a rule of
// docs/formats/coded_store.md for what obeys it.
//
// Input: a byte that says what it is, then the bytes. So that mutations get past the checksums,
// these are set right first.
#include <cstdint>
#include <cstring>
#include <vector>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"
#include "stoker/store/coded/format/format.h"
#include "stoker/store/coded/format/headers.h"
#include "stoker/store/coded/format/log.h"
#include "stoker/store/coded/format/table.h"

namespace {

using namespace stoker;
using namespace stoker::coded;

Shape small_shape() {
  Shape shape;
  shape.k = 20;
  shape.m = 2;
  shape.shards = 22;
  shape.chunk_bytes = kChunkMax;
  shape.segment_bytes = 64 << 10;
  shape.area_bytes = 64 << 10;
  shape.segments = 4;
  shape.slots = 100;
  shape.object_chunk_bytes = 1 << 20;
  return shape;
}

void superblock(std::vector<std::byte> sector) {
  sector.resize(kSuperblockBytes);
  const auto once = decode_superblock(sector);
  std::memcpy(sector.data(), "STOKERC1", 8);
  const uint32_t crc = crc32c(sector.data(), kSuperblockBytes - 4);
  std::memcpy(sector.data() + kSuperblockBytes - 4, &crc, 4);
  const auto mended = decode_superblock(sector);
  for (const auto* each : {&once, &mended}) {
    if (!*each || !**each) continue;
    const std::string again = encode_superblock(***each);
    STOKER_CHECK(decode_superblock(std::as_bytes(std::span(again))).has_value());
  }
}

void fence(std::vector<std::byte> block) {
  block.resize(kBlock);
  static_cast<void>(decode_fence(block));
  std::memcpy(block.data(), "STOKERF1", 8);
  const uint32_t crc = crc32c(block.data(), kSuperblockBytes - 4);
  std::memcpy(block.data() + kSuperblockBytes - 4, &crc, 4);
  const auto mended = decode_fence(block);
  if (!mended) return;
  std::vector<std::byte> again(kBlock);
  encode_fence(*mended, again);
  STOKER_CHECK(again == block);
}

void page(std::vector<std::byte> bytes) {
  const Shape shape = small_shape();
  bytes.resize(header_bytes(shape));
  RawHeaders raw(shape);
  for (size_t position = 0; position < shape.n(); ++position)
    raw.take(shape, StoreId{}, 1, position, bytes);
  for (size_t copy = 0; copy + kBlock <= bytes.size(); copy += kBlock) {
    std::memcpy(bytes.data() + copy, "SKH1", 4);
    std::memset(bytes.data() + copy + 28, 0, 16);
    const uint32_t crc =
        crc32c(bytes.data() + copy + 8, kBlock - 8, crc32c(bytes.data() + copy, 4));
    std::memcpy(bytes.data() + copy + 4, &crc, 4);
  }
  for (size_t position = 0; position < shape.n(); ++position)
    raw.take(shape, StoreId{}, 1, position, bytes);
  const Headers merged = raw.merge(shape);
  STOKER_CHECK(merged.versions.size() == shape.rows() * shape.k);
}

void record(const std::vector<std::byte>& bytes) {
  const Shape shape = small_shape();
  const auto content = decode_payload(shape, bytes);
  // The same payload in a frame, in a segment.
  std::vector<std::byte> segment(shape.segment_bytes);
  LogWriter writer({StoreId{}, uint64_t{1} << 32 | 1}, segment.size());
  if (writer.fits(bytes.size()))
    writer.append(bytes, std::span(segment).first(framed_bytes(bytes.size())));
  read_segment(shape, StoreId{}, 0, 0, 0, segment, [](uint64_t, const FrameContent&) {});
  if (!content) return;
  for (const Item& item : content->items) {
    if (const auto* val = std::get_if<ValItem>(&item))
      STOKER_CHECK(val->chunk < shape.k && val->first + val->crcs.size() <= shape.rows());
    if (const auto* stage = std::get_if<StageItem>(&item))
      STOKER_CHECK(stage->chunk >= shape.k && stage->chunk < shape.n());
  }
}

void table(const std::vector<std::byte>& bytes) {
  const Shape shape = small_shape();
  Slots slots(shape);
  Table objects;
  const auto resolve = [&](uint64_t id, std::vector<uint32_t> in_slots) -> StripePtr {
    auto shards = placement(shape, id);
    if (!slots.take(shards, in_slots)) return nullptr;
    return std::make_shared<Stripe>(id, std::move(shards), std::move(in_slots), slots);
  };
  const std::string_view items(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!objects.apply(shape, items, resolve)) return;
  STOKER_CHECK(objects.image(1 << 10).empty() == objects.objects().empty());
  STOKER_CHECK(objects.memory_bytes(shape) >= objects.objects().size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1 || size > 48 * 1024) return 0;
  const auto* begin = reinterpret_cast<const std::byte*>(data) + 1;
  std::vector<std::byte> bytes(begin, begin + size - 1);
  switch (data[0] % 5) {
    case 0:
      superblock(std::move(bytes));
      break;
    case 1:
      page(std::move(bytes));
      break;
    case 2:
      record(bytes);
      break;
    case 3:
      fence(std::move(bytes));
      break;
    default:
      table(bytes);
  }
  return 0;
}
