// The parsers of a curm node's files on any bytes: heads, chunk headers, frames of records. They
// neither crash nor take what breaks a rule of docs/formats/curm_shards.md for what obeys it.
//
// Input: a byte that says what it is, then the bytes. So that mutations get past the checksums,
// these are set right as well.
#include <cstdint>
#include <cstring>
#include <vector>

#include "curm/shard_format.h"
#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"

namespace {

using namespace stoker;
using namespace stoker::curm;

ShardLayout small_layout() { return {{4, 2, 7, 64 << 10, 9}, 32 << 10, 1 << 20}; }

void head(std::vector<std::byte> sector) {
  sector.resize(kHeadBytes);
  const auto once = decode_head(sector);
  std::memcpy(sector.data(), "STOKERU1", 8);
  const uint32_t crc = crc32c(sector.data(), kHeadBytes - 4);
  std::memcpy(sector.data() + kHeadBytes - 4, &crc, 4);
  const auto mended = decode_head(sector);
  for (const auto* each : {&once, &mended}) {
    if (!*each || !**each) continue;
    STOKER_CHECK((**each)->layout.problem().empty());
    const std::string again = encode_head(***each);
    STOKER_CHECK(decode_head(std::as_bytes(std::span(again))).has_value());
  }
}

void header(std::vector<std::byte> copy) {
  const ShardLayout layout = small_layout();
  copy.resize(layout.header_bytes());
  const Chunk chunk{3, 1};
  static_cast<void>(decode_header(layout, StoreId{}, chunk, copy));
  std::memcpy(copy.data(), "SKU1", 4);
  const uint64_t stripe = chunk.stripe;
  std::memcpy(copy.data() + 8, &stripe, 8);
  std::memset(copy.data() + 32, 0, 16);
  const uint16_t position = 1;
  std::memcpy(copy.data() + 48, &position, 2);
  const uint32_t crc = crc32c(copy.data() + 8, copy.size() - 8, crc32c(copy.data(), 4));
  std::memcpy(copy.data() + 4, &crc, 4);
  const auto found = decode_header(layout, StoreId{}, chunk, copy);
  if (!found) return;
  STOKER_CHECK(found->blocks.size() == layout.blocks() && found->counter != 0);
  encode_header(layout, StoreId{}, chunk, *found, copy);
  const auto again = decode_header(layout, StoreId{}, chunk, copy);
  STOKER_CHECK(again && again->said == found->said && again->folded == found->folded &&
               again->blocks == found->blocks);
}

void frame(const std::vector<std::byte>& bytes) {
  const ShardLayout layout = small_layout();
  const auto content = decode_frame(layout, bytes);
  if (!content) return;
  ShardFrame again;
  for (const FrameRecord& each : content->records) {
    STOKER_CHECK(each.record.chunk.stripe < layout.geometry.stripes &&
                 each.record.chunk.position < 6);
    STOKER_CHECK(each.crcs.size() * kShardBlock == stored_bytes(each.record));
    for (const auto* ranges : {&each.record.ranges, &each.record.before}) {
      for (const Record::Range& range : *ranges)
        STOKER_CHECK(range.offset + range.value.size() <= layout.geometry.chunk_bytes);
    }
    again.add(each.record);
  }
  STOKER_CHECK(decode_frame(layout, again.payload(content->head)).has_value());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1 || size > 48 * 1024) return 0;
  const auto* begin = reinterpret_cast<const std::byte*>(data) + 1;
  std::vector<std::byte> bytes(begin, begin + size - 1);
  switch (data[0] % 3) {
    case 0:
      head(std::move(bytes));
      break;
    case 1:
      header(std::move(bytes));
      break;
    default:
      frame(bytes);
  }
  return 0;
}
