// The reference: the definition, a byte at a time.
#include "stoker/codec/kernel.h"

namespace stoker::codec {
namespace {

class ScalarKernel final : public Kernel {
 public:
  explicit ScalarKernel(const Matrix& matrix) : matrix_(matrix) {}

  void multiply(const std::byte* const* sources, std::byte* const* targets,
                size_t bytes) const override {
    for (int row = 0; row < matrix_.rows(); ++row) {
      for (size_t at = 0; at < bytes; ++at) targets[row][at] = product(row, sources, at);
    }
  }

  void add(int column, const std::byte* source, std::byte* const* targets,
           size_t bytes) const override {
    for (int row = 0; row < matrix_.rows(); ++row) {
      for (size_t at = 0; at < bytes; ++at)
        targets[row][at] ^=
            std::byte{codec::multiply(matrix_.at(row, column), static_cast<uint8_t>(source[at]))};
    }
  }

 private:
  std::byte product(int row, const std::byte* const* sources, size_t at) const {
    uint8_t sum = 0;
    for (int column = 0; column < matrix_.columns(); ++column) {
      sum ^= codec::multiply(matrix_.at(row, column), static_cast<uint8_t>(sources[column][at]));
    }
    return std::byte{sum};
  }

  const Matrix matrix_;
};

}  // namespace

std::unique_ptr<const Kernel> make_scalar_kernel(const Matrix& matrix) {
  return std::make_unique<ScalarKernel>(matrix);
}

}  // namespace stoker::codec
