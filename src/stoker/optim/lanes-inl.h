// Vector pieces shared by the kernels; compiled once for each target, hence Highway's guard that
// toggles.
#if defined(STOKER_OPTIM_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STOKER_OPTIM_LANES_INL_H_
#undef STOKER_OPTIM_LANES_INL_H_
#else
#define STOKER_OPTIM_LANES_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "stoker/optim/optim.h"

HWY_BEFORE_NAMESPACE();
namespace stoker::optim::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;  // as many lanes as F32, half the width
using Floats = hn::Vec<F32>;
using Ints = hn::Vec<I32>;

HWY_INLINE Ints load_u16(const uint16_t* from) {
  return hn::PromoteTo(I32(), hn::LoadU(U16(), from));
}

// Keeps the low 16 bits of each lane.
HWY_INLINE void store_u16(Ints values, uint16_t* to) {
  hn::StoreU(hn::TruncateTo(U16(), hn::BitCast(U32(), values)), U16(), to);
}

HWY_INLINE Floats widen(Ints bf16) { return hn::BitCast(F32(), hn::ShiftLeft<16>(bf16)); }

HWY_INLINE Floats load_grad(const std::byte* grad, GradType type, size_t i) {
  if (type == GradType::bf16) return widen(load_u16(reinterpret_cast<const uint16_t*>(grad) + i));
  return hn::LoadU(F32(), reinterpret_cast<const float*>(grad) + i);
}

HWY_INLINE hn::Mask<I32> is_nan(Ints bits) {
  const I32 d;
  return hn::Gt(hn::And(bits, hn::Set(d, 0x7fffffff)), hn::Set(d, 0x7f800000));
}

// Every NaN becomes the one NaN that results may hold.
HWY_INLINE Floats one_nan(Floats value) {
  const Floats nan = hn::BitCast(F32(), hn::Set(I32(), 0x7fc00000));
  return hn::IfThenElse(hn::IsNaN(value), nan, value);
}

}  // namespace stoker::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
