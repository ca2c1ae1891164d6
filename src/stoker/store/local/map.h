// Map: which bytes every object has, now and in each snapshot: object -> chunks -> {place, CRC,
// birth version}.
//
// It changes only by items (grammar in docs/formats/local_store.md): the same parser applies a
// commit that was just made durable, a record found in the journal and a part of an image. Not
// thread-safe: the store's mutex guards it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/base/result.h"
#include "stoker/store/local/format.h"
#include "stoker/store/store.h"

namespace stoker::local {

struct Chunk {
  Place place = kNowhere;  // kNowhere: never written, zeros
  Version birth = 0;       // the commit that wrote it
  uint32_t crc = 0;        // of the stored bytes
  uint32_t stored = 0;     // bytes on disk, at the start of its extent
  // of them, how many count (fewer after the object was cut); what follows reads as zeros
  uint32_t valid = 0;
  uint32_t unused = 0;

  bool sparse() const { return place == kNowhere; }
  Extent extent() const { return {place, (stored + kBlock - 1) / kBlock}; }
  bool operator==(const Chunk&) const = default;
};
static_assert(sizeof(Chunk) <= 32);
inline constexpr size_t kChunkRecordBytes = 28;

struct Object {
  uint64_t bytes = 0;
  uint32_t chunk_bytes = 0;
  Version version = 0;
  std::vector<Chunk> chunks;  // one for each chunk_bytes of the object

  uint64_t chunk_at(size_t index) const { return static_cast<uint64_t>(index) * chunk_bytes; }
};

// Tells one content of an object from another. The version alone does not: a crash loses deferred
// commits, and their numbers are given again; so the checksums of all chunks are in it too.
std::string tag_of(const Object& object);

// objects are shared between snapshots until they change
using Table = std::map<std::string, std::shared_ptr<Object>, std::less<>>;

struct Snapshot {
  struct Dead {
    Extent extent;
    Version birth = 0;
  };
  std::string name;
  Version version = 0;
  Table table;
  std::vector<Dead> dead;  // what the current version no longer names and no later snapshot sees
};

// What an item may name; beyond it the bytes are damaged.
struct MapLimits {
  struct Range {
    uint64_t begin = 0, end = 0;  // blocks of a volume that hold data
  };
  std::vector<Range> volumes;
  uint64_t slots_max = 0;  // chunks of all current objects together, sparse ones included
};

enum class ItemKind : uint8_t {
  version = 1,
  put = 2,
  chunks = 3,
  remove = 4,
  snapshot = 5,
  drop = 6
};

// Writes items.
void put_version(ByteWriter& out, Version version);
void put_object(ByteWriter& out, std::string_view key, uint64_t bytes, uint32_t chunk_bytes,
                Version version);
// of the object put last
void put_chunks(ByteWriter& out, uint32_t first, std::span<const Chunk> chunks);
void put_remove(ByteWriter& out, std::string_view key);
void put_snapshot(ByteWriter& out, std::string_view name);
void put_drop(ByteWriter& out, std::string_view name);

class Map {
 public:
  explicit Map(MapLimits limits) : limits_(std::move(limits)) {}

  // Applies items in order. Extents that nothing names any more are appended to `freed`. An error
  // (corruption) leaves it half applied: the map is then of no use. An object put last may get its
  // chunks in the next call.
  Status apply(std::span<const std::byte> items, std::vector<Extent>& freed);

  Version version() const { return version_; }
  const Table& current() const { return current_; }
  const std::vector<Snapshot>& snapshots() const { return snapshots_; }  // oldest first
  const Snapshot* find_snapshot(std::string_view name) const;
  const MapLimits& limits() const { return limits_; }
  uint64_t slots() const { return slots_; }

  // The items that make this map out of an empty one, handed over in parts of about `part_bytes`.
  Status image(size_t part_bytes, const std::function<Status(std::string_view items)>& part) const;
  // What image() comes to at most. Cheap.
  uint64_t image_bound() const;
  uint64_t memory_bytes() const;
  // Every extent that the current version or a snapshot names, once.
  void each_extent(const std::function<void(const Extent&)>& visit) const;

 private:
  Status apply_put(ByteReader& in, std::vector<Extent>& freed);
  Status apply_chunks(ByteReader& in, std::vector<Extent>& freed);
  Status apply_remove(ByteReader& in, std::vector<Extent>& freed);
  Status apply_snapshot(ByteReader& in);
  Status apply_drop(ByteReader& in, std::vector<Extent>& freed);
  void retire(const Chunk& chunk, std::vector<Extent>& freed);
  void free(const Extent& extent, std::vector<Extent>& freed);
  Object& own(std::shared_ptr<Object>& object);

  const MapLimits limits_;
  Version version_ = 0;
  Table current_;
  std::vector<Snapshot> snapshots_;
  std::string last_key_;    // the object put last
  uint64_t slots_ = 0;      // chunks of the current objects
  uint64_t extents_ = 0;    // named extents, dead ones included
  uint64_t key_bytes_ = 0;  // of the current keys
  uint64_t snapshot_key_bytes_ = 0, snapshot_objects_ = 0;
};

}  // namespace stoker::local
