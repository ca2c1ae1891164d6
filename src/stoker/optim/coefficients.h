// Hyper, turned into the float32 constants the kernels use. Computed in double and rounded once, as
// torch does.
#pragma once

#include "stoker/optim/optim.h"

namespace stoker::optim {

struct Coefficients {
  explicit Coefficients(const Hyper& hyper);

  Algorithm algorithm;
  bool divide_grad, negate_grad, decay, has_momentum, first_step, nesterov;
  float grad_scale;
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  // torch's lerp: m + w (g - m) for a small weight w, g + (w - 1)(g - m) for a large one
  bool lerp_from_m;
  float lerp_weight;
  float weight_decay;   // adam, sgd: added to the gradient
  float weight_factor;  // adamw, lion: 1 - lr * weight_decay
  float negative_step;  // minus the step size
  float root_correction, eps;
  float momentum, one_minus_dampening;
};

// One step with its constants at hand, of elements before a parameter's rest (optim.h).
void update(const Coefficients& coefficients, WeightType weight_type, GradType grad_type,
            const Planes& planes, size_t count);

}  // namespace stoker::optim
