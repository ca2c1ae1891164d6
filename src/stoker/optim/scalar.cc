#include "stoker/optim/scalar.h"

#include <array>
#include <cmath>
#include <cstring>

#include "stoker/optim/planes.h"

namespace stoker::optim::scalar {
namespace {

template <typename T>
T load(const std::byte* at, size_t index) {
  T value;
  std::memcpy(&value, at + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void store(std::byte* at, size_t index, T value) {
  std::memcpy(at + index * sizeof(T), &value, sizeof(T));
}

// Which payload a NaN result carries depends on operand order and processor; results must not.
float one_nan(float value) { return std::isnan(value) ? std::bit_cast<float>(0x7fc00000u) : value; }

float load_grad(const std::byte* grad, GradType type, size_t i) {
  return type == GradType::bf16 ? widen(load<uint16_t>(grad, i)) : load<float>(grad, i);
}

float load_weight(const Planes& p, WeightType type, size_t i) {
  if (type == WeightType::f32) return load<float>(p.weight_in, i);
  return std::bit_cast<float>(join_bits(load<uint16_t>(p.weight_in, i), p.remainder[i]));
}

void store_weight(const Planes& p, WeightType type, size_t i, float value) {
  if (type == WeightType::f32) return store(p.weight_out, i, value);
  const Halves halves = split_bits(std::bit_cast<uint32_t>(value));
  store(p.weight_out, i, halves.weight);
  p.remainder[i] = halves.remainder;
}

// Which product of old_factor * old + new_factor * g is fused with the sum; the other is rounded.
enum class Fused : uint8_t { with_new, with_old };

template <Fused kFused>
float blend(float old_factor, float old, float new_factor, float g) {
  if constexpr (kFused == Fused::with_old)
    return std::fma(old, old_factor, new_factor * g);
  else
    return std::fma(new_factor, g, old * old_factor);
}

template <Fused kFused>
float adam(const Coefficients& c, float w, float g, float& m, float& v) {
  if (c.decay) {
    if (c.algorithm == Algorithm::adamw)
      w *= c.weight_factor;
    else
      g = std::fma(w, c.weight_decay, g);
  }
  m = std::fma(c.lerp_weight, g - m, c.lerp_from_m ? m : g);
  v = blend<kFused>(c.beta2, v, c.one_minus_beta2 * g, g);
  const float denominator = std::sqrt(v) / c.root_correction + c.eps;
  return w + c.negative_step * m / denominator;
}

template <Fused kFused>
float sgd(const Coefficients& c, float w, float g, float* m) {
  if (c.decay) g = std::fma(w, c.weight_decay, g);
  if (c.has_momentum) {
    *m = c.first_step ? g : blend<kFused>(c.momentum, *m, c.one_minus_dampening, g);
    g = c.nesterov ? std::fma(*m, c.momentum, g) : *m;
  }
  return std::fma(g, c.negative_step, w);
}

float lion(const Coefficients& c, float w, float g, float& m) {
  const float direction = std::fma(g, c.one_minus_beta1, m * c.beta1);
  m = std::fma(g, c.one_minus_beta2, m * c.beta2);
  if (c.decay) w *= c.weight_factor;
  // sign(0) is 0 and sign(NaN) is NaN
  const float sign = direction > 0 ? 1.0f : direction < 0 ? -1.0f : direction;
  return std::fma(sign, c.negative_step, w);
}

template <Fused kFused>
float apply(const Coefficients& c, float w, float g, float* m, float* v) {
  if (c.algorithm == Algorithm::sgd) return sgd<kFused>(c, w, g, m);
  return c.algorithm == Algorithm::lion ? lion(c, w, g, *m) : adam<kFused>(c, w, g, *m, *v);
}

template <Fused kFused>
void update_each(const Coefficients& c, WeightType weight_type, GradType grad_type, const Planes& p,
                 size_t count) {
  const bool has_v = c.algorithm == Algorithm::adam || c.algorithm == Algorithm::adamw;
  const bool has_m = c.algorithm != Algorithm::sgd || c.has_momentum;
  for (size_t i = 0; i < count; ++i) {
    float g = load_grad(p.grad, grad_type, i);
    if (c.divide_grad) g /= c.grad_scale;
    if (c.negate_grad) g = -g;
    float m = has_m ? p.m[i] : 0;
    float v = has_v ? p.v[i] : 0;
    const float w = apply<kFused>(c, load_weight(p, weight_type, i), g, &m, &v);
    if (has_m) p.m[i] = one_nan(m);
    if (has_v) p.v[i] = one_nan(v);
    store_weight(p, weight_type, i, one_nan(w));
  }
}

}  // namespace

void update(const Coefficients& c, WeightType weight_type, GradType grad_type, const Planes& p,
            size_t count) {
  update_each<Fused::with_new>(c, weight_type, grad_type, p, count);
}

void update_rest(const Coefficients& c, GradType grad_type, const Planes& p, size_t count) {
  update_each<Fused::with_old>(c, WeightType::f32, grad_type, p, count);
}

void split(const float* masters, uint16_t* weights, uint16_t* remainders, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;  // not through a float, which could quieten a NaN on its way
    std::memcpy(&bits, masters + i, sizeof bits);
    const Halves halves = split_bits(bits);
    weights[i] = halves.weight;
    remainders[i] = halves.remainder;
  }
}

void join(const uint16_t* weights, const uint16_t* remainders, float* masters, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = join_bits(weights[i], remainders[i]);
    std::memcpy(masters + i, &bits, sizeof bits);
  }
}

double finish_piece(std::array<double, 16> lanes, const std::byte* grad, GradType type,
                    size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const double g = load_grad(grad, type, i);
    lanes[i % lanes.size()] += g * g;
  }
  for (size_t width = lanes.size() / 2; width > 0; width /= 2)
    for (size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

double sum_piece(const std::byte* grad, GradType type, size_t count) {
  return finish_piece({}, grad, type, count);
}

void scale_in_place(std::byte* grad, GradType type, size_t count, float factor) {
  for (size_t i = 0; i < count; ++i) {
    const float g = load_grad(grad, type, i) * factor;
    if (type == GradType::bf16)
      store(grad, i, narrow(g));
    else
      store(grad, i, one_nan(g));
  }
}

bool all_finite(const std::byte* grad, GradType type, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (!std::isfinite(load_grad(grad, type, i))) return false;
  return true;
}

}  // namespace stoker::optim::scalar
