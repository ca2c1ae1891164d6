// The bytes of docs/formats/coded_store.md.
#include "stoker/store/coded/format/format.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"

namespace stoker::coded {
namespace {

constexpr std::string_view kSuperMagic = "STOKERC1";
constexpr uint32_t kFormatVersion = 4;
constexpr std::string_view kFenceMagic = "STOKERF1";
constexpr uint32_t kPageMagic = 0x31484B53;  // "SKH1"
constexpr size_t kPageHeadBytes = 64;
constexpr size_t kPayloadHeadBytes = 16;
enum Kind : uint8_t { kVal = 1, kCommit = 2, kStage = 3, kFold = 4, kRound = 5 };

Error broken(const std::string& what) { return fail(Code::corruption, "{}", what); }

bool possible(const Superblock& super) {
  const Shape& shape = super.shape;
  const bool code = shape.k >= 1 && shape.m >= 1 && shape.n() <= 32 && shape.shards >= shape.n() &&
                    shape.shards <= kShardsMax && super.shard < shape.shards;
  const bool chunk = is_aligned(shape.chunk_bytes, kBlock) && shape.chunk_bytes >= kChunkMin &&
                     shape.chunk_bytes <= kChunkMax;
  // Members are shards that there are, and what is confirmed was proposed before.
  const auto epoch = [&shape](const Epoch& each) {
    return each.number < uint64_t{1} << (64 - kNumberBits) &&
           (shape.shards == kShardsMax || each.live >> shape.shards == 0);
  };
  if (!code || !epoch(super.confirmed) || !epoch(super.proposed) ||
      super.confirmed.number > super.proposed.number)
    return false;
  const auto blocks = [](uint64_t bytes) {
    return bytes != 0 && is_aligned(bytes, kBlock) && bytes < uint64_t{1} << 40;
  };
  return chunk && blocks(shape.segment_bytes) && blocks(shape.area_bytes) && shape.segments >= 4 &&
         shape.segments <= 65536 && shape.slots > 0;
}

void put_entry(ByteWriter& out, const ParityEntry& entry) {
  out.put(entry.crc);
  for (const Stamp version : entry.versions) out.put(version);
  for (const uint32_t crc : entry.crcs) out.put(crc);
}

ParityEntry get_entry(ByteReader& in, size_t k) {
  ParityEntry entry{in.get<uint32_t>(), std::vector<Stamp>(k), std::vector<uint32_t>(k)};
  for (Stamp& version : entry.versions) version = in.get<uint64_t>();
  for (uint32_t& crc : entry.crcs) crc = in.get<uint32_t>();
  return entry;
}

uint32_t page_crc(std::span<const std::byte> page) {
  return crc32c(page.data() + 8, page.size() - 8, crc32c(page.data(), 4));
}

}  // namespace

bool Shape::writable(ShardSet live) const {
  const auto count = static_cast<size_t>(std::popcount(live));
  return count + m >= shards && 2 * count > shards;
}

std::string encode_superblock(const Superblock& super) {
  const Shape& shape = super.shape;
  ByteWriter out;
  for (const char c : kSuperMagic) out.put(c);
  out.put(kFormatVersion);
  for (const size_t value : {shape.k, shape.m, shape.shards, super.shard})
    out.put(static_cast<uint8_t>(value));
  for (const uint8_t byte : super.store) out.put(byte);
  out.put(super.counter);
  for (const Epoch& epoch : {super.confirmed, super.proposed}) {
    out.put(epoch.number);
    out.put(epoch.live);
  }
  out.put(super.log_floor);
  out.put(shape.chunk_bytes);
  out.put(shape.segment_bytes);
  out.put(shape.area_bytes);
  out.put(shape.segments);
  out.put(shape.slots);
  out.put(shape.object_chunk_bytes);
  out.put(super.incarnation);
  for (const uint32_t each : super.incarnations) out.put(each);
  out.put(super.scrubbed.ended_at);
  out.put(super.scrubbed.found);
  out.put(super.scrubbed.lost);
  for (const uint64_t each : {uint64_t{0}, uint64_t{0}, super.first_round}) out.put(each);
  std::string bytes = out.take();
  STOKER_CHECK(bytes.size() <= kSuperblockBytes - 4);
  bytes.resize(kSuperblockBytes - 4);
  const uint32_t crc = crc32c(bytes.data(), bytes.size());
  bytes.append(reinterpret_cast<const char*>(&crc), 4);
  return bytes;
}

Result<std::optional<Superblock>> decode_superblock(std::span<const std::byte> sector) {
  STOKER_CHECK(sector.size() >= kSuperblockBytes);
  using Found = std::optional<Superblock>;
  if (std::memcmp(sector.data(), kSuperMagic.data(), kSuperMagic.size()) != 0) return Found();
  uint32_t crc = 0;
  std::memcpy(&crc, sector.data() + kSuperblockBytes - 4, 4);
  if (crc != crc32c(sector.data(), kSuperblockBytes - 4)) return Found();
  ByteReader in(sector.subspan(kSuperMagic.size(), kSuperblockBytes - kSuperMagic.size()));
  if (const auto version = in.get<uint32_t>(); version == 0 || version > kFormatVersion) {
    return fail(Code::mismatch, "a superblock of format version {} (this program knows 1 to {})",
                version, kFormatVersion);
  }
  Superblock super;
  Shape& shape = super.shape;
  for (size_t* value : {&shape.k, &shape.m, &shape.shards, &super.shard})
    *value = in.get<uint8_t>();
  for (uint8_t& byte : super.store) byte = in.get<uint8_t>();
  super.counter = in.get<uint64_t>();
  for (Epoch* epoch : {&super.confirmed, &super.proposed}) {
    epoch->number = in.get<uint64_t>();
    epoch->live = in.get<uint64_t>();
  }
  super.log_floor = in.get<uint64_t>();
  shape.chunk_bytes = in.get<uint32_t>();
  shape.segment_bytes = in.get<uint32_t>();
  shape.area_bytes = in.get<uint64_t>();
  shape.segments = in.get<uint32_t>();
  shape.slots = in.get<uint32_t>();
  shape.object_chunk_bytes = in.get<uint32_t>();
  super.incarnation = in.get<uint32_t>();
  for (uint32_t& each : super.incarnations) each = in.get<uint32_t>();
  super.scrubbed.ended_at = in.get<uint64_t>();
  super.scrubbed.found = in.get<uint32_t>();
  super.scrubbed.lost = in.get<uint32_t>();
  static_cast<void>(in.get<uint64_t>());
  static_cast<void>(in.get<uint64_t>());
  super.first_round = in.get<uint64_t>();
  if (!in.ok() || !possible(super))
    return broken(
        "a superblock that is intact and says what cannot be: it is damaged, or another program "
        "wrote it");
  return Found(super);
}

void encode_fence(const Fence& fence, std::span<std::byte> block) {
  STOKER_CHECK(block.size() == kBlock);
  ByteWriter out;
  for (const char c : kFenceMagic) out.put(c);
  out.put(fence.number);
  out.put(fence.writer);
  std::string bytes = out.take();
  bytes.resize(kSuperblockBytes - 4);
  const uint32_t crc = crc32c(bytes.data(), bytes.size());
  std::memset(block.data(), 0, block.size());
  std::memcpy(block.data(), bytes.data(), bytes.size());
  std::memcpy(block.data() + bytes.size(), &crc, 4);
}

std::optional<Fence> decode_fence(std::span<const std::byte> block) {
  STOKER_CHECK(block.size() == kBlock);
  if (std::memcmp(block.data(), kFenceMagic.data(), kFenceMagic.size()) != 0) return {};
  std::array<std::byte, kBlock> again{};
  ByteReader in(block.subspan(kFenceMagic.size(), 16));
  const Fence fence{in.get<uint64_t>(), in.get<uint64_t>()};
  encode_fence(fence, again);
  // all of it: nothing else may stand there. None is the highest: there is always a next one.
  if (std::memcmp(block.data(), again.data(), kBlock) != 0 || ~fence.number == 0) return {};
  return fence;
}

void encode_page(const Shape& shape, const StoreId& store, const HeaderPage& page,
                 std::span<std::byte> out) {
  STOKER_CHECK(out.size() == kBlock);
  ByteWriter head;
  head.put(kPageMagic);
  head.put(uint32_t{0});
  head.put(page.stripe);
  head.put(page.counter);
  head.put(static_cast<uint16_t>(page.chunk));
  head.put(static_cast<uint16_t>(page.page));
  for (const uint8_t byte : store) head.put(byte);
  std::string bytes = head.take();
  bytes.resize(kPageHeadBytes);
  ByteWriter entries;
  if (page.chunk < shape.k) {
    for (const DataEntry& entry : page.data) {
      entries.put(entry.version);
      entries.put(entry.crc);
    }
  } else {
    for (const ParityEntry& entry : page.parity) put_entry(entries, entry);
  }
  bytes += entries.bytes();
  STOKER_CHECK(bytes.size() <= kBlock);
  std::memset(out.data(), 0, kBlock);
  std::memcpy(out.data(), bytes.data(), bytes.size());
  const uint32_t crc = page_crc(out);
  std::memcpy(out.data() + 4, &crc, 4);
}

std::optional<uint64_t> page_counter(const StoreId& store, uint64_t stripe, size_t chunk,
                                     size_t page, std::span<const std::byte> bytes) {
  STOKER_CHECK(bytes.size() == kBlock);
  ByteReader in(bytes);
  if (in.get<uint32_t>() != kPageMagic || in.get<uint32_t>() != page_crc(bytes)) return {};
  const auto of_stripe = in.get<uint64_t>();
  const auto counter = in.get<uint64_t>();
  const auto of_chunk = in.get<uint16_t>();
  const auto number = in.get<uint16_t>();
  const auto id = in.get_bytes(store.size());
  if (of_stripe != stripe || of_chunk != chunk || number != page ||
      std::memcmp(id.data(), store.data(), store.size()) != 0)
    return {};
  return counter;
}

std::optional<HeaderPage> decode_page(const Shape& shape, const StoreId& store, uint64_t stripe,
                                      size_t chunk, size_t page, std::span<const std::byte> bytes) {
  const auto counter = page_counter(store, stripe, chunk, page, bytes);
  if (!counter) return {};
  HeaderPage found{stripe, *counter, chunk, page, {}, {}};
  ByteReader in(bytes.subspan(kPageHeadBytes));
  const size_t rows = std::min(shape.rows_per_page(), shape.rows() - page * shape.rows_per_page());
  chunk < shape.k ? found.data.reserve(rows) : found.parity.reserve(rows);
  for (size_t row = 0; row < rows; ++row) {
    if (chunk >= shape.k) {
      found.parity.push_back(get_entry(in, shape.k));
    } else {
      DataEntry& entry = found.data.emplace_back();
      entry.version = in.get<uint64_t>();
      entry.crc = in.get<uint32_t>();
    }
  }
  return found;
}

namespace {

void put_val(ByteWriter& out, const ValItem& item) {
  STOKER_CHECK(!item.crcs.empty());
  out.put(item.stamp);
  out.put(static_cast<uint8_t>(item.needs_commit));
  out.put(item.stripe);
  out.put(static_cast<uint8_t>(item.chunk));
  out.put(static_cast<uint32_t>(item.first));
  out.put(static_cast<uint32_t>(item.crcs.size()));
  for (const uint32_t crc : item.crcs) out.put(crc);
}

}  // namespace

void FrameBuilder::add(const RoundItem& item) {
  items_.put(uint8_t{kRound});
  items_.put(item.round);
  items_.put(item.image);
  for (const ShardSet each : item.shards) items_.put(each);
  items_.put(static_cast<uint32_t>(item.vals.size()));
  for (const ValItem& val : item.vals) put_val(items_, val);
  items_.put(static_cast<uint32_t>(item.commits.size()));
  for (const Stamp stamp : item.commits) items_.put(stamp);
}

void FrameBuilder::add(const ValItem& item, std::span<const std::byte> blocks) {
  STOKER_CHECK(blocks.size() == item.crcs.size() * kBlock);
  items_.put(uint8_t{kVal});
  put_val(items_, item);
  blocks_.push_back(blocks);
  block_count_ += item.crcs.size();
}

void FrameBuilder::add(const CommitItem& item) {
  items_.put(uint8_t{kCommit});
  items_.put(item.stamp);
  items_.put_string(item.items);
}

void FrameBuilder::add(const Shape& shape, const StageItem& item,
                       std::span<const std::byte> blocks) {
  STOKER_CHECK(blocks.size() == item.rows.size() * kBlock);
  items_.put(uint8_t{kStage});
  items_.put(item.fold);
  items_.put(item.stripe);
  items_.put(static_cast<uint8_t>(item.chunk));
  items_.put(static_cast<uint32_t>(item.rows.size()));
  for (const StageRow& row : item.rows) {
    STOKER_CHECK(row.entry.versions.size() == shape.k && row.entry.crcs.size() == shape.k);
    items_.put(static_cast<uint32_t>(row.row));
    put_entry(items_, row.entry);
  }
  blocks_.push_back(blocks);
  block_count_ += item.rows.size();
}

void FrameBuilder::add(const FoldItem& item) {
  items_.put(uint8_t{kFold});
  items_.put(item.fold);
  items_.put(item.stripe);
  items_.put(static_cast<uint32_t>(item.rows.size()));
  for (const FoldRow& row : item.rows) {
    items_.put(static_cast<uint32_t>(row.row));
    items_.put(static_cast<uint8_t>(row.chunk));
    items_.put(row.version);
  }
}

size_t FrameBuilder::blocks_at(size_t more_items) const {
  return align_up(kFrameHeaderBytes + kPayloadHeadBytes + items_.size() + more_items, kBlock);
}

size_t FrameBuilder::bytes(size_t more_items) const {
  return blocks_at(more_items) + block_count_ * kBlock;
}

void FrameBuilder::payload(const FrameHome& home, std::span<std::byte> out) const {
  STOKER_CHECK(out.size() == payload_bytes());
  ByteWriter head;
  head.put(static_cast<uint16_t>(home.shard));
  head.put(static_cast<uint16_t>(home.segment));
  head.put(static_cast<uint32_t>(items_.size()));
  head.put(home.offset);
  std::memcpy(out.data(), head.bytes().data(), head.size());
  if (items_.size() > 0)
    std::memcpy(out.data() + head.size(), items_.bytes().data(), items_.size());
  size_t at = head.size() + items_.size();
  std::memset(out.data() + at, 0, blocks_at() - kFrameHeaderBytes - at);
  at = blocks_at() - kFrameHeaderBytes;
  for (const auto& blocks : blocks_) {
    std::memcpy(out.data() + at, blocks.data(), blocks.size());
    at += blocks.size();
  }
}

namespace {

// The parsers of single items; each checks that what it read can be.
class ItemReader {
 public:
  ItemReader(const Shape& shape, std::span<const std::byte> items, size_t blocks)
      : shape_(shape), in_(items), blocks_(blocks) {}
  bool more() const { return in_.left() > 0; }
  Result<Item> next() {
    switch (in_.get<uint8_t>()) {
      case kVal:
        return val();
      case kCommit:
        return commit();
      case kStage:
        return stage();
      case kFold:
        return fold();
      case kRound:
        return round();
      default:
        return broken("a record of the log has an item of no known kind");
    }
  }
  size_t used_blocks() const { return used_; }

 private:
  // `count` elements of at least `each` bytes must still be there: a wrong count is not taken for a
  // reason to allocate.
  bool has(uint64_t count, size_t each) const { return in_.ok() && count <= in_.left() / each; }
  Result<size_t> take_blocks(size_t count) {
    if (count > blocks_ - used_)
      return broken("a record of the log names blocks that it has not got");
    const size_t at = used_;
    used_ += count;
    return at;
  }
  // Without its blocks.
  Result<ValItem> val_head() {
    ValItem item;
    item.stamp = in_.get<uint64_t>();
    item.needs_commit = in_.get<uint8_t>() == 1;
    item.stripe = in_.get<uint64_t>();
    item.chunk = in_.get<uint8_t>();
    item.first = in_.get<uint32_t>();
    const auto count = in_.get<uint32_t>();
    if (!has(count, 4) || count == 0 || item.chunk >= shape_.k || item.first >= shape_.rows() ||
        count > shape_.rows() - item.first)
      return broken("a VAL of the log names blocks outside of its chunk");
    for (uint32_t i = 0; i < count; ++i) item.crcs.push_back(in_.get<uint32_t>());
    return item;
  }
  Result<Item> val() {
    STOKER_ASSIGN(ValItem item, val_head());
    STOKER_ASSIGN(item.at, take_blocks(item.crcs.size()));
    return Item(std::move(item));
  }
  Result<Item> round() {
    RoundItem item;
    item.round = in_.get<uint64_t>();
    item.image = in_.get<uint64_t>();
    for (ShardSet& each : item.shards) each = in_.get<uint64_t>();
    const auto vals = in_.get<uint32_t>();
    if (!has(vals, 30) || item.round == 0)
      return broken("a ROUND of the log is cut short or of no round");
    for (uint32_t i = 0; i < vals; ++i) {
      STOKER_ASSIGN(ValItem val, val_head());
      item.vals.push_back(std::move(val));
    }
    const auto commits = in_.get<uint32_t>();
    if (!has(commits, 8)) return broken("a ROUND of the log is cut short");
    for (uint32_t i = 0; i < commits; ++i) item.commits.push_back(in_.get<uint64_t>());
    return Item(std::move(item));
  }
  Result<Item> commit() {
    CommitItem item;
    item.stamp = in_.get<uint64_t>();
    item.items = in_.get_string();
    if (!in_.ok()) return broken("a COMMIT of the log is cut short");
    return Item(std::move(item));
  }
  Result<Item> stage() {
    StageItem item;
    item.fold = in_.get<uint64_t>();
    item.stripe = in_.get<uint64_t>();
    item.chunk = in_.get<uint8_t>();
    const auto count = in_.get<uint32_t>();
    if (!has(count, 4 + shape_.parity_entry_bytes()) || item.chunk < shape_.k ||
        item.chunk >= shape_.n())
      return broken("a STAGE of the log is cut short or of no parity");
    for (uint32_t i = 0; i < count; ++i) {
      StageRow& row = item.rows.emplace_back();
      row.row = in_.get<uint32_t>();
      row.entry = get_entry(in_, shape_.k);
      if (row.row >= shape_.rows())
        return broken("a STAGE of the log names a row outside of its chunk");
    }
    STOKER_ASSIGN(item.at, take_blocks(count));
    return Item(std::move(item));
  }
  Result<Item> fold() {
    FoldItem item;
    item.fold = in_.get<uint64_t>();
    item.stripe = in_.get<uint64_t>();
    const auto count = in_.get<uint32_t>();
    if (!has(count, 13)) return broken("a FOLD of the log is cut short");
    for (uint32_t i = 0; i < count; ++i) {
      FoldRow& row = item.rows.emplace_back();
      row.row = in_.get<uint32_t>();
      row.chunk = in_.get<uint8_t>();
      row.version = in_.get<uint64_t>();
      if (row.row >= shape_.rows() || row.chunk >= shape_.k)
        return broken("a FOLD of the log names a block outside of its stripe");
    }
    return Item(std::move(item));
  }

  const Shape& shape_;
  ByteReader in_;
  const size_t blocks_;
  size_t used_ = 0;
};

}  // namespace

Result<FrameContent> decode_payload(const Shape& shape, std::span<const std::byte> payload) {
  ByteReader in(payload);
  FrameContent content;
  content.home.shard = in.get<uint16_t>();
  content.home.segment = in.get<uint16_t>();
  const auto item_bytes = in.get<uint32_t>();
  content.home.offset = in.get<uint64_t>();
  const auto items = in.get_bytes(item_bytes);
  content.blocks_at = align_up(kFrameHeaderBytes + kPayloadHeadBytes + item_bytes, kBlock);
  const size_t frame = kFrameHeaderBytes + payload.size();
  content.end = content.home.offset + frame;
  if (!in.ok() || content.blocks_at > frame || !is_aligned(frame, kBlock))
    return broken("a record of the log is shorter than it says");
  ItemReader reader(shape, items, (frame - content.blocks_at) / kBlock);
  while (reader.more()) {
    STOKER_ASSIGN(Item item, reader.next());
    content.items.push_back(std::move(item));
  }
  if (reader.used_blocks() * kBlock != frame - content.blocks_at)
    return broken("a record of the log has blocks that none of its items owns");
  return content;
}

}  // namespace stoker::coded
