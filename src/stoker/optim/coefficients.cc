#include "stoker/optim/coefficients.h"

#include <cmath>

namespace stoker::optim {
namespace {
bool is_adam(Algorithm algorithm) {
  return algorithm == Algorithm::adam || algorithm == Algorithm::adamw;
}
}  // namespace

Coefficients::Coefficients(const Hyper& hyper)
    : algorithm(hyper.algorithm),
      divide_grad(hyper.grad_scale != 1),
      negate_grad(hyper.maximize),
      decay(hyper.weight_decay != 0),
      has_momentum(hyper.momentum != 0),
      first_step(hyper.step == 1),
      nesterov(hyper.nesterov),
      grad_scale(static_cast<float>(hyper.grad_scale)),
      beta1(static_cast<float>(hyper.beta1)),
      one_minus_beta1(static_cast<float>(1 - hyper.beta1)),
      beta2(static_cast<float>(hyper.beta2)),
      one_minus_beta2(static_cast<float>(1 - hyper.beta2)),
      lerp_from_m(one_minus_beta1 < 0.5f),
      lerp_weight(lerp_from_m ? one_minus_beta1 : one_minus_beta1 - 1.0f),
      weight_decay(static_cast<float>(hyper.weight_decay)),
      weight_factor(static_cast<float>(1 - hyper.lr * hyper.weight_decay)),
      negative_step(static_cast<float>(-hyper.lr)),
      root_correction(1),
      eps(static_cast<float>(hyper.eps)),
      momentum(static_cast<float>(hyper.momentum)),
      one_minus_dampening(static_cast<float>(1 - hyper.dampening)) {
  if (!is_adam(algorithm)) return;
  const auto step = static_cast<double>(hyper.step);
  negative_step = static_cast<float>(-(hyper.lr / (1 - std::pow(hyper.beta1, step))));
  root_correction = static_cast<float>(std::sqrt(1 - std::pow(hyper.beta2, step)));
}

bool uses_m(const Hyper& hyper) { return hyper.algorithm != Algorithm::sgd || hyper.momentum != 0; }
bool uses_v(const Hyper& hyper) { return is_adam(hyper.algorithm); }

}  // namespace stoker::optim
