// Kernel: a matrix over GF(2^8) made ready to be applied to bytes. Two of them, equal to the bit:
// ISA-L's SIMD, and a plain loop to test it against. Internal to codec/; callers see erasure.h.
#pragma once

#include <cstddef>
#include <memory>

#include "stoker/codec/erasure.h"
#include "stoker/codec/gf256.h"

namespace stoker::codec {

// Any thread; nothing changes once it is made. As many sources as the matrix has columns, as many
// targets as it has rows.
class Kernel {
 public:
  virtual ~Kernel() = default;

  // targets = matrix * sources
  virtual void multiply(const std::byte* const* sources, std::byte* const* targets,
                        size_t bytes) const = 0;
  // targets ^= what one source, that of `column`, adds to the product
  virtual void add(int column, const std::byte* source, std::byte* const* targets,
                   size_t bytes) const = 0;
};

std::unique_ptr<const Kernel> make_isal_kernel(const Matrix& matrix);
std::unique_ptr<const Kernel> make_scalar_kernel(const Matrix& matrix);

}  // namespace stoker::codec
