// What is asked of gradients beside the update: their hash, their norm, scaling them.
//
// The hash of a gradient is XXH3-128 over the XXH3-128 of each piece of 64 Ki elements. So pieces
// can be hashed in any order and by several threads. The kernel gives the same value in the pass
// that it makes anyway.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "stoker/base/pool.h"
#include "stoker/optim/optim.h"

namespace stoker::offload {

struct Hash128 {
  uint64_t low = 0, high = 0;
  bool operator==(const Hash128&) const = default;
};

struct GradSpan {
  std::byte* data = nullptr;
  uint64_t count = 0;  // elements
  optim::GradType type = optim::GradType::bf16;
  uint64_t bytes() const { return count * optim::grad_bytes(type); }
};

inline constexpr uint64_t kHashPiece = 128 << 10;  // bytes: 64 Ki elements of bf16
constexpr uint64_t hash_pieces(uint64_t bytes) { return (bytes + kHashPiece - 1) / kHashPiece; }
Hash128 hash_piece(const std::byte* data, uint64_t bytes);
// The hash of `bytes` bytes from the hashes of their pieces, in order.
Hash128 combine(std::span<const Hash128> pieces, uint64_t bytes);

// All of these spread over the pool and must not be called on one of its threads.
std::vector<Hash128> hash(Pool& pool, std::span<const std::span<const std::byte>> spans);
// One float64 sum a span, the pieces of optim::kNormPiece elements added in order: the same for any
// number of threads.
std::vector<double> sums_of_squares(Pool& pool, std::span<const GradSpan> spans);
void scale(Pool& pool, std::span<const GradSpan> spans, float factor);

}  // namespace stoker::offload
