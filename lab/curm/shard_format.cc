// The bytes of docs/formats/curm_shards.md.
#include "curm/shard_format.h"

#include <algorithm>
#include <cstring>

#include "stoker/base/crc32c.h"

namespace stoker::curm {
namespace {

constexpr std::string_view kHeadMagic = "STOKERU1";
constexpr uint32_t kFormatVersion = 3, kOldestVersion = 2;
constexpr uint32_t kHeaderMagic = 0x31554B53;  // "SKU1"
constexpr size_t kHeaderHeadBytes = 64;
constexpr size_t kPayloadHeadBytes = 56;
constexpr size_t kItemBytes = 40;

Error broken(const std::string& what) { return fail(Code::corruption, "{}", what); }

uint32_t header_crc(std::span<const std::byte> copy) {
  return crc32c(copy.data() + 8, copy.size() - 8, crc32c(copy.data(), 4));
}

uint64_t range_bytes(const Record& record) {
  uint64_t sum = 0;
  for (const auto* ranges : {&record.ranges, &record.before}) {
    for (const Record::Range& range : *ranges) sum += range.value.size();
  }
  return sum;
}

uint64_t item_bytes(const Record& record) {
  return kItemBytes + 8 * (record.ranges.size() + record.before.size() + record.dropped.size());
}

}  // namespace

uint64_t ShardLayout::slot(const Chunk& chunk) const {
  const auto position = static_cast<uint64_t>(chunk.position),
             k = static_cast<uint64_t>(geometry.k), m = static_cast<uint64_t>(geometry.m);
  const uint64_t turn = chunk.stripe / static_cast<uint64_t>(geometry.nodes);
  return is_data(chunk) ? turn * k + position : turn * m + position - k;
}

uint64_t ShardLayout::slots(bool data) const {
  const uint64_t turns = (geometry.stripes + static_cast<uint64_t>(geometry.nodes) - 1) /
                         static_cast<uint64_t>(geometry.nodes);
  return turns * static_cast<uint64_t>(data ? geometry.k : geometry.m);
}

Chunk ShardLayout::chunk_in(NodeId node, bool data, uint64_t slot) const {
  const auto each = static_cast<uint64_t>(data ? geometry.k : geometry.m),
             nodes = static_cast<uint64_t>(geometry.nodes);
  const uint64_t position = slot % each + (data ? 0 : static_cast<uint64_t>(geometry.k));
  const uint64_t turn = slot / each,
                 in_turn = (static_cast<uint64_t>(node) + nodes - position % nodes) % nodes;
  return {turn * nodes + in_turn, static_cast<int>(position)};
}

std::string ShardLayout::problem() const {
  const Geometry& g = geometry;
  if (g.k < 1 || g.m < 1 || g.k + g.m > 32)
    return "a code has at least one data and one parity chunk, and at most 32 chunks in all";
  if (g.nodes < g.k + g.m || g.nodes > 4096)
    return "there are at least as many nodes as chunks of a stripe, and at most 4096";
  if (!is_aligned(g.chunk_bytes, kShardBlock) || g.chunk_bytes == 0 || g.chunk_bytes > 4 * kMiB)
    return "chunks are blocks of 4 KiB, at most 4 MiB";
  if (g.stripes == 0 || g.stripes > uint64_t{1} << 32) return "there is at least one stripe";
  if (!is_aligned(reserve_bytes, kShardBlock) || reserve_bytes > 64 * kMiB)
    return "a reserve is blocks of 4 KiB, at most 64 MiB";
  if (!is_aligned(segment_bytes, kShardBlock) || segment_bytes > kGiB)
    return "a segment is blocks of 4 KiB, at most 1 GiB";
  if (segment_bytes < segment_min(g.chunk_bytes))
    return "a segment of the log has room for two chunks, 64 KiB and 8 KiB";
  return {};
}

std::string encode_head(const NodeHead& head) {
  const Geometry& geometry = head.layout.geometry;
  ByteWriter out;
  for (const char c : kHeadMagic) out.put(c);
  out.put(kFormatVersion);
  out.put(static_cast<uint8_t>(geometry.k));
  out.put(static_cast<uint8_t>(geometry.m));
  out.put(static_cast<uint8_t>(head.member));
  out.put(uint8_t{0});
  for (const uint8_t byte : head.cluster) out.put(byte);
  for (const uint8_t byte : head.incarnation) out.put(byte);
  out.put(static_cast<uint32_t>(geometry.nodes));
  out.put(static_cast<uint32_t>(head.node));
  for (const uint64_t field :
       {geometry.chunk_bytes, geometry.stripes, head.layout.reserve_bytes,
        head.layout.segment_bytes, head.counter, head.proposed, head.confirmed})
    out.put(field);
  std::string bytes = out.take();
  bytes.resize(kHeadBytes - 4);
  const uint32_t crc = crc32c(bytes.data(), bytes.size());
  bytes.append(reinterpret_cast<const char*>(&crc), 4);
  return bytes;
}

Result<std::optional<NodeHead>> decode_head(std::span<const std::byte> sector) {
  using Found = std::optional<NodeHead>;
  STOKER_CHECK(sector.size() >= kHeadBytes);
  if (std::memcmp(sector.data(), kHeadMagic.data(), kHeadMagic.size()) != 0) return Found();
  uint32_t crc = 0;
  std::memcpy(&crc, sector.data() + kHeadBytes - 4, 4);
  if (crc != crc32c(sector.data(), kHeadBytes - 4)) return Found();
  ByteReader in(sector.subspan(kHeadMagic.size(), kHeadBytes - kHeadMagic.size()));
  if (const auto version = in.get<uint32_t>();
      version < kOldestVersion || version > kFormatVersion) {
    return fail(Code::mismatch, "a node has format version {} and this program knows {}: {}",
                version, kFormatVersion,
                version > kFormatVersion ? "use a newer one" : "replay again, into a new folder");
  }
  NodeHead head;
  Geometry& geometry = head.layout.geometry;
  geometry.k = in.get<uint8_t>();
  geometry.m = in.get<uint8_t>();
  head.member = in.get<uint8_t>() == 1;
  in.get<uint8_t>();
  for (uint8_t& byte : head.cluster) byte = in.get<uint8_t>();
  for (uint8_t& byte : head.incarnation) byte = in.get<uint8_t>();
  geometry.nodes = static_cast<int>(std::min<uint32_t>(in.get<uint32_t>(), 1 << 16));
  head.node = static_cast<NodeId>(std::min<uint32_t>(in.get<uint32_t>(), 1 << 16));
  for (uint64_t* field :
       {&geometry.chunk_bytes, &geometry.stripes, &head.layout.reserve_bytes,
        &head.layout.segment_bytes, &head.counter, &head.proposed, &head.confirmed})
    *field = in.get<uint64_t>();
  const std::string problem = head.layout.problem();
  if (!problem.empty() || head.node >= geometry.nodes)
    return broken("the head of a node is intact and says what cannot be (" + problem + ")");
  return Found(head);
}

BlockMark block_mark(std::span<const std::byte> block) {
  const uint32_t crc = crc32c(block.data(), block.size());
  return crc == 0 ? 1 : crc;
}

void encode_header(const ShardLayout& layout, const StoreId& incarnation, const Chunk& chunk,
                   const ChunkHeader& header, std::span<std::byte> out) {
  STOKER_CHECK(out.size() == layout.header_bytes() && header.blocks.size() == layout.blocks());
  ByteWriter head;
  head.put(kHeaderMagic);
  head.put(uint32_t{0});
  head.put(chunk.stripe);
  head.put(header.counter);
  head.put(header.folded);
  for (const uint8_t byte : incarnation) head.put(byte);
  head.put(static_cast<uint16_t>(chunk.position));
  head.put(header.said.scheme);
  for (int zero = 0; zero < 5; ++zero) head.put(uint8_t{0});
  head.put(header.said.seq);
  std::memset(out.data(), 0, out.size());
  std::memcpy(out.data(), head.bytes().data(), head.size());
  std::memcpy(out.data() + kHeaderHeadBytes, header.blocks.data(), 4 * header.blocks.size());
  const uint32_t crc = header_crc(out);
  std::memcpy(out.data() + 4, &crc, 4);
}

std::optional<ChunkHeader> decode_header(const ShardLayout& layout, const StoreId& incarnation,
                                         const Chunk& chunk, std::span<const std::byte> copy) {
  STOKER_CHECK(copy.size() == layout.header_bytes());
  ByteReader in(copy);
  if (in.get<uint32_t>() != kHeaderMagic || in.get<uint32_t>() != header_crc(copy)) return {};
  ChunkHeader header;
  const auto stripe = in.get<uint64_t>();
  header.counter = in.get<uint64_t>();
  header.folded = in.get<uint64_t>();
  const auto id = in.get_bytes(incarnation.size());
  const auto position = in.get<uint16_t>();
  header.said.scheme = in.get<uint8_t>();
  in.get_bytes(5);
  header.said.seq = in.get<uint64_t>();
  if (stripe != chunk.stripe || position != chunk.position || header.counter == 0 ||
      std::memcmp(id.data(), incarnation.data(), incarnation.size()) != 0)
    return {};
  header.blocks.resize(layout.blocks());
  std::memcpy(header.blocks.data(), copy.data() + kHeaderHeadBytes, 4 * header.blocks.size());
  return header;
}

// ---- frames
// -------------------------------------------------------------------------------------------------

uint64_t stored_bytes(const Record& record) { return align_up(range_bytes(record), kShardBlock); }

std::vector<uint32_t> block_crcs(std::span<const std::byte> blocks) {
  std::vector<uint32_t> crcs;
  crcs.reserve(blocks.size() / kShardBlock);
  for (size_t at = 0; at + kShardBlock <= blocks.size(); at += kShardBlock)
    crcs.push_back(crc32c(blocks.data() + at, kShardBlock));
  return crcs;
}

uint64_t ShardFrame::blocks_at(size_t item_bytes) {
  return align_up(kFrameHeaderBytes + kPayloadHeadBytes + item_bytes, kShardBlock);
}

uint64_t ShardFrame::bytes_with(const Record& record) const {
  return blocks_at(items_.size() + item_bytes(record)) + body_.size() + stored_bytes(record);
}

void ShardFrame::add(const Record& record) {
  items_.put(static_cast<uint8_t>(record.kind));
  items_.put(record.scheme);
  items_.put(static_cast<uint8_t>(record.chunk.position));
  items_.put(static_cast<uint8_t>(record.needs_commit));
  items_.put(static_cast<uint32_t>(record.ranges.size()));
  items_.put(static_cast<uint32_t>(record.before.size()));
  items_.put(static_cast<uint32_t>(record.dropped.size()));
  items_.put(record.epoch);
  items_.put(record.seq);
  items_.put(record.chunk.stripe);
  for (const auto* ranges : {&record.ranges, &record.before}) {
    for (const Record::Range& range : *ranges) {
      items_.put(static_cast<uint32_t>(range.offset));
      items_.put(static_cast<uint32_t>(range.value.size()));
      body_.insert(body_.end(), range.value.bytes().begin(), range.value.bytes().end());
    }
  }
  for (const uint64_t seq : record.dropped) items_.put(seq);
  body_.resize(align_up(body_.size(), kShardBlock));
  ++count_;
}

std::vector<std::byte> ShardFrame::payload(const FrameHead& head) const {
  ByteWriter out;
  out.put(static_cast<uint16_t>(head.place.node));
  out.put(static_cast<uint16_t>(head.place.reserve ? 1 : 0));
  out.put(head.place.index);
  out.put(head.place.offset);
  out.put(head.settled);
  out.put(head.durable.count);
  out.put(head.durable.offset);
  out.put(static_cast<uint32_t>(items_.size()));
  out.put(count_);
  out.put(head.segments);
  out.put(uint32_t{0});
  STOKER_CHECK(out.size() == kPayloadHeadBytes);
  std::vector<std::byte> bytes(this->bytes() - kFrameHeaderBytes);
  std::memcpy(bytes.data(), out.bytes().data(), out.size());
  if (items_.size() != 0)
    std::memcpy(bytes.data() + out.size(), items_.bytes().data(), items_.size());
  if (!body_.empty())
    std::memcpy(bytes.data() + blocks_at() - kFrameHeaderBytes, body_.data(), body_.size());
  return bytes;
}

namespace {

class RecordReader {
 public:
  RecordReader(const ShardLayout& layout, std::span<const std::byte> items,
               std::span<const std::byte> blocks, uint64_t blocks_at)
      : layout_(layout), in_(items), blocks_(blocks), blocks_at_(blocks_at) {}
  bool more() const { return in_.left() > 0; }
  bool all_used() const { return used_ == blocks_.size(); }

  Result<FrameRecord> next() {
    FrameRecord found;
    Record& record = found.record;
    const auto kind = in_.get<uint8_t>();
    record.scheme = in_.get<uint8_t>();
    record.chunk.position = in_.get<uint8_t>();
    record.needs_commit = in_.get<uint8_t>() == 1;
    const uint64_t ranges = in_.get<uint32_t>(), before = in_.get<uint32_t>(),
                   dropped = in_.get<uint32_t>();
    record.epoch = in_.get<uint64_t>();
    record.seq = in_.get<uint64_t>();
    record.chunk.stripe = in_.get<uint64_t>();
    // A wrong count is not taken for a reason to allocate.
    if (!in_.ok() || ranges + before + dropped > in_.left() / 8)
      return broken("a record of a log is cut short");
    if (kind > static_cast<uint8_t>(Record::Kind::epoch))
      return broken("a record of a log is of no known kind");
    record.kind = static_cast<Record::Kind>(kind);
    const Geometry& geometry = layout_.geometry;
    if (record.chunk.position >= geometry.k + geometry.m || record.chunk.stripe >= geometry.stripes)
      return broken("a record of a log names a chunk that there is not");
    found.payload_at = blocks_at_ + used_;
    uint64_t at = used_;
    STOKER_TRY(take(ranges, record.ranges, at));
    STOKER_TRY(take(before, record.before, at));
    for (uint64_t i = 0; i < dropped; ++i) record.dropped.push_back(in_.get<uint64_t>());
    at = align_up(at, kShardBlock);
    if (at > blocks_.size()) return broken("a record of a log is longer than its frame");
    found.crcs = block_crcs(blocks_.subspan(used_, at - used_));
    used_ = at;
    return found;
  }

 private:
  Status take(uint64_t count, std::vector<Record::Range>& ranges, uint64_t& at) {
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t offset = in_.get<uint32_t>(), bytes = in_.get<uint32_t>();
      if (offset + bytes > layout_.geometry.chunk_bytes)
        return broken("a record of a log goes beyond its chunk");
      if (bytes > blocks_.size() - at) return broken("a record of a log is longer than its frame");
      ranges.push_back({offset, Value::of({blocks_.begin() + static_cast<ptrdiff_t>(at),
                                           blocks_.begin() + static_cast<ptrdiff_t>(at + bytes)})});
      at += bytes;
    }
    return {};
  }

  const ShardLayout& layout_;
  ByteReader in_;
  const std::span<const std::byte> blocks_;
  const uint64_t blocks_at_;
  uint64_t used_ = 0;
};

}  // namespace

Result<FrameContent> decode_frame(const ShardLayout& layout, std::span<const std::byte> payload) {
  ByteReader in(payload);
  FrameContent content;
  FrameHead& head = content.head;
  head.place.node = in.get<uint16_t>();
  const auto area = in.get<uint16_t>();
  head.place.reserve = area == 1;
  head.place.index = in.get<uint32_t>();
  head.place.offset = in.get<uint64_t>();
  head.settled = in.get<uint64_t>();
  head.durable.count = in.get<uint64_t>();
  head.durable.offset = in.get<uint64_t>();
  const auto bytes = in.get<uint32_t>(), count = in.get<uint32_t>();
  head.segments = in.get<uint32_t>();
  in.get<uint32_t>();
  const auto items = in.get_bytes(bytes);
  const uint64_t blocks_at = align_up(kFrameHeaderBytes + kPayloadHeadBytes + bytes, kShardBlock),
                 frame = kFrameHeaderBytes + payload.size();
  if (!in.ok() || area > 1 || blocks_at > frame || !is_aligned(frame, kShardBlock))
    return broken("a frame of a log is shorter than it says");
  RecordReader reader(layout, items, payload.subspan(blocks_at - kFrameHeaderBytes), blocks_at);
  while (reader.more()) {
    STOKER_ASSIGN(FrameRecord record, reader.next());
    content.records.push_back(std::move(record));
  }
  if (content.records.size() != count || !reader.all_used())
    return broken("a frame of a log has other records than it says");
  return content;
}

}  // namespace stoker::curm
