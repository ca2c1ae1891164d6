// The bytes of a coded store's shards: superblock, header pages, items of log records.
// docs/formats/coded_store.md is the specification. Pure functions: any thread. Every decoder takes
// any bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/base/result.h"
#include "stoker/store/record_log.h"

namespace stoker::coded {

inline constexpr size_t kBlock = kIoAlign;
inline constexpr size_t kSuperblockBytes = 512;
inline constexpr std::array<uint64_t, 2> kSuperblockAt = {0, 32768};
inline constexpr std::array<uint64_t, 2> kFenceAt = {28672, 61440};
inline constexpr uint64_t kHeadBytes = 65536;
inline constexpr size_t kShardsMax = 64;
inline constexpr uint32_t kChunkMin = 64 * kKiB;
inline constexpr uint32_t kChunkMax = 4 * kMiB;

// epoch << 40 | number of the commit (or a counter): orders what one writer after the other did.
using Stamp = uint64_t;
inline constexpr unsigned kNumberBits = 40;
constexpr Stamp make_stamp(uint64_t epoch, uint64_t number) {
  return epoch << kNumberBits | number;
}
constexpr uint64_t number_of(Stamp stamp) { return stamp & ((uint64_t{1} << kNumberBits) - 1); }

// the version of a block of which no header is left, and of no block ever
inline constexpr Stamp kUnknown = UINT64_MAX;

using ShardSet = uint64_t;  // bit s: shard s
constexpr ShardSet shard_bit(size_t shard) { return ShardSet{1} << shard; }

// What is where on a shard; the same on all shards of a store.
struct Shape {
  size_t k = 0, m = 0, shards = 0;
  uint32_t chunk_bytes = 0, segment_bytes = 0;
  uint64_t area_bytes = 0;
  uint32_t segments = 0, slots = 0;
  uint32_t object_chunk_bytes = 0;  // what new objects report

  bool operator==(const Shape&) const = default;
  size_t n() const { return k + m; }
  size_t rows() const { return chunk_bytes / kBlock; }
  size_t stripe_bytes() const { return k * chunk_bytes; }
  size_t parity_entry_bytes() const { return 4 + 12 * k; }
  size_t rows_per_page() const { return (kBlock - 64) / parity_entry_bytes(); }
  size_t pages() const { return (rows() + rows_per_page() - 1) / rows_per_page(); }
  uint64_t area_at(size_t area) const { return kHeadBytes + area * area_bytes; }
  uint64_t segment_at(size_t segment) const {
    return area_at(2) + uint64_t{segment} * segment_bytes;
  }
  uint64_t slot_at(uint64_t slot) const {
    return segment_at(segments) + slot * (2 * pages() * kBlock + chunk_bytes);
  }
  uint64_t page_at(uint64_t slot, size_t page, uint64_t counter) const {
    return slot_at(slot) + (2 * page + (counter & 1)) * kBlock;
  }
  uint64_t block_at(uint64_t slot, size_t row) const {
    return slot_at(slot) + (2 * pages() + row) * kBlock;
  }
  uint64_t file_bytes() const { return slot_at(slots); }
  // Slots of all shards, as data: of each stripe's k + m chunks k count.
  uint64_t capacity_bytes() const { return uint64_t{slots} * shards / n() * stripe_bytes(); }
  // Whether a set of live shards may be written to: any two such sets meet, and each stripe has at
  // least k chunks on it.
  bool writable(ShardSet live) const;
  // Of so many shards at least one is in every set that was ever written to, and knows the newest
  // epoch.
  size_t present_min() const { return shards - std::max(shards - m, shards / 2 + 1) + 1; }
};

struct Epoch {
  uint64_t number = 0;
  ShardSet live = 0;
};

// The last scrub that looked at everything.
struct LastScrub {
  // seconds since 1970; 0: there was none, or nothing is known of it
  uint64_t ended_at = 0;
  uint32_t found = 0, lost = 0;  // damages, and those of them that could not be mended
};

struct Superblock {
  Shape shape;
  size_t shard = 0;
  StoreId store{};
  uint64_t counter = 0;  // of writes of the superblock
  Epoch confirmed, proposed;
  uint64_t log_floor = 0;
  // of this shard: drawn when it is made and at each resync
  uint32_t incarnation = 0;
  std::array<uint32_t, kShardsMax> incarnations{};  // of the members of the confirmed set
  LastScrub scrubbed = {};
  uint64_t first_round = 0;  // that the shard's log may have frames of
};

std::string encode_superblock(const Superblock& superblock);
// None: no superblock. mismatch: of another version. corruption: its CRC is right and its content
// impossible.
Result<std::optional<Superblock>> decode_superblock(std::span<const std::byte> sector);

// Who may write to a shard: the writer with the highest number.
struct Fence {
  uint64_t number = 0;  // 0: nobody yet
  uint64_t writer = 0;  // its id: two may draw the same number
  bool operator==(const Fence&) const = default;
};
// A block with nothing else in it.
void encode_fence(const Fence& fence, std::span<std::byte> block);
// None: no intact fence.
std::optional<Fence> decode_fence(std::span<const std::byte> block);

// What the header of a parity chunk says of a row.
struct ParityEntry {
  uint32_t crc = 0;
  std::vector<Stamp> versions;  // of the k data blocks that it encodes
  std::vector<uint32_t> crcs;   // theirs
};
struct DataEntry {
  Stamp version = 0;
  uint32_t crc = 0;
};

// One copy of a header page. Only the entries of the chunk's kind are used.
struct HeaderPage {
  uint64_t stripe = 0, counter = 0;
  size_t chunk = 0, page = 0;
  std::vector<DataEntry> data;      // rows of the page, of a data chunk
  std::vector<ParityEntry> parity;  // of a parity chunk
};
void encode_page(const Shape& shape, const StoreId& store, const HeaderPage& page,
                 std::span<std::byte> out);
// Of a copy: the higher one's counts. None: no intact page of this store, stripe, chunk and page.
std::optional<uint64_t> page_counter(const StoreId& store, uint64_t stripe, size_t chunk,
                                     size_t page, std::span<const std::byte> bytes);
// Likewise.
std::optional<HeaderPage> decode_page(const Shape& shape, const StoreId& store, uint64_t stripe,
                                      size_t chunk, size_t page, std::span<const std::byte> bytes);

// Items of a record. `at` counts blocks of the frame's block region.
struct ValItem {
  Stamp stamp = 0;
  bool needs_commit = false;
  uint64_t stripe = 0;
  size_t chunk = 0, first = 0;
  std::vector<uint32_t> crcs;  // one a block
  size_t at = 0;
};
struct CommitItem {
  Stamp stamp = 0;
  std::string items;  // table items
};
struct StageRow {
  size_t row = 0;
  ParityEntry entry;
};
struct StageItem {
  uint64_t fold = 0, stripe = 0;
  size_t chunk = 0;
  std::vector<StageRow> rows;
  size_t at = 0;
};
struct FoldRow {
  size_t row = 0, chunk = 0;
  Stamp version = 0;
};
struct FoldItem {
  uint64_t fold = 0, stripe = 0;
  std::vector<FoldRow> rows;
};
// Shards with frames of a round and of those before it; 0: not known.
inline constexpr size_t kRoundsTold = 8;
using ShardsOfRounds = std::array<ShardSet, kRoundsTold>;
// What a frame tells of the rounds before its own (rounds.h).
struct RoundItem {
  uint64_t round = 0;
  Stamp image = 0;            // of the newest table image
  ShardsOfRounds shards{};    // of the rounds before, the last one first
  std::vector<ValItem> vals;  // as they stand in older frames, without their blocks
  std::vector<Stamp> commits;
};
using Item = std::variant<ValItem, CommitItem, StageItem, FoldItem, RoundItem>;

// Where a frame says that it stands.
struct FrameHome {
  size_t shard = 0, segment = 0;
  uint64_t offset = 0;
  bool operator==(const FrameHome&) const = default;
};

// Gathers what goes into one frame. Borrows the blocks until payload() is done.
class FrameBuilder {
 public:
  void add(const ValItem& item, std::span<const std::byte> blocks);
  void add(const CommitItem& item);
  void add(const Shape& shape, const StageItem& item, std::span<const std::byte> blocks);
  void add(const FoldItem& item);
  void add(const RoundItem& item);
  bool empty() const { return items_.size() == 0; }
  size_t block_count() const { return block_count_; }  // of what was added so far
  // of the frame, if it had so many more bytes of items
  size_t bytes(size_t more_items = 0) const;
  // of the first block, in the frame
  size_t blocks_at(size_t more_items = 0) const;
  void payload(const FrameHome& home, std::span<std::byte> out) const;  // payload_bytes() of it
  size_t payload_bytes() const { return bytes() - kFrameHeaderBytes; }

 private:
  ByteWriter items_;
  std::vector<std::span<const std::byte>> blocks_;
  size_t block_count_ = 0;
};

struct FrameContent {
  FrameHome home;
  std::vector<Item> items;
  size_t blocks_at = 0;   // of the first block, in the frame
  uint64_t end = 0;       // of the frame, in its segment
  uint64_t sequence = 0;  // of the frame in its segment; read_segment() sets it
};
// corruption where the payload breaks a rule of the format.
Result<FrameContent> decode_payload(const Shape& shape, std::span<const std::byte> payload);

}  // namespace stoker::coded
