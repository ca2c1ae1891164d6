#include "stoker/codec/gf256.h"

#include <array>

#include "stoker/base/check.h"

namespace stoker::codec {
namespace {

// Powers of the generator 2 and their logarithms, made when compiled.
struct Tables {
  // twice around, so that the sum of two logarithms needs no modulo
  std::array<uint8_t, 510> power{};
  std::array<uint8_t, 256> log{};

  constexpr Tables() {
    unsigned value = 1;
    for (unsigned i = 0; i < 255; ++i) {
      power[i] = power[i + 255] = static_cast<uint8_t>(value);
      log[value] = static_cast<uint8_t>(i);
      value <<= 1;
      if (value > 255) value ^= 0x11dU;
    }
  }
};
constexpr Tables kTables;

}  // namespace

uint8_t multiply(uint8_t a, uint8_t b) {
  if (a == 0 || b == 0) return 0;
  return kTables.power[static_cast<size_t>(kTables.log[a]) + kTables.log[b]];
}

uint8_t inverse(uint8_t a) {
  STOKER_CHECK(a != 0);
  return kTables.power[255U - kTables.log[a]];
}

Matrix cauchy(int k, int m) {
  Matrix parity(m, k);
  for (int j = 0; j < m; ++j) {
    for (int i = 0; i < k; ++i) parity.at(j, i) = inverse(static_cast<uint8_t>((k + j) ^ i));
  }
  return parity;
}

// Gauss and Jordan: what turns `square` into the identity turns the identity into the inverse.
Matrix inverse(Matrix square) {
  const int n = square.rows();
  STOKER_CHECK(n == square.columns());
  Matrix result(n, n);
  for (int i = 0; i < n; ++i) result.at(i, i) = 1;
  const auto swap_rows = [n](Matrix& matrix, int a, int b) {
    for (int i = 0; i < n; ++i) std::swap(matrix.at(a, i), matrix.at(b, i));
  };
  const auto scale_row = [n](Matrix& matrix, int row, uint8_t factor) {
    for (int i = 0; i < n; ++i) matrix.at(row, i) = multiply(matrix.at(row, i), factor);
  };
  const auto add_row = [n](Matrix& matrix, int from, int to, uint8_t factor) {
    for (int i = 0; i < n; ++i) matrix.at(to, i) ^= multiply(matrix.at(from, i), factor);
  };
  for (int column = 0; column < n; ++column) {
    int pivot = column;
    while (pivot < n && square.at(pivot, column) == 0) ++pivot;
    STOKER_CHECK(pivot < n);  // singular
    for (Matrix* matrix : {&square, &result}) swap_rows(*matrix, pivot, column);
    const uint8_t scale = inverse(square.at(column, column));
    for (Matrix* matrix : {&square, &result}) scale_row(*matrix, column, scale);
    for (int row = 0; row < n; ++row) {
      const uint8_t factor = square.at(row, column);
      if (row == column || factor == 0) continue;
      for (Matrix* matrix : {&square, &result}) add_row(*matrix, column, row, factor);
    }
  }
  return result;
}

}  // namespace stoker::codec
