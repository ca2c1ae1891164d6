// The bytes of a node of a ShardCluster: head, chunk headers, frames of records.
// docs/formats/curm_shards.md is the specification. Pure functions: any thread. Every decoder takes
// any bytes.
//
// Frames are those of the record log that local and coded stores use. The coded store's items,
// header pages and superblock are not used: its VALs hold whole blocks under the stamps of one
// writer's commits, and its headers the versions that a parity encodes, which is VDL's protocol.
// Here a record is what any scheme says: a kind, byte ranges, a number; and a header says how far
// the log is in the base (Step::mark).
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "curm/substrate.h"
#include "stoker/store/record_log.h"

namespace stoker::curm {

inline constexpr uint64_t kShardBlock = kIoAlign;
// two copies of the head; then, at kHolderAt, who has it open
inline constexpr uint64_t kHeadFileBytes = 4 * kShardBlock;
inline constexpr size_t kHeadBytes = 512;
// in a segment: two blocks for begin frames, by turns
inline constexpr uint64_t kFramesAt = 2 * kShardBlock;

// What is where on a node; the same on all.
struct ShardLayout {
  Geometry geometry;
  uint64_t reserve_bytes = 0;  // on the disk, behind each parity chunk
  uint64_t segment_bytes = 0;

  size_t blocks() const { return geometry.chunk_bytes / kShardBlock; }
  // of one copy; a slot has four
  uint64_t header_bytes() const { return align_up(64 + 4 * blocks(), kShardBlock); }
  bool is_data(const Chunk& chunk) const { return chunk.position < geometry.k; }
  uint64_t slot_bytes(bool data) const {
    return 4 * header_bytes() + geometry.chunk_bytes + (data ? 0 : reserve_bytes);
  }
  // A node has one chunk of each stripe at most: in each turn of `nodes` stripes it meets every
  // position once.
  uint64_t slot(const Chunk& chunk) const;
  Chunk chunk_in(NodeId node, bool data, uint64_t slot) const;
  uint64_t slots(bool data) const;  // of a node's file
  uint64_t slot_at(const Chunk& chunk) const { return slot(chunk) * slot_bytes(is_data(chunk)); }
  uint64_t header_at(const Chunk& chunk, uint64_t counter) const {
    return slot_at(chunk) + (counter & 1) * 2 * header_bytes();
  }
  uint64_t block_at(const Chunk& chunk, uint64_t block) const {
    return slot_at(chunk) + 4 * header_bytes() + block * kShardBlock;
  }
  uint64_t reserve_at(const Chunk& parity) const { return block_at(parity, blocks()); }
  // The largest record has a whole chunk and what was there before; its ranges are told in the
  // items.
  static constexpr uint64_t segment_min(uint64_t chunk_bytes) {
    return kFramesAt + 2 * chunk_bytes + 64 * kKiB;
  }
  // Why it cannot be; empty: it can.
  std::string problem() const;
};

struct NodeHead {
  ShardLayout layout;
  StoreId cluster{};
  // of this node: drawn when it is made and when it is to be rebuilt; headers and frames of another
  // do not count
  StoreId incarnation{};
  NodeId node = 0;
  uint64_t counter = 0;                  // of writes of the head
  uint64_t proposed = 0, confirmed = 0;  // openings
  bool member = false;                   // it holds all that it must
};
std::string encode_head(const NodeHead& head);  // kHeadBytes
// None: no head. mismatch: of another version. corruption: its CRC is right and its content
// impossible.
Result<std::optional<NodeHead>> decode_head(std::span<const std::byte> sector);

// What is known of a block without reading it: 0, it was never written and is zeros; else its CRC
// (of which 0 is called 1).
using BlockMark = uint32_t;
BlockMark block_mark(std::span<const std::byte> block);

struct ChunkHeader {
  uint64_t counter = 0;  // of writes; 0: never written
  uint64_t folded = 0;   // the seq of the last mark
  std::vector<BlockMark> blocks;
  Said said = {};
};
void encode_header(const ShardLayout& layout, const StoreId& incarnation, const Chunk& chunk,
                   const ChunkHeader& header, std::span<std::byte> out);
// None: no intact copy of a header of this chunk and incarnation.
std::optional<ChunkHeader> decode_header(const ShardLayout& layout, const StoreId& incarnation,
                                         const Chunk& chunk, std::span<const std::byte> copy);

// Where a frame says that it stands.
struct FramePlace {
  NodeId node = 0;
  bool reserve = false;
  uint32_t index = 0;   // of the segment, or of the parity chunk's slot
  uint64_t offset = 0;  // of the frame there
  bool operator==(const FramePlace&) const = default;
};
// A place in a node's log: segments are numbered as they are begun.
struct LogEnd {
  uint64_t count = 0;
  uint64_t offset = 0;
  bool operator==(const LogEnd&) const = default;
  bool operator<(const LogEnd& other) const {
    return std::tie(count, offset) < std::tie(other.count, other.offset);
  }
};
struct FrameHead {
  FramePlace place;
  uint64_t settled = 0;   // all records up to this seq are settled
  LogEnd durable;         // the log was durable up to there when this frame was made
  uint32_t segments = 0;  // that this node had begun by then, with this one
};

// Gathers the records of one frame.
class ShardFrame {
 public:
  void add(const Record& record);
  bool empty() const { return count_ == 0; }
  uint64_t bytes() const { return blocks_at() + body_.size(); }  // of the frame
  uint64_t bytes_with(const Record& record) const;
  // of the first record's payload, in the frame
  uint64_t blocks_at() const { return blocks_at(items_.size()); }
  std::vector<std::byte> payload(const FrameHead& head) const;

 private:
  static uint64_t blocks_at(size_t item_bytes);
  ByteWriter items_;
  std::vector<std::byte> body_;
  uint32_t count_ = 0;
};

struct FrameRecord {
  Record record;
  uint64_t payload_at = 0;     // in the frame, on a block
  std::vector<uint32_t> crcs;  // of the blocks of its payload
};
struct FrameContent {
  FrameHead head;
  std::vector<FrameRecord> records;
};
// corruption where the payload breaks a rule of the format.
Result<FrameContent> decode_frame(const ShardLayout& layout, std::span<const std::byte> payload);

// A record's payload as it stands in its frame: ranges, then what was before, padded to blocks; and
// the CRCs of these.
uint64_t stored_bytes(const Record& record);
std::vector<uint32_t> block_crcs(std::span<const std::byte> blocks);

}  // namespace stoker::curm
