#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "stoker/optim/each_target.h"
#include "stoker/optim/planes.h"
#include "stoker/optim/scalar.h"

namespace stoker::optim {
namespace {

// Gradients of many magnitudes as bytes of the given type.
std::vector<std::byte> gradients(GradType type, size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::byte> bytes(count * grad_bytes(type));
  for (size_t i = 0; i < count; ++i) {
    const float value = std::ldexp(normal(random), static_cast<int>(random() % 60) - 30);
    const uint16_t half = narrow(value);
    if (type == GradType::bf16)
      std::memcpy(bytes.data() + i * 2, &half, 2);
    else
      std::memcpy(bytes.data() + i * 4, &value, 4);
  }
  return bytes;
}

TEST(Norm, EveryTargetEqualsTheReference) {
  on_each_target([] {
    for (const auto type : {GradType::bf16, GradType::f32})
      for (const size_t count :
           {size_t{0}, size_t{1}, size_t{15}, size_t{16}, size_t{1000}, kNormPiece}) {
        const auto grad = gradients(type, count, 1);
        ASSERT_EQ(sum_of_squares(grad.data(), type, count),
                  scalar::sum_piece(grad.data(), type, count))
            << count;
      }
  });
}

TEST(Norm, CutsAtPiecesChangeNoBit) {
  const size_t count = 5 * kNormPiece + 777;
  for (const auto type : {GradType::bf16, GradType::f32}) {
    const auto grad = gradients(type, count, 2);
    const double whole = sum_of_squares(grad.data(), type, count);
    std::vector<double> pieces(norm_pieces(count));
    ASSERT_EQ(pieces.size(), 6u);
    sums_of_squares(grad.data(), type, count, pieces.data());
    double folded = 0;
    for (const double piece : pieces) folded += piece;
    EXPECT_EQ(folded, whole);
    for (size_t cut = kNormPiece; cut < count; cut += kNormPiece) {
      const double first = sum_of_squares(grad.data(), type, cut);
      EXPECT_EQ(sum_of_squares(grad.data() + cut * grad_bytes(type), type, count - cut, first),
                whole);
    }
  }
}

TEST(Norm, IsTheSumOfSquares) {
  std::vector<float> grad(3 * kNormPiece, 0.5f);
  grad.push_back(3e38f);  // its square overflows float32, not float64
  const double sum =
      sum_of_squares(reinterpret_cast<const std::byte*>(grad.data()), GradType::f32, grad.size());
  const double large = 3e38f;
  EXPECT_DOUBLE_EQ(sum, large * large);
  grad.back() = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isinf(
      sum_of_squares(reinterpret_cast<const std::byte*>(grad.data()), GradType::f32, grad.size())));
  grad[5] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(
      sum_of_squares(reinterpret_cast<const std::byte*>(grad.data()), GradType::f32, grad.size())));
  grad.assign(kNormPiece + 3, 2.0f);
  EXPECT_EQ(
      sum_of_squares(reinterpret_cast<const std::byte*>(grad.data()), GradType::f32, grad.size()),
      4.0 * (kNormPiece + 3));
}

TEST(Scale, EveryBf16PatternEqualsTheReference) {
  std::vector<uint16_t> all(65536 - 3);  // ends inside a vector
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  on_each_target([&] {
    for (const float factor : {0.3f, 1.0f, 1e-30f, 3e30f, 0.0f}) {
      auto ours = all;
      scale_in_place(reinterpret_cast<std::byte*>(ours.data()), GradType::bf16, ours.size(),
                     factor);
      for (size_t i = 0; i < all.size(); ++i)
        ASSERT_EQ(ours[i], narrow(widen(all[i]) * factor)) << i << " " << factor;
    }
  });
}

TEST(Scale, EveryTargetEqualsTheReferenceInFloat32) {
  auto grad = gradients(GradType::f32, 1003, 3);
  const uint32_t nan = 0xffc12345u;
  std::memcpy(grad.data(), &nan, 4);
  auto reference = grad;
  scalar::scale_in_place(reference.data(), GradType::f32, 1003, 0.7f);
  on_each_target([&] {
    auto ours = grad;
    scale_in_place(ours.data(), GradType::f32, 1003, 0.7f);
    EXPECT_EQ(ours, reference);
  });
}

TEST(Finite, OneThatIsNotIsFoundWhereverItIs) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  on_each_target([] {
    for (const auto type : {GradType::bf16, GradType::f32})
      for (const size_t count : {size_t{1}, size_t{15}, size_t{64}, size_t{131}}) {
        const std::vector<std::byte> grad(count * grad_bytes(type), std::byte{0x7e});
        EXPECT_TRUE(all_finite(grad.data(), type, count));
        EXPECT_TRUE(all_finite(grad.data(), type, 0));
        for (size_t i = 0; i < count; ++i)
          for (const float value : {kInfinity, -kInfinity, kNan}) {
            std::vector<std::byte> with = grad;
            const uint16_t half = narrow(value);
            if (type == GradType::bf16)
              std::memcpy(with.data() + i * 2, &half, 2);
            else
              std::memcpy(with.data() + i * 4, &value, 4);
            ASSERT_FALSE(all_finite(with.data(), type, count)) << i << " of " << count;
          }
      }
  });
}

}  // namespace
}  // namespace stoker::optim
