// Value: some bytes of a chunk that travel through an update. On a modelled cluster it only knows
// how many there are, so the same scheme code runs with bytes and without. Immutable and shared: a
// copy costs nothing, any thread may hold one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "stoker/base/result.h"
#include "stoker/codec/erasure.h"

namespace stoker::curm {

class Value {
 public:
  Value() = default;
  static Value sized(uint64_t bytes) { return {nullptr, 0, bytes}; }  // without bytes: the model's
  static Value of(std::vector<std::byte> bytes);

  uint64_t size() const { return size_; }
  bool has_bytes() const { return bytes_ != nullptr; }
  std::span<const std::byte> bytes() const;  // of a value that has some
  Value slice(uint64_t at, uint64_t bytes) const;

 private:
  Value(std::shared_ptr<const std::vector<std::byte>> bytes, uint64_t begin, uint64_t size)
      : bytes_(std::move(bytes)), begin_(begin), size_(size) {}
  std::shared_ptr<const std::vector<std::byte>> bytes_;
  uint64_t begin_ = 0, size_ = 0;
};

// a ^ b, which are of one size.
Value difference(const Value& a, const Value& b);
// `base` with `piece` laid over it at `at`.
Value overlaid(const Value& base, uint64_t at, const Value& piece);
// `parity`, the range [at, at + size) of parity number `parity_index`, after data chunk
// `data_chunk` changed by `delta` at `delta_at`.
Value advanced(const codec::ErasureCode& code, int data_chunk, int parity_index,
               const Value& parity, uint64_t at, const Value& delta, uint64_t delta_at);
// Chunk `wanted` of k + m, from the values of k others (those not given are empty).
Value decoded(const codec::ErasureCode& code, const std::vector<Value>& present, int wanted);

}  // namespace stoker::curm
