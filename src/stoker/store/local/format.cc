#include "stoker/store/local/format.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"

namespace stoker::local {
namespace {

constexpr size_t kCrcAt = kHeaderBytes - sizeof(uint32_t);

// The bytes for data of each volume.
std::vector<uint64_t> share_out(const Geometry& geometry, size_t volumes) {
  if (geometry.weights.empty())
    return std::vector<uint64_t>(
        volumes, align_up((geometry.capacity_bytes + volumes - 1) / volumes, kBlock));
  const double all = std::accumulate(geometry.weights.begin(), geometry.weights.end(), 0.0);
  std::vector<uint64_t> rooms;
  for (const double weight : geometry.weights) {
    rooms.push_back(align_up(static_cast<uint64_t>(std::ceil(
                                 static_cast<double>(geometry.capacity_bytes) * (weight / all))),
                             kBlock));
  }
  return rooms;
}

}  // namespace

std::string encode_header(const VolumeHeader& header) {
  ByteWriter out;
  out.put(kVolumeMagic);
  out.put(kFormatVersion);
  out.put(header.state);
  out.put_bytes(std::as_bytes(std::span(header.store)));
  out.put(header.index);
  out.put(header.count);
  out.put(header.volume_bytes);
  out.put(header.area_bytes);
  out.put(header.journal_at[0]);
  out.put(header.journal_at[1]);
  out.put(header.data_at);
  out.put(header.data_bytes);
  out.put(header.chunk_bytes);
  out.put(header.opened);
  out.put(header.opened_before);
  std::string bytes = out.take();
  STOKER_CHECK(bytes.size() <= kCrcAt);
  bytes.resize(kCrcAt, '\0');
  const uint32_t crc = crc32c(bytes.data(), bytes.size());
  bytes.append(reinterpret_cast<const char*>(&crc), sizeof crc);
  return bytes;
}

Result<std::optional<VolumeHeader>> decode_header(std::span<const std::byte> sector) {
  if (sector.size() < kHeaderBytes)
    return fail(Code::corruption, "the volume header is damaged: it has less than 512 bytes");
  ByteReader in(sector.first(kHeaderBytes));
  if (in.get<uint64_t>() != kVolumeMagic) return std::optional<VolumeHeader>();
  uint32_t crc = 0;
  std::memcpy(&crc, sector.data() + kCrcAt, sizeof crc);
  if (crc != crc32c(sector.data(), kCrcAt))
    return fail(Code::corruption, "the volume header is damaged: its checksum differs");
  if (const auto version = in.get<uint32_t>(); version != kFormatVersion) {
    return fail(Code::mismatch,
                "the volume has format {}, but this Stoker reads format {}: use the Stoker that "
                "wrote it",
                version, kFormatVersion);
  }
  VolumeHeader header;
  header.state = in.get<VolumeState>();
  const auto id = in.get_bytes(header.store.size());
  std::memcpy(header.store.data(), id.data(), header.store.size());
  header.index = in.get<uint32_t>();
  header.count = in.get<uint32_t>();
  header.volume_bytes = in.get<uint64_t>();
  header.area_bytes = in.get<uint64_t>();
  header.journal_at[0] = in.get<uint64_t>();
  header.journal_at[1] = in.get<uint64_t>();
  header.data_at = in.get<uint64_t>();
  header.data_bytes = in.get<uint64_t>();
  header.chunk_bytes = in.get<uint32_t>();
  header.opened = in.get<uint32_t>();
  header.opened_before = in.get<uint32_t>();
  // A header with a good CRC that breaks these was made by something else than Stoker.
  const uint64_t end = header.volume_bytes;
  const auto inside = [end](uint64_t at, uint64_t bytes) {
    return at <= end && bytes <= end - at && is_aligned(at, kBlock) && is_aligned(bytes, kBlock);
  };
  const auto journal_inside = [&](uint64_t at) {
    return at == 0 || (header.area_bytes <= end / 2 && inside(at, 2 * header.area_bytes));
  };
  const bool sane = header.count >= 1 && header.count <= kVolumesMax &&
                    header.index < header.count && header.area_bytes >= 4 * kBlock &&
                    is_aligned(header.area_bytes, kBlock) &&
                    inside(header.data_at, header.data_bytes) &&
                    journal_inside(header.journal_at[0]) && journal_inside(header.journal_at[1]) &&
                    (header.state == VolumeState::making || header.state == VolumeState::ready) &&
                    end / kBlock < (uint64_t{1} << 48) && valid_chunk_bytes(header.chunk_bytes);
  if (!sane) return fail(Code::corruption, "the volume header is damaged (impossible values)");
  return std::optional<VolumeHeader>(header);
}

std::vector<VolumeHeader> plan_volumes(const Geometry& geometry, size_t volumes,
                                       const StoreId& store) {
  const std::vector<uint64_t> rooms = share_out(geometry, volumes);
  uint64_t area_bytes = geometry.area_bytes;
  if (area_bytes == 0) {
    // Half an area holds the image of a full store: an object about 140 bytes with its key, a chunk
    // 28 and its share of a run.
    const uint64_t chunks = 2 * (std::accumulate(rooms.begin(), rooms.end(), uint64_t{0}) /
                                 std::max<uint64_t>(geometry.chunk_bytes, kChunkMin)) +
                            geometry.objects_max;
    area_bytes = 2 * (geometry.objects_max * 140 + chunks * 36) + 64 * kKiB;
  }
  area_bytes = align_up(area_bytes, kBlock);
  std::vector<VolumeHeader> headers;
  for (size_t i = 0; i < volumes; ++i) {
    VolumeHeader header;
    header.store = store;
    header.index = static_cast<uint32_t>(i);
    header.count = static_cast<uint32_t>(volumes);
    header.area_bytes = area_bytes;
    header.chunk_bytes = geometry.chunk_bytes;
    header.data_bytes = rooms[i];
    header.data_at = kHeaderRegion;
    if (i < 2) {
      header.journal_at[i] = kHeaderRegion;
      header.data_at += 2 * area_bytes;
    }
    header.volume_bytes = header.data_at + header.data_bytes;
    if (volumes == 1) {  // both copies on one volume: as far apart as it allows
      header.journal_at[1] = header.volume_bytes;
      header.volume_bytes += 2 * area_bytes;
    }
    STOKER_CHECK(is_aligned(header.data_at, kBlock) && is_aligned(header.volume_bytes, kBlock));
    headers.push_back(header);
  }
  return headers;
}

}  // namespace stoker::local
