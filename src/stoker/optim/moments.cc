// The kernels that keep moments: scalar_moments.cc's arithmetic, a vector at a time; and the update
// that goes through them.
#include "stoker/optim/moments.h"

#include <algorithm>
#include <cstring>

#include "stoker/base/check.h"
#include "stoker/optim/scalar.h"
#include "stoker/optim/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "stoker/optim/moments.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "stoker/optim/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stoker::optim::HWY_NAMESPACE {

#if STOKER_OPTIM_SCALAR
void decode_some(MomentType type, Which which, const KeptMoment& from, float* to, size_t count) {
  scalar::decode(type, which, from, to, count);
}

void encode_some(MomentType type, Which which, float* values, const KeptMoment& to, size_t count,
                 const uint32_t* draws) {
  scalar::encode(type, which, values, to, count, draws);
}

void draw_some(const Draws& draws, uint32_t* to, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = draws[i];
}
#else
using S8 = hn::Rebind<int8_t, F32>;  // as many lanes as F32, a quarter of the width
using U8 = hn::Rebind<uint8_t, F32>;
using Words = hn::Vec<U32>;

// Vectors worked on at a time, so that the constants are loaded once for all of them.
constexpr size_t kBatch = 4;

void draw_some(const Draws& draws, uint32_t* to, size_t count) {
  const U32 d;
  const Words numbers = hn::Iota(d, draws.first);
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    Words h = hn::Xor(hn::Add(numbers, hn::Set(d, static_cast<uint32_t>(i))), hn::Set(d, draws.a));
    h = hn::Mul(hn::Xor(h, hn::ShiftRight<16>(h)), hn::Set(d, 0x85ebca6bu));
    h = hn::Mul(hn::Add(hn::Xor(h, hn::ShiftRight<13>(h)), hn::Set(d, draws.b)),
                hn::Set(d, 0xc2b2ae35u));
    hn::StoreU(hn::Xor(h, hn::ShiftRight<16>(h)), d, to + i);
  }
  for (; i < count; ++i) to[i] = draws[i];
}

template <Which kWhich>
HWY_INLINE Words draw16(const uint32_t* draws) {
  const Words draw = hn::LoadU(U32(), draws);
  return kWhich == Which::m ? hn::And(draw, hn::Set(U32(), 0xffffu)) : hn::ShiftRight<16>(draw);
}

template <int kLevels>
HWY_INLINE void levels(const Codes<kLevels>& codes, Floats (&values)[kBatch]) {
  Floats y[kBatch];
  for (size_t k = 0; k < kBatch; ++k) y[k] = hn::Mul(hn::Set(F32(), codes.y_slope[0]), values[k]);
  for (int p = 1; p < kLevels; ++p) {
    const Floats slope = hn::Set(F32(), codes.y_slope[p]),
                 offset = hn::Set(F32(), codes.y_offset[p]);
    for (size_t k = 0; k < kBatch; ++k) y[k] = hn::Max(y[k], hn::MulAdd(slope, values[k], offset));
  }
  for (size_t k = 0; k < kBatch; ++k) values[k] = y[k];
}

template <int kLevels>
HWY_INLINE void positions(const Codes<kLevels>& codes, Floats (&values)[kBatch]) {
  Floats t[kBatch];
  for (size_t k = 0; k < kBatch; ++k) t[k] = hn::Mul(hn::Set(F32(), codes.t_slope[0]), values[k]);
  for (int p = 1; p < kLevels; ++p) {
    const Floats slope = hn::Set(F32(), codes.t_slope[p]),
                 offset = hn::Set(F32(), codes.t_offset[p]);
    for (size_t k = 0; k < kBatch; ++k) t[k] = hn::Min(t[k], hn::MulAdd(slope, values[k], offset));
  }
  for (size_t k = 0; k < kBatch; ++k) values[k] = t[k];
}

template <Which kWhich>
HWY_INLINE void decode_batch(const std::byte* from, Floats scale, float* to) {
  const F32 d;
  const I32 di;
  const size_t lanes = hn::Lanes(d);
  Floats c[kBatch], y[kBatch];
  for (size_t k = 0; k < kBatch; ++k) {
    if constexpr (kWhich == Which::m)
      c[k] = hn::ConvertTo(
          d, hn::PromoteTo(di, hn::LoadU(S8(), reinterpret_cast<const int8_t*>(from) + k * lanes)));
    else
      c[k] = hn::ConvertTo(
          d,
          hn::PromoteTo(di, hn::LoadU(U8(), reinterpret_cast<const uint8_t*>(from) + k * lanes)));
    y[k] = kWhich == Which::m ? hn::Abs(c[k]) : c[k];
  }
  if constexpr (kWhich == Which::m)
    levels(kSignedCodes, y);
  else
    levels(kUnsignedCodes, y);
  for (size_t k = 0; k < kBatch; ++k) {
    Floats value;
    if constexpr (kWhich == Which::m) {
      value = hn::Mul(hn::CopySign(y[k], c[k]), scale);
    } else {
      const Floats root = hn::Mul(y[k], scale);
      value = hn::Mul(root, root);
    }
    hn::StoreU(value, d, to + k * lanes);
  }
}

template <Which kWhich>
HWY_INLINE void encode_batch(const float* parts, Floats inverse, std::byte* to,
                             const uint32_t* draws) {
  const F32 d;
  const I32 di;
  const size_t lanes = hn::Lanes(d);
  Floats value[kBatch], t[kBatch];
  for (size_t k = 0; k < kBatch; ++k) {
    value[k] = hn::LoadU(d, parts + k * lanes);
    t[k] = hn::Min(hn::Mul(hn::Abs(value[k]), inverse), hn::Set(d, 1.0f));
  }
  if constexpr (kWhich == Which::m)
    positions(kSignedCodes, t);
  else
    positions(kUnsignedCodes, t);
  for (size_t k = 0; k < kBatch; ++k) {
    const size_t at = k * lanes;
    const Floats up = hn::Mul(hn::ConvertTo(d, hn::BitCast(di, draw16<kWhich>(draws + at))),
                              hn::Set(d, 0x1p-16f));
    const Ints code = hn::ConvertTo(di, hn::Add(t[k], up));  // toward zero
    if constexpr (kWhich == Which::m) {
      const auto below = hn::RebindMask(di, hn::Lt(value[k], hn::Zero(d)));
      hn::StoreU(hn::DemoteTo(S8(), hn::IfThenElse(below, hn::Neg(code), code)), S8(),
                 reinterpret_cast<int8_t*>(to) + at);
    } else {
      const auto above = hn::RebindMask(di, hn::Gt(value[k], hn::Zero(d)));
      const Ints least = hn::IfThenElseZero(above, hn::Set(di, 1));
      hn::StoreU(hn::DemoteTo(U8(), hn::Max(code, least)), U8(),
                 reinterpret_cast<uint8_t*>(to) + at);
    }
  }
}

// Leaves the roots of v.
template <Which kWhich>
uint32_t greatest_part(float* values, size_t count) {
  const F32 d;
  const I32 di;
  Ints most = hn::Zero(di);
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    Floats part = hn::LoadU(d, values + i);
    if constexpr (kWhich == Which::v) hn::StoreU(part = hn::Sqrt(part), d, values + i);
    // as integers magnitudes are ordered too, and NaN is above all of them
    most = hn::Max(most, hn::And(hn::BitCast(di, part), hn::Set(di, 0x7fffffff)));
  }
  const auto found = static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di, most)));
  return scalar::greatest_part(kWhich, values + i, count - i, found);
}

template <Which kWhich>
void decode_q8(const KeptMoment& from, float* to, size_t count) {
  const size_t step = kBatch * hn::Lanes(F32());
  for (size_t at = 0; at < count; at += kMomentGroup) {
    const size_t end = std::min(count, at + kMomentGroup);
    const float* const scale = from.scales + at / kMomentGroup;
    size_t i = at;
    for (; i + step <= end; i += step)
      decode_batch<kWhich>(from.data + i, hn::Set(F32(), *scale), to + i);
    scalar::decode(MomentType::q8, kWhich, {from.data + i, from.scales + at / kMomentGroup}, to + i,
                   end - i);
  }
}

template <Which kWhich>
void encode_q8(float* values, const KeptMoment& to, size_t count, const uint32_t* draws) {
  const size_t step = kBatch * hn::Lanes(F32());
  for (size_t at = 0; at < count; at += kMomentGroup) {
    const size_t end = std::min(count, at + kMomentGroup);
    const Group group(greatest_part<kWhich>(values + at, end - at));
    to.scales[at / kMomentGroup] = group.scale;
    if (!group.codes) {
      std::memset(to.data + at, 0, end - at);
      continue;
    }
    size_t i = at;
    for (; i + step <= end; i += step)
      encode_batch<kWhich>(values + i, hn::Set(F32(), group.inverse), to.data + i, draws + i);
    scalar::encode_parts(kWhich, values + i, group.inverse, to.data + i, end - i, draws + i);
  }
}

void decode_bf16(const KeptMoment& from, float* to, size_t count) {
  const F32 d;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d))
    hn::StoreU(widen(load_u16(reinterpret_cast<const uint16_t*>(from.data) + i)), d, to + i);
  scalar::decode(MomentType::bf16, Which::m, {from.data + 2 * i, nullptr}, to + i, count - i);
}

template <Which kWhich>
void encode_bf16(float* values, const KeptMoment& to, size_t count, const uint32_t* draws) {
  const I32 d;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    // a draw cannot change that NaN's upper half
    const Ints bits = hn::BitCast(d, one_nan(hn::LoadU(F32(), values + i)));
    const Ints sum = hn::Add(bits, hn::BitCast(d, draw16<kWhich>(draws + i)));
    store_u16(hn::ShiftRight<16>(sum), reinterpret_cast<uint16_t*>(to.data) + i);
  }
  scalar::encode(MomentType::bf16, kWhich, values + i, {to.data + 2 * i, nullptr}, count - i,
                 draws + i);
}

void decode_some(MomentType type, Which which, const KeptMoment& from, float* to, size_t count) {
  if (type == MomentType::bf16) return decode_bf16(from, to, count);
  if (which == Which::m) return decode_q8<Which::m>(from, to, count);
  decode_q8<Which::v>(from, to, count);
}

template <Which kWhich>
void encode_as(MomentType type, float* values, const KeptMoment& to, size_t count,
               const uint32_t* draws) {
  if (type == MomentType::bf16)
    encode_bf16<kWhich>(values, to, count, draws);
  else
    encode_q8<kWhich>(values, to, count, draws);
}

void encode_some(MomentType type, Which which, float* values, const KeptMoment& to, size_t count,
                 const uint32_t* draws) {
  if (which == Which::m)
    encode_as<Which::m>(type, values, to, count, draws);
  else
    encode_as<Which::v>(type, values, to, count, draws);
}
#endif

}  // namespace stoker::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stoker::optim {

HWY_EXPORT(decode_some);
HWY_EXPORT(encode_some);
HWY_EXPORT(draw_some);

namespace {

// elements in float32 at a time: with their draws 12 KiB of the nearest cache
constexpr size_t kPiece = 4 * kMomentGroup;

KeptMoment slice(const KeptMoment& moment, MomentType type, size_t i) {
  return {moment.data + i * moment_bytes(type),
          type == MomentType::q8 ? moment.scales + i / kMomentGroup : nullptr};
}

void update_piece(const Coefficients& c, uint64_t step, WeightType weight_type, GradType grad_type,
                  const Planes& planes, const Moments& moments, const Part& part, size_t i,
                  size_t count) {
  alignas(64) float m[kPiece], v[kPiece];
  alignas(64) uint32_t draws[kPiece];
  const bool has_m = moments.m.data != nullptr, has_v = moments.v.data != nullptr;
  const KeptMoment kept_m = has_m ? slice(moments.m, moments.type, i) : KeptMoment{};
  const KeptMoment kept_v = has_v ? slice(moments.v, moments.type, i) : KeptMoment{};
  if (has_m) HWY_DYNAMIC_DISPATCH(decode_some)(moments.type, Which::m, kept_m, m, count);
  if (has_v) HWY_DYNAMIC_DISPATCH(decode_some)(moments.type, Which::v, kept_v, v, count);
  Planes piece = planes.from(i, weight_type, grad_type);
  piece.m = has_m ? m : nullptr;
  piece.v = has_v ? v : nullptr;
  update(c, weight_type, grad_type, piece, count);
  const Draws drawn(moments.seed, step, moments.parameter, part.first + i);
  HWY_DYNAMIC_DISPATCH(draw_some)(drawn, draws, count);
  if (has_m) HWY_DYNAMIC_DISPATCH(encode_some)(moments.type, Which::m, m, kept_m, count, draws);
  if (has_v) HWY_DYNAMIC_DISPATCH(encode_some)(moments.type, Which::v, v, kept_v, count, draws);
}

void check(const Hyper& hyper, const Moments& moments, const Part& part) {
  const bool q8 = moments.type == MomentType::q8;
  STOKER_CHECK(moments.m.data || !uses_m(hyper));
  STOKER_CHECK(moments.v.data || !uses_v(hyper));
  STOKER_CHECK(!q8 || !moments.m.data || moments.m.scales);
  STOKER_CHECK(!q8 || !moments.v.data || moments.v.scales);
  STOKER_CHECK(!q8 || part.first % kMomentGroup == 0);
}

}  // namespace

void update(const Hyper& hyper, WeightType weight_type, GradType grad_type, const Planes& planes,
            const Moments& moments, const Part& part) {
  check(hyper, moments, part);
  if (moments.type == MomentType::f32 || !uses_m(hyper)) {
    Planes exact = planes;
    exact.m = reinterpret_cast<float*>(moments.m.data);
    exact.v = reinterpret_cast<float*>(moments.v.data);
    return update(hyper, weight_type, grad_type, exact, part);
  }
  const Coefficients c(hyper);
  for (size_t i = 0; i < part.count;) {
    const uint64_t element = part.first + i;
    // elements until the high half changes
    const uint64_t same_key = (uint64_t{1} << 32) - (element & 0xffffffffu);
    const auto piece = static_cast<size_t>(std::min<uint64_t>({kPiece, part.count - i, same_key}));
    update_piece(c, hyper.step, weight_type, grad_type, planes, moments, part, i, piece);
    i += piece;
  }
}

void decode(MomentType type, Which which, const KeptMoment& from, float* to, size_t count) {
  if (type == MomentType::f32)
    return static_cast<void>(std::memcpy(to, from.data, count * sizeof(float)));
  HWY_DYNAMIC_DISPATCH(decode_some)(type, which, from, to, count);
}

void encode(MomentType type, Which which, const float* from, const KeptMoment& to, size_t count) {
  if (type == MomentType::f32)
    return static_cast<void>(std::memcpy(to.data, from, count * sizeof(float)));
  alignas(64) float values[kPiece];
  alignas(64) uint32_t draws[kPiece];
  std::fill_n(draws, kPiece, kNoDraw);
  for (size_t i = 0; i < count; i += kPiece) {
    const size_t some = std::min(kPiece, count - i);
    std::memcpy(values, from + i, some * sizeof(float));
    HWY_DYNAMIC_DISPATCH(encode_some)(type, which, values, slice(to, type, i), some, draws);
  }
}

}  // namespace stoker::optim
#endif
