// Block: a group of parameters that is kept together, as planes of equal length in a Store.
//
//   w/NAME  weights (bf16 or float32; a frozen block: elements of any size)
//   r/NAME  low 16 bits of the float32 master of bf16 weights
//   m/NAME  v/NAME  optimizer state: float32, bfloat16, or 8-bit codes and their scales
//
// A tile is one chunk of every plane: the same `tile_elements` elements in each, so a tile is read,
// verified, updated and written by itself, in any order. All elements lie at the same index in
// every plane; among 8-bit codes lie their scales. docs/formats/planes.md is the specification.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "stoker/base/result.h"
#include "stoker/optim/moments.h"
#include "stoker/store/store.h"

namespace stoker::offload {

enum class Plane : uint8_t { weight, remainder, m, v };
inline constexpr size_t kPlanes = 4;
inline constexpr std::array<Plane, kPlanes> kAllPlanes = {Plane::weight, Plane::remainder, Plane::m,
                                                          Plane::v};
inline constexpr std::array<Plane, 3> kStatePlanes = {Plane::remainder, Plane::m, Plane::v};
std::string_view letter(Plane plane);  // "w", "r", "m", "v": the first part of the object's key
std::string_view name(Plane plane);    // as it stands in messages and counters

// 8-bit moments lie in cells: so many codes, their scales, zeros up to 4 KiB. The last cell of a
// plane may be shorter.
inline constexpr uint64_t kMomentCell = 128 << 10;
uint64_t moment_cell_bytes(uint64_t elements);
// Bytes of m or v of so many elements, from the start of a cell on.
uint64_t moment_plane_bytes(optim::MomentType type, uint64_t elements);

// Every plane of a block is padded to a multiple of this: 4 KiB of the narrowest plane without
// scales.
inline constexpr uint64_t kElementAlign = 2048;
// Bounds of a tile that keep the chunks of all its planes within what a Store allows (64 KiB to 8
// MiB).
inline constexpr uint32_t kTileElementsMin = 32 << 10;
inline constexpr uint32_t kTileElementsMax = 2 << 20;

struct BlockSpec {
  std::string name;
  uint64_t elements = 0;  // rounded up to kElementAlign
  // of one element: 2 = bf16, 4 = float32; any of 1, 2, 4, 8 where frozen
  uint32_t weight_bytes = 2;
  bool frozen = false;                                 // weights only, never updated
  bool m = true, v = true;                             // which state the algorithm keeps
  optim::MomentType moments = optim::MomentType::f32;  // and how
};

// The geometry of a block. Immutable.
class BlockLayout {
 public:
  static Result<BlockLayout> make(BlockSpec spec, uint32_t tile_elements);

  const std::string& name() const { return spec_.name; }
  bool frozen() const { return spec_.frozen; }
  optim::WeightType weight_type() const {
    return spec_.weight_bytes == 2 ? optim::WeightType::bf16 : optim::WeightType::f32;
  }
  optim::MomentType moments() const { return spec_.moments; }
  uint64_t elements() const { return spec_.elements; }
  uint32_t tile_elements() const { return tile_elements_; }
  uint64_t tiles() const { return (spec_.elements + tile_elements_ - 1) / tile_elements_; }
  uint64_t tile_first(uint64_t tile) const { return tile * tile_elements_; }
  uint32_t tile_count(uint64_t tile) const;  // elements in it: fewer in the last one

  bool has(Plane plane) const { return element_bytes(plane) != 0; }
  uint32_t element_bytes(Plane plane) const;  // 0 where the block has no such plane; without scales
  uint64_t plane_bytes(Plane plane) const { return bytes_of(plane, elements()); }
  uint32_t chunk_bytes(Plane plane) const {
    return static_cast<uint32_t>(bytes_of(plane, tile_elements_));
  }
  uint64_t tile_offset(Plane plane, uint64_t tile) const { return tile * chunk_bytes(plane); }
  uint64_t tile_bytes(Plane plane, uint64_t tile) const {
    return bytes_of(plane, tile_count(tile));
  }
  std::string key(Plane plane) const { return std::string(letter(plane)) + "/" + spec_.name; }
  uint64_t state_bytes() const;  // r, m and v together

  // Makes the objects: the weights wait to be written, state starts as zeros that cost no I/O.
  Status create(Transaction& transaction) const;
  // mismatch unless the store holds these planes with these sizes and chunks.
  Status check(Store& store) const;

 private:
  BlockLayout(BlockSpec spec, uint32_t tile_elements)
      : spec_(std::move(spec)), tile_elements_(tile_elements) {}
  uint64_t bytes_of(Plane plane, uint64_t elements) const;  // from the start of a tile on
  BlockSpec spec_;
  uint32_t tile_elements_;
};

}  // namespace stoker::offload
