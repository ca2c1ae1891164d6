// The update kernels: scalar.cc's arithmetic, a vector at a time. One function for each algorithm
// and pair of types.
#include <algorithm>
#include <cstring>

#include "stoker/base/check.h"
#include "stoker/optim/coefficients.h"
#include "stoker/optim/optim.h"
#include "stoker/optim/scalar.h"
#include "stoker/optim/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "stoker/optim/update.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "stoker/optim/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace stoker::optim::HWY_NAMESPACE {

#if STOKER_OPTIM_SCALAR
void update_planes(const Coefficients& c, WeightType weight_type, GradType grad_type,
                   const Planes& p, size_t count) {
  scalar::update(c, weight_type, grad_type, p, count);
}

const char* name() { return "scalar"; }
#else
HWY_INLINE Floats set(float value) { return hn::Set(F32(), value); }

// The master of a bf16 weight. NaNs need none of planes.h's care here: a NaN stays one, and which
// is not kept anyway.
HWY_INLINE Floats load_master(const Planes& p, size_t i) {
  const I32 d;
  const Ints weight = load_u16(reinterpret_cast<const uint16_t*>(p.weight_in) + i);
  const Ints remainder = load_u16(p.remainder + i);
  // 1 if remainder > 0x8000
  const Ints up = hn::ShiftRight<16>(hn::Add(remainder, hn::Set(d, 0x7fff)));
  return hn::BitCast(F32(), hn::Or(hn::ShiftLeft<16>(hn::Sub(weight, up)), remainder));
}

// `master` holds no NaN but 0x7fc00000, which rounds to itself.
HWY_INLINE void store_master(const Planes& p, size_t i, Floats master) {
  const I32 d;
  const Ints bits = hn::BitCast(d, master);
  store_u16(hn::ShiftRight<16>(hn::Add(bits, hn::Set(d, 0x7fff))),
            reinterpret_cast<uint16_t*>(p.weight_out) + i);
  store_u16(bits, p.remainder + i);
}

HWY_INLINE void store_state(Floats value, float* to) { hn::StoreU(one_nan(value), F32(), to); }

HWY_INLINE Floats adam(const Coefficients& c, bool decoupled, Floats w, Floats g, float* m_at,
                       float* v_at) {
  if (c.decay) {
    if (decoupled)
      w = hn::Mul(w, set(c.weight_factor));
    else
      g = hn::MulAdd(w, set(c.weight_decay), g);
  }
  const Floats old_m = hn::LoadU(F32(), m_at);
  const Floats m = hn::MulAdd(set(c.lerp_weight), hn::Sub(g, old_m), c.lerp_from_m ? old_m : g);
  const Floats scaled = hn::Mul(set(c.one_minus_beta2), g);
  const Floats v = hn::MulAdd(scaled, g, hn::Mul(hn::LoadU(F32(), v_at), set(c.beta2)));
  store_state(m, m_at);
  store_state(v, v_at);
  const Floats denominator = hn::Add(hn::Div(hn::Sqrt(v), set(c.root_correction)), set(c.eps));
  return hn::Add(w, hn::Div(hn::Mul(set(c.negative_step), m), denominator));
}

HWY_INLINE Floats sgd(const Coefficients& c, Floats w, Floats g, float* m_at) {
  if (c.decay) g = hn::MulAdd(w, set(c.weight_decay), g);
  if (c.has_momentum) {
    Floats m = g;
    if (!c.first_step)
      m = hn::MulAdd(g, set(c.one_minus_dampening),
                     hn::Mul(hn::LoadU(F32(), m_at), set(c.momentum)));
    store_state(m, m_at);
    g = c.nesterov ? hn::MulAdd(m, set(c.momentum), g) : m;
  }
  return hn::MulAdd(g, set(c.negative_step), w);
}

HWY_INLINE Floats lion(const Coefficients& c, Floats w, Floats g, float* m_at) {
  const Floats m = hn::LoadU(F32(), m_at);
  const Floats blend = hn::MulAdd(g, set(c.one_minus_beta1), hn::Mul(m, set(c.beta1)));
  store_state(hn::MulAdd(g, set(c.one_minus_beta2), hn::Mul(m, set(c.beta2))), m_at);
  if (c.decay) w = hn::Mul(w, set(c.weight_factor));
  const Floats zero = hn::Zero(F32());
  // leaves 0 and NaN as they are
  const Floats below = hn::IfThenElse(hn::Lt(blend, zero), set(-1), blend);
  const Floats sign = hn::IfThenElse(hn::Gt(blend, zero), set(1), below);
  return hn::MulAdd(sign, set(c.negative_step), w);
}

template <Algorithm kAlgorithm, WeightType kWeight, GradType kGrad>
HWY_INLINE void update_vector(const Coefficients& c, const Planes& p, size_t i) {
  Floats g = load_grad(p.grad, kGrad, i);
  if (c.divide_grad) g = hn::Div(g, set(c.grad_scale));
  if (c.negate_grad) g = hn::Neg(g);
  Floats w = kWeight == WeightType::bf16
                 ? load_master(p, i)
                 : hn::LoadU(F32(), reinterpret_cast<const float*>(p.weight_in) + i);
  if constexpr (kAlgorithm == Algorithm::sgd)
    w = sgd(c, w, g, p.m + i);
  else if constexpr (kAlgorithm == Algorithm::lion)
    w = lion(c, w, g, p.m + i);
  else
    w = adam(c, kAlgorithm == Algorithm::adamw, w, g, p.m + i, p.v + i);
  if constexpr (kWeight == WeightType::bf16)
    store_master(p, i, one_nan(w));
  else
    hn::StoreU(one_nan(w), F32(), reinterpret_cast<float*>(p.weight_out) + i);
}

// One vector's worth of every plane, for the elements after the last whole vector: they run through
// the same arithmetic instead of a second form of it.
struct Spare {
  static constexpr size_t kLanes = hn::MaxLanes(F32());
  alignas(64) float weight[kLanes] = {}, m[kLanes] = {}, v[kLanes] = {}, grad[kLanes] = {};
  alignas(64) uint16_t remainder[kLanes] = {};
};

inline void copy(void* to, const void* from, size_t bytes) {
  if (to && from) std::memcpy(to, from, bytes);
}

template <Algorithm kAlgorithm, WeightType kWeight, GradType kGrad>
void update_some(const Coefficients& c, const Planes& p, size_t i, size_t count) {
  Spare spare;
  const size_t weight_size = weight_bytes(kWeight), grad_size = grad_bytes(kGrad);
  auto* weight = reinterpret_cast<std::byte*>(spare.weight);
  const Planes q{weight,  weight,  spare.remainder,
                 spare.m, spare.v, reinterpret_cast<const std::byte*>(spare.grad)};
  float* const m = p.m ? p.m + i : nullptr;
  float* const v = p.v ? p.v + i : nullptr;
  uint16_t* const remainder = p.remainder ? p.remainder + i : nullptr;
  copy(spare.weight, p.weight_in + i * weight_size, count * weight_size);
  copy(spare.grad, p.grad + i * grad_size, count * grad_size);
  copy(spare.m, m, count * sizeof(float));
  copy(spare.v, v, count * sizeof(float));
  copy(spare.remainder, remainder, count * sizeof(uint16_t));
  update_vector<kAlgorithm, kWeight, kGrad>(c, q, 0);
  copy(p.weight_out + i * weight_size, spare.weight, count * weight_size);
  copy(m, spare.m, count * sizeof(float));
  copy(v, spare.v, count * sizeof(float));
  copy(remainder, spare.remainder, count * sizeof(uint16_t));
}

template <Algorithm kAlgorithm, WeightType kWeight, GradType kGrad>
void update_all(const Coefficients& coefficients, const Planes& planes, size_t count) {
  // Copies, so that the compiler knows that no store below changes them.
  const Coefficients c = coefficients;
  const Planes p = planes;
  const size_t lanes = hn::Lanes(F32());
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) update_vector<kAlgorithm, kWeight, kGrad>(c, p, i);
  if (i < count) update_some<kAlgorithm, kWeight, kGrad>(c, p, i, count - i);
}

template <Algorithm kAlgorithm>
void update_types(const Coefficients& c, WeightType weight, GradType grad, const Planes& p,
                  size_t count) {
  constexpr auto kBf16 = WeightType::bf16, kF32 = WeightType::f32;
  if (weight == kBf16 && grad == GradType::bf16)
    return update_all<kAlgorithm, kBf16, GradType::bf16>(c, p, count);
  if (weight == kBf16) return update_all<kAlgorithm, kBf16, GradType::f32>(c, p, count);
  if (grad == GradType::bf16) return update_all<kAlgorithm, kF32, GradType::bf16>(c, p, count);
  update_all<kAlgorithm, kF32, GradType::f32>(c, p, count);
}

void update_planes(const Coefficients& c, WeightType weight, GradType grad, const Planes& p,
                   size_t count) {
  switch (c.algorithm) {
    case Algorithm::adamw:
      return update_types<Algorithm::adamw>(c, weight, grad, p, count);
    case Algorithm::adam:
      return update_types<Algorithm::adam>(c, weight, grad, p, count);
    case Algorithm::sgd:
      return update_types<Algorithm::sgd>(c, weight, grad, p, count);
    case Algorithm::lion:
      return update_types<Algorithm::lion>(c, weight, grad, p, count);
  }
}

const char* name() { return hwy::TargetName(HWY_TARGET); }
#endif

}  // namespace stoker::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stoker::optim {

HWY_EXPORT(update_planes);
HWY_EXPORT(name);

Planes Planes::from(size_t element, WeightType weight_type, GradType grad_type) const {
  return {weight_in + element * weight_bytes(weight_type),
          weight_out + element * weight_bytes(weight_type),
          remainder ? remainder + element : nullptr,
          m ? m + element : nullptr,
          v ? v + element : nullptr,
          grad + element * grad_bytes(grad_type)};
}

void update(const Hyper& hyper, WeightType weight_type, GradType grad_type, const Planes& planes,
            const Part& part) {
  if (part.count == 0) return;
  STOKER_CHECK(hyper.step > 0);
  STOKER_CHECK(part.count <= part.elements && part.first <= part.elements - part.count);
  STOKER_CHECK(planes.weight_in && planes.weight_out && planes.grad);
  STOKER_CHECK(planes.remainder || weight_type == WeightType::f32);
  STOKER_CHECK(planes.m || !uses_m(hyper));
  STOKER_CHECK(planes.v || !uses_v(hyper));
  const Coefficients coefficients(hyper);
  const size_t before = weight_type == WeightType::f32 ? part.before_rest() : part.count;
  update(coefficients, weight_type, grad_type, planes, before);
  if (before == part.count) return;
  const Planes rest = planes.from(before, weight_type, grad_type);
  scalar::update_rest(coefficients, grad_type, rest, part.count - before);
}

void update(const Coefficients& coefficients, WeightType weight_type, GradType grad_type,
            const Planes& planes, size_t count) {
  HWY_DYNAMIC_DISPATCH(update_planes)(coefficients, weight_type, grad_type, planes, count);
}

const char* target_name() { return HWY_DYNAMIC_DISPATCH(name)(); }

}  // namespace stoker::optim
#endif
