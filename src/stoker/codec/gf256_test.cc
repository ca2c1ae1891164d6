#include "stoker/codec/gf256.h"

#include <gtest/gtest.h>
#include <isa-l/erasure_code.h>

#include <array>
#include <bit>

namespace stoker::codec {
namespace {

// The definition: the product of two polynomials over GF(2), and its remainder modulo 0x11d.
uint8_t polynomial_product(uint8_t a, uint8_t b) {
  unsigned product = 0;
  for (unsigned bit = 0; bit < 8; ++bit) {
    if ((b >> bit & 1U) != 0) product ^= static_cast<unsigned>(a) << bit;
  }
  for (unsigned bit = 14; bit >= 8; --bit) {
    if ((product >> bit & 1U) != 0) product ^= 0x11dU << (bit - 8);
  }
  return static_cast<uint8_t>(product);
}

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix result(a.rows(), b.columns());
  for (int row = 0; row < a.rows(); ++row) {
    for (int column = 0; column < b.columns(); ++column) {
      for (int i = 0; i < a.columns(); ++i)
        result.at(row, column) ^= multiply(a.at(row, i), b.at(i, column));
    }
  }
  return result;
}

bool is_identity(const Matrix& matrix) {
  for (int row = 0; row < matrix.rows(); ++row) {
    for (int column = 0; column < matrix.columns(); ++column) {
      if (matrix.at(row, column) != (row == column ? 1 : 0)) return false;
    }
  }
  return true;
}

// The rows and columns of `matrix` whose bits are set.
Matrix submatrix(const Matrix& matrix, uint32_t rows, uint32_t columns) {
  Matrix result(std::popcount(rows), std::popcount(columns));
  int to_row = 0;
  for (int row = 0; row < matrix.rows(); ++row) {
    if ((rows >> row & 1U) == 0) continue;
    int to_column = 0;
    for (int column = 0; column < matrix.columns(); ++column) {
      if ((columns >> column & 1U) != 0) result.at(to_row, to_column++) = matrix.at(row, column);
    }
    ++to_row;
  }
  return result;
}

TEST(Gf256, ProductIsThatOfPolynomials) {
  for (unsigned a = 0; a < 256; ++a) {
    for (unsigned b = 0; b < 256; ++b) {
      const auto x = static_cast<uint8_t>(a);
      const auto y = static_cast<uint8_t>(b);
      ASSERT_EQ(multiply(x, y), polynomial_product(x, y)) << a << " * " << b;
    }
  }
}

TEST(Gf256, InverseTimesItselfIsOne) {
  for (unsigned a = 1; a < 256; ++a)
    ASSERT_EQ(multiply(static_cast<uint8_t>(a), inverse(static_cast<uint8_t>(a))), 1) << a;
}

TEST(Gf256, NothingInvertsZero) { EXPECT_DEATH(inverse(uint8_t{0}), "a != 0"); }

TEST(Gf256, SingularMatrixIsABug) { EXPECT_DEATH(inverse(Matrix(2, 2)), "pivot"); }

// Not needed by anyone here, but it says which of the many Cauchy matrices ours is.
TEST(Gf256, CauchyIsThatOfIsal) {
  for (int k = 1; k < 32; ++k) {
    const int m = 32 - k;
    std::array<unsigned char, 32 * 32> theirs{};
    gf_gen_cauchy1_matrix(theirs.data(), k + m, k);
    const Matrix ours = cauchy(k, m);
    for (int cell = 0; cell < k * m; ++cell)
      ASSERT_EQ(ours.cells()[cell], theirs[k * k + cell]) << k << " cell " << cell;
  }
}

// What is on disk is coded with these numbers.
TEST(Gf256, CauchyNeverChanges) {
  const Matrix rows = cauchy(6, 3);
  const std::array<uint8_t, 18> expected = {122, 186, 71,  167, 142, 244, 186, 122, 167,
                                            71,  244, 142, 173, 157, 221, 152, 61,  170};
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(rows.cells()[i], expected[i]) << i;
}

TEST(Gf256, EverySquareOfACauchyMatrixCanBeInverted) {
  int squares = 0;
  for (int k = 1; k < 16; ++k) {
    const Matrix rows = cauchy(k, 16 - k);
    for (uint32_t r = 1; r < 1U << rows.rows(); ++r) {
      for (uint32_t c = 1; c < 1U << k; ++c) {
        if (std::popcount(r) != std::popcount(c)) continue;
        const Matrix square = submatrix(rows, r, c);
        ASSERT_TRUE(is_identity(product(square, inverse(square))))
            << k << " rows " << r << " columns " << c;
        ++squares;
      }
    }
  }
  EXPECT_EQ(squares, 65519);  // the sum over k of (16 over k) - 1
}

}  // namespace
}  // namespace stoker::codec
