#include "stoker/optim/planes.h"

#include "stoker/optim/scalar.h"
#include "stoker/optim/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "stoker/optim/planes.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "stoker/optim/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stoker::optim::HWY_NAMESPACE {

#if STOKER_OPTIM_SCALAR
void split_planes(const float* masters, uint16_t* weights, uint16_t* remainders, size_t count) {
  scalar::split(masters, weights, remainders, count);
}

void join_planes(const uint16_t* weights, const uint16_t* remainders, float* masters,
                 size_t count) {
  scalar::join(weights, remainders, masters, count);
}
#else
// planes.h's split_bits, a vector at a time
HWY_INLINE Ints high_half(Ints bits) {
  const I32 d;
  const Ints rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Set(d, 0x7fff)));
  const Ints high = hn::ShiftRight<16>(bits);
  const auto payload_low = hn::Eq(hn::And(high, hn::Set(d, 0x7f)), hn::Zero(d));
  const Ints quiet = hn::Or(high, hn::IfThenElseZero(payload_low, hn::Set(d, 0x40)));
  return hn::IfThenElse(is_nan(bits), quiet, rounded);
}

// planes.h's join_bits
HWY_INLINE Ints join_lanes(Ints weight, Ints remainder) {
  const I32 d;
  const Ints bits = hn::Or(hn::ShiftLeft<16>(weight), remainder);
  const auto not_nan = hn::Lt(hn::And(weight, hn::Set(d, 0x7fff)), hn::Set(d, 0x7f81));
  const auto up = hn::And(hn::Gt(remainder, hn::Set(d, 0x8000)), not_nan);
  return hn::Sub(bits, hn::IfThenElseZero(up, hn::Set(d, 0x10000)));
}

void split_planes(const float* masters, uint16_t* weights, uint16_t* remainders, size_t count) {
  const I32 d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Ints bits = hn::LoadU(d, reinterpret_cast<const int32_t*>(masters) + i);
    store_u16(high_half(bits), weights + i);
    store_u16(bits, remainders + i);
  }
  // integers: the same bits either way
  scalar::split(masters + i, weights + i, remainders + i, count - i);
}

void join_planes(const uint16_t* weights, const uint16_t* remainders, float* masters,
                 size_t count) {
  const I32 d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes)
    hn::StoreU(join_lanes(load_u16(weights + i), load_u16(remainders + i)), d,
               reinterpret_cast<int32_t*>(masters) + i);
  scalar::join(weights + i, remainders + i, masters + i, count - i);
}
#endif

}  // namespace stoker::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stoker::optim {

HWY_EXPORT(split_planes);
HWY_EXPORT(join_planes);

void split(const float* masters, uint16_t* weights, uint16_t* remainders, size_t count) {
  HWY_DYNAMIC_DISPATCH(split_planes)(masters, weights, remainders, count);
}

void join(const uint16_t* weights, const uint16_t* remainders, float* masters, size_t count) {
  HWY_DYNAMIC_DISPATCH(join_planes)(weights, remainders, masters, count);
}

}  // namespace stoker::optim
#endif
