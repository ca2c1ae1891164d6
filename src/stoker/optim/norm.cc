// What is asked of gradients beside the update: sum of squares, scaling, whether they are finite.
#include <algorithm>
#include <array>

#include "stoker/optim/optim.h"
#include "stoker/optim/scalar.h"
#include "stoker/optim/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "stoker/optim/norm.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "stoker/optim/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stoker::optim::HWY_NAMESPACE {

#if STOKER_OPTIM_SCALAR
double sum_piece(const std::byte* grad, GradType type, size_t count) {
  return scalar::sum_piece(grad, type, count);
}

void scale(std::byte* grad, GradType type, size_t count, float factor) {
  scalar::scale_in_place(grad, type, count, factor);
}

bool all_finite(const std::byte* grad, GradType type, size_t count) {
  return scalar::all_finite(grad, type, count);
}
#else
using F64 = hn::ScalableTag<double>;
using HalfF32 = hn::Rebind<float, F64>;  // as many floats as F64 has lanes
using HalfU16 = hn::Rebind<uint16_t, F64>;
using Doubles = hn::Vec<F64>;
// the scalar reference's; what a vector cannot hold goes to further vectors
constexpr size_t kSumLanes = 16;
constexpr size_t kSumVectors = kSumLanes / hn::MaxLanes(F64());

HWY_INLINE Doubles load_doubles(const std::byte* grad, GradType type, size_t i) {
  if (type == GradType::f32)
    return hn::PromoteTo(F64(), hn::LoadU(HalfF32(), reinterpret_cast<const float*>(grad) + i));
  const auto bf16 = hn::LoadU(HalfU16(), reinterpret_cast<const uint16_t*>(grad) + i);
  const hn::Rebind<uint32_t, F64> d;
  return hn::PromoteTo(F64(), hn::BitCast(HalfF32(), hn::ShiftLeft<16>(hn::PromoteTo(d, bf16))));
}

double sum_piece(const std::byte* grad, GradType type, size_t count) {
  const F64 d;
  const size_t width = hn::Lanes(d);
  Doubles sums[kSumVectors];
  for (auto& sum : sums) sum = hn::Zero(d);
  size_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes)
    for (size_t k = 0; k < kSumVectors; ++k) {
      const Doubles g = load_doubles(grad, type, i + k * width);
      // the square is exact in float64, so fusing changes nothing
      sums[k] = hn::MulAdd(g, g, sums[k]);
    }
  alignas(64) std::array<double, kSumLanes> lanes;
  for (size_t k = 0; k < kSumVectors; ++k) hn::Store(sums[k], d, lanes.data() + k * width);
  return scalar::finish_piece(lanes, grad + i * grad_bytes(type), type, count - i);
}

// float32 -> bf16, ties to even, in the low half of each lane
HWY_INLINE Ints narrow(Floats value) {
  const I32 d;
  const Ints bits = hn::BitCast(d, value);
  const Ints odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1));
  const Ints rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d, 0x7fff))));
  return hn::IfThenElse(is_nan(bits), hn::Set(d, 0x7fc0), rounded);
}

void scale(std::byte* grad, GradType type, size_t count, float factor) {
  const F32 d;
  const Floats factors = hn::Set(d, factor);
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    const Floats scaled = hn::Mul(load_grad(grad, type, i), factors);
    if (type == GradType::bf16)
      store_u16(narrow(scaled), reinterpret_cast<uint16_t*>(grad) + i);
    else
      hn::StoreU(one_nan(scaled), d, reinterpret_cast<float*>(grad) + i);
  }
  // one correctly rounded product an element: the same bits in the reference
  scalar::scale_in_place(grad + i * grad_bytes(type), type, count - i, factor);
}

// NaN and infinity have every bit of the exponent set, and nothing else has.
template <typename Bits>
bool all_finite_bits(const Bits* grad, Bits exponent, size_t& i, size_t count) {
  const hn::ScalableTag<Bits> d;
  const auto exponents = hn::Set(d, exponent);
  auto greatest = hn::Zero(d);
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d))
    greatest = hn::Max(greatest, hn::And(hn::LoadU(d, grad + i), exponents));
  return hn::AllFalse(d, hn::Eq(greatest, exponents));
}

bool all_finite(const std::byte* grad, GradType type, size_t count) {
  size_t i = 0;
  const auto* halves = reinterpret_cast<const uint16_t*>(grad);
  const auto* words = reinterpret_cast<const uint32_t*>(grad);
  bool finite;
  if (type == GradType::bf16)
    finite = all_finite_bits<uint16_t>(halves, 0x7f80, i, count);
  else
    finite = all_finite_bits<uint32_t>(words, 0x7f800000, i, count);
  return finite && scalar::all_finite(grad + i * grad_bytes(type), type, count - i);
}
#endif

}  // namespace stoker::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stoker::optim {

HWY_EXPORT(sum_piece);
HWY_EXPORT(scale);
HWY_EXPORT(all_finite);

void sums_of_squares(const std::byte* grad, GradType type, size_t count, double* pieces) {
  const auto sum = HWY_DYNAMIC_DISPATCH(sum_piece);
  for (size_t at = 0; at < count; at += kNormPiece)
    *pieces++ = sum(grad + at * grad_bytes(type), type, std::min(kNormPiece, count - at));
}

double sum_of_squares(const std::byte* grad, GradType type, size_t count, double so_far) {
  const auto sum = HWY_DYNAMIC_DISPATCH(sum_piece);
  for (size_t at = 0; at < count; at += kNormPiece)
    so_far += sum(grad + at * grad_bytes(type), type, std::min(kNormPiece, count - at));
  return so_far;
}

void scale_in_place(std::byte* grad, GradType type, size_t count, float factor) {
  HWY_DYNAMIC_DISPATCH(scale)(grad, type, count, factor);
}

bool all_finite(const std::byte* grad, GradType type, size_t count) {
  return HWY_DYNAMIC_DISPATCH(all_finite)(grad, type, count);
}

}  // namespace stoker::optim
#endif
