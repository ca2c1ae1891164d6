#include "stoker/offload/block.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/base/check.h"

namespace stoker::offload {

std::string_view letter(Plane plane) {
  constexpr std::string_view letters = "wrmv";
  return letters.substr(static_cast<size_t>(plane), 1);
}

std::string_view name(Plane plane) {
  constexpr std::array<std::string_view, kPlanes> names = {"weights", "remainder", "m", "v"};
  return names[static_cast<size_t>(plane)];
}

uint64_t moment_cell_bytes(uint64_t elements) {
  return align_up(elements + optim::moment_scales(optim::MomentType::q8, elements) * sizeof(float),
                  kIoAlign);
}

uint64_t moment_plane_bytes(optim::MomentType type, uint64_t elements) {
  if (type != optim::MomentType::q8) return elements * optim::moment_bytes(type);
  return elements / kMomentCell * moment_cell_bytes(kMomentCell) +
         moment_cell_bytes(elements % kMomentCell);
}

Result<BlockLayout> BlockLayout::make(BlockSpec spec, uint32_t tile_elements) {
  if (!std::has_single_bit(tile_elements) || tile_elements < kTileElementsMin ||
      tile_elements > kTileElementsMax) {
    return fail(Code::invalid_argument,
                "a tile has a power of two of elements from 32 Ki to 2 Mi, not {}", tile_elements);
  }
  if (spec.moments == optim::MomentType::q8 && tile_elements < kMomentCell) {
    return fail(Code::invalid_argument,
                "with 8-bit moments a tile has at least 128 Ki elements, not {}", tile_elements);
  }
  if (spec.name.empty() || spec.elements == 0) {
    return fail(Code::invalid_argument, "a block needs a name and at least one element");
  }
  const bool fits = spec.frozen ? std::has_single_bit(spec.weight_bytes) && spec.weight_bytes <= 8
                                : spec.weight_bytes == 2 || spec.weight_bytes == 4;
  if (!fits) {
    return fail(Code::invalid_argument,
                "block {} has weights of {} bytes; bf16 and float32 can be trained", spec.name,
                spec.weight_bytes);
  }
  spec.elements =
      align_up(spec.elements, spec.weight_bytes == 1 ? 2 * kElementAlign : kElementAlign);
  return BlockLayout(std::move(spec), tile_elements);
}

uint32_t BlockLayout::tile_count(uint64_t tile) const {
  STOKER_CHECK(tile < tiles());
  return static_cast<uint32_t>(std::min<uint64_t>(tile_elements_, elements() - tile_first(tile)));
}

uint32_t BlockLayout::element_bytes(Plane plane) const {
  switch (plane) {
    case Plane::weight:
      return spec_.weight_bytes;
    case Plane::remainder:
      return !spec_.frozen && spec_.weight_bytes == 2 ? 2 : 0;
    case Plane::m:
      return !spec_.frozen && spec_.m ? static_cast<uint32_t>(optim::moment_bytes(spec_.moments))
                                      : 0;
    case Plane::v:
      return !spec_.frozen && spec_.v ? static_cast<uint32_t>(optim::moment_bytes(spec_.moments))
                                      : 0;
  }
  return 0;
}

uint64_t BlockLayout::bytes_of(Plane plane, uint64_t elements) const {
  if (plane == Plane::m || plane == Plane::v)
    return has(plane) ? moment_plane_bytes(spec_.moments, elements) : 0;
  return elements * element_bytes(plane);
}

uint64_t BlockLayout::state_bytes() const {
  uint64_t bytes = 0;
  for (Plane plane : kStatePlanes) bytes += plane_bytes(plane);
  return bytes;
}

namespace {
// Frozen planes of 1-byte or 8-byte elements may leave the range of chunks that a store takes.
uint32_t allowed_chunk(const BlockLayout& layout, Plane plane) {
  return std::clamp<uint32_t>(layout.chunk_bytes(plane), 64 << 10, 8 << 20);
}
}  // namespace

Status BlockLayout::create(Transaction& transaction) const {
  for (Plane plane : kAllPlanes) {
    if (!has(plane)) continue;
    if (auto made = transaction.resize(key(plane), plane_bytes(plane), allowed_chunk(*this, plane));
        !made) {
      return made.error().with("making block " + name() + ", " + std::string(offload::name(plane)));
    }
    STOKER_TRY(transaction.expect(key(plane), frozen() ? Class::read_only : Class::read_write));
  }
  return {};
}

Status BlockLayout::check(Store& store) const {
  for (Plane plane : kAllPlanes) {
    if (!has(plane)) continue;
    auto info = store.stat(key(plane));
    if (!info && info.error().code == Code::not_found) {
      return fail(Code::mismatch,
                  "the store has no object {}: it belongs to another model or optimizer",
                  key(plane));
    }
    if (!info) return info.error();
    if (info->bytes != plane_bytes(plane) || info->chunk_bytes != allowed_chunk(*this, plane)) {
      return fail(Code::mismatch,
                  "object {} has {} bytes in chunks of {}, but this model needs {} in chunks of "
                  "{}. Open the store with the model and tile size of its creation",
                  key(plane), info->bytes, info->chunk_bytes, plane_bytes(plane),
                  allowed_chunk(*this, plane));
    }
  }
  return {};
}

}  // namespace stoker::offload
