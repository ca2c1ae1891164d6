// Arithmetic in GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d, the field of ISA-L and of most
// storage codes), and small matrices over it. Plain and small: it plans what the kernels do to the
// bytes, and it is what the scalar kernel computes with.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace stoker::codec {

// Addition and subtraction are both exclusive or.
uint8_t multiply(uint8_t a, uint8_t b);
uint8_t inverse(uint8_t a);  // a is not 0

class Matrix {
 public:
  Matrix() = default;
  Matrix(int rows, int columns)
      : rows_(rows),
        columns_(columns),
        cells_(static_cast<size_t>(rows) * static_cast<size_t>(columns)) {}

  int rows() const { return rows_; }
  int columns() const { return columns_; }
  uint8_t& at(int row, int column) { return cells_[index(row, column)]; }
  uint8_t at(int row, int column) const { return cells_[index(row, column)]; }
  std::span<const uint8_t> cells() const { return cells_; }  // row after row

 private:
  size_t index(int row, int column) const {
    return static_cast<size_t>(row) * static_cast<size_t>(columns_) + static_cast<size_t>(column);
  }
  int rows_ = 0;
  int columns_ = 0;
  std::vector<uint8_t> cells_;
};

// The parity rows of RS(k, m): row j, column i is 1 / ((k + j) ^ i). Every square submatrix of it
// is invertible (Cauchy), so any k chunks give back all others. What is on disk depends on this
// formula: it may never change.
Matrix cauchy(int k, int m);

// The inverse of a square matrix that has one: those taken out of cauchy() do.
Matrix inverse(Matrix square);

}  // namespace stoker::codec
