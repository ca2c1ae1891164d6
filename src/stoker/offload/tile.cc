#include "stoker/offload/tile.h"

#include <algorithm>

#include "stoker/base/bytes.h"
#include "stoker/base/check.h"

namespace stoker::offload {

bool Stamp::serves(const Stamp& wanted) const {
  if (!known || !wanted.known) return false;
  if (wanted.staged) return staged == wanted.staged;
  if (staged) return staged->version != 0 && staged->version == wanted.version;
  return version == wanted.version;
}

uint64_t tile_memory_bytes(uint32_t tile_elements, optim::MomentType moments) {
  return uint64_t{4} * tile_elements + 2 * moment_plane_bytes(moments, tile_elements);
}

Slice place(const Tile& tile, Plane plane) {
  const BlockLayout& layout = tile.block->layout;
  const uint64_t bytes = layout.tile_bytes(plane, tile.index);
  if (tile.retained && plane != Plane::weight) {
    STOKER_CHECK(tile.block->retained != nullptr);
    uint64_t at = layout.tile_offset(plane, tile.index);
    if (plane != Plane::remainder) at += layout.plane_bytes(Plane::remainder);
    if (plane == Plane::v) at += layout.plane_bytes(Plane::m);
    return tile.block->retained->memory.slice().sub(at, bytes);
  }
  // m, v, weights, remainder; float32 weights take the place of bf16 weights and their remainder.
  const uint64_t moment = moment_plane_bytes(layout.moments(), layout.tile_elements());
  uint64_t at = plane == Plane::m ? 0 : moment;
  if (plane == Plane::weight || plane == Plane::remainder) at += moment;
  if (plane == Plane::remainder) at += uint64_t{2} * layout.tile_elements();
  return tile.memory.sub(at, bytes);
}

optim::KeptMoment kept(const Tile& tile, Plane plane, uint64_t element) {
  STOKER_CHECK(plane == Plane::m || plane == Plane::v);
  const BlockLayout& layout = tile.block->layout;
  std::byte* const data = place(tile, plane).data;
  if (layout.moments() != optim::MomentType::q8)
    return {data + element * layout.element_bytes(plane), nullptr};
  STOKER_CHECK(element % optim::kMomentGroup == 0);
  const uint64_t first = align_down(element, kMomentCell);  // of the cell
  const uint64_t codes = std::min(kMomentCell, layout.tile_count(tile.index) - first);
  std::byte* const cell = data + moment_plane_bytes(layout.moments(), first);
  return {cell + (element - first),
          reinterpret_cast<float*>(cell + codes) + (element - first) / optim::kMomentGroup};
}

uint64_t kept_together(const Tile& tile, uint64_t from, uint64_t to) {
  if (tile.block->layout.moments() != optim::MomentType::q8) return to;
  return std::min(to, align_down(from, kMomentCell) + kMomentCell);
}

}  // namespace stoker::offload
