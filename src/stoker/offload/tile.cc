#include "stoker/offload/tile.h"

namespace stoker::offload {

bool Stamp::serves(const Stamp& wanted) const {
  if (!known || !wanted.known) return false;
  if (wanted.staged) return staged == wanted.staged;
  if (staged) return staged->version != 0 && staged->version == wanted.version;
  return version == wanted.version;
}

uint64_t tile_memory_bytes(uint32_t tile_elements) { return uint64_t{12} * tile_elements; }

Slice place(const Tile& tile, Plane plane) {
  const BlockLayout& layout = tile.block->layout;
  const uint64_t bytes = uint64_t{layout.tile_count(tile.index)} * layout.element_bytes(plane);
  if (tile.retained && plane != Plane::weight) {
    uint64_t at = layout.tile_first(tile.index) * layout.element_bytes(plane);
    if (plane != Plane::remainder) at += layout.plane_bytes(Plane::remainder);
    if (plane == Plane::v) at += layout.plane_bytes(Plane::m);
    return tile.block->retained->memory.slice().sub(at, bytes);
  }
  // Float32 weights take the place of bf16 weights and their remainder.
  const uint64_t elements = layout.tile_elements();
  constexpr std::array<uint64_t, kPlanes> starts = {8, 10, 0, 4};  // bytes an element before weight, remainder, m, v
  return tile.memory.sub(starts[static_cast<size_t>(plane)] * elements, bytes);
}

}  // namespace stoker::offload
