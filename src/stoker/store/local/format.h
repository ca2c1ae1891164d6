// The bytes of a volume's header and where everything lies on a volume. docs/formats/local_store.md
// is the specification.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/base/result.h"
#include "stoker/store/chunk_size.h"
#include "stoker/store/record_log.h"

namespace stoker::local {

inline constexpr uint64_t kVolumeMagic = 0x3156'5245'4B4F'5453;  // "STOKERV1"
inline constexpr uint32_t kFormatVersion = 1;
inline constexpr uint64_t kHeaderRegion = 64 * kKiB;
inline constexpr uint64_t kHeaderAt[2] = {0, 32 * kKiB};  // two copies
inline constexpr size_t kHeaderBytes = 512;               // one sector: never torn
inline constexpr uint64_t kBlock = kIoAlign;
inline constexpr size_t kVolumesMax = 64;
inline constexpr size_t kKeyMax = 1024;

enum class VolumeState : uint32_t {
  making = 1,  // the store is not finished: nothing was ever acknowledged
  ready = 2,
};

struct VolumeHeader {
  StoreId store{};
  VolumeState state = VolumeState::making;
  uint32_t index = 0, count = 1;  // this is volume `index` of `count`
  uint64_t volume_bytes = 0;
  uint64_t area_bytes = 0;  // of one journal area
  // where journal copy 0 and 1 lie on this volume (two areas each); 0: not here
  uint64_t journal_at[2] = {0, 0};
  uint64_t data_at = 0, data_bytes = 0;
  uint32_t chunk_bytes = 0;  // default of new objects
  // Numbers of generations (their high halves; 0: made before this was noted). Volumes of unequal
  // ones are of different times.
  // the one that the newest opening for writing began, or was to begin
  uint32_t opened = 0;
  uint32_t opened_before = 0;  // the one before that is known to have begun

  bool operator==(const VolumeHeader&) const = default;
};

// kHeaderBytes bytes.
std::string encode_header(const VolumeHeader& header);
// None: not a header (another magic). Errors: corruption (its CRC), mismatch (a later format).
Result<std::optional<VolumeHeader>> decode_header(std::span<const std::byte> sector);

struct Geometry {
  uint64_t capacity_bytes = 0;  // of data, over all volumes
  uint64_t objects_max = 0;
  uint32_t chunk_bytes = 0;
  uint64_t area_bytes = 0;  // 0: from the others
  // of the volumes: in their proportion the capacity is shared out; empty: equally
  std::vector<double> weights = {};
};

// The headers of a new store's volumes. Each has whole blocks, so together they may hold a little
// more than was asked for.
std::vector<VolumeHeader> plan_volumes(const Geometry& geometry, size_t volumes,
                                       const StoreId& store);

// A place on a volume, in 4 KiB blocks from the volume's start, in 8 bytes.
using Place = uint64_t;
inline constexpr Place kNowhere = UINT64_MAX;
constexpr Place make_place(size_t volume, uint64_t block) {
  return static_cast<uint64_t>(volume) << 48 | block;
}
constexpr size_t volume_of(Place place) { return place >> 48; }
constexpr uint64_t block_of(Place place) { return place & ((uint64_t{1} << 48) - 1); }

struct Extent {
  Place place = kNowhere;
  uint64_t blocks = 0;
};

}  // namespace stoker::local
