// The fast kernel: ISA-L. It chooses the instructions itself; from 2.31 on that includes GFNI, so a
// newer library may be a faster codec and nothing here needs to know. (Built and measured so far
// was 2.30, which has none.)
#include <isa-l/erasure_code.h>

#include <vector>

#include "stoker/codec/kernel.h"

namespace stoker::codec {
namespace {

constexpr size_t kTableBytes = 32;  // what ISA-L wants for each cell of a matrix

// ISA-L's signatures lack const: it writes to targets only.
unsigned char* plain(const std::byte* bytes) {
  return reinterpret_cast<unsigned char*>(const_cast<std::byte*>(bytes));
}
unsigned char** plain(const std::byte* const* slices) {
  return reinterpret_cast<unsigned char**>(const_cast<std::byte**>(slices));
}
unsigned char** plain(std::byte* const* slices) {
  return reinterpret_cast<unsigned char**>(const_cast<std::byte**>(slices));
}

class IsalKernel final : public Kernel {
 public:
  explicit IsalKernel(const Matrix& matrix)
      : rows_(matrix.rows()),
        columns_(matrix.columns()),
        tables_(matrix.cells().size() * kTableBytes) {
    ec_init_tables(columns_, rows_, const_cast<unsigned char*>(matrix.cells().data()),
                   tables_.data());
  }

  // Slices are far below the 2 GiB that ISA-L's int can say: erasure.cc cuts them.
  void multiply(const std::byte* const* sources, std::byte* const* targets,
                size_t bytes) const override {
    ec_encode_data(static_cast<int>(bytes), columns_, rows_, tables(), plain(sources),
                   plain(targets));
  }

  void add(int column, const std::byte* source, std::byte* const* targets,
           size_t bytes) const override {
    ec_encode_data_update(static_cast<int>(bytes), columns_, rows_, column, tables(), plain(source),
                          plain(targets));
  }

 private:
  unsigned char* tables() const { return const_cast<unsigned char*>(tables_.data()); }

  const int rows_;
  const int columns_;
  std::vector<unsigned char> tables_;
};

}  // namespace

std::unique_ptr<const Kernel> make_isal_kernel(const Matrix& matrix) {
  return std::make_unique<IsalKernel>(matrix);
}

}  // namespace stoker::codec
