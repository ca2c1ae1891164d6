#include "stoker/optim/optim.h"

#include <algorithm>

#include "stoker/base/check.h"
#include "stoker/optim/coefficients.h"
#include "stoker/optim/scalar.h"

namespace stoker::optim {

void update(const Hyper& hyper, WeightType weight_type, GradType grad_type, const Planes& planes, size_t count) {
  if (count == 0) return;
  STOKER_CHECK(hyper.step > 0);
  STOKER_CHECK(planes.weight_in && planes.weight_out && planes.grad);
  STOKER_CHECK(planes.remainder || weight_type == WeightType::f32);
  STOKER_CHECK(planes.m || !uses_m(hyper));
  STOKER_CHECK(planes.v || !uses_v(hyper));
  scalar::update(Coefficients(hyper), weight_type, grad_type, planes, count);
}

void split(const float* masters, uint16_t* weights, uint16_t* remainders, size_t count) {
  scalar::split(masters, weights, remainders, count);
}

void join(const uint16_t* weights, const uint16_t* remainders, float* masters, size_t count) {
  scalar::join(weights, remainders, masters, count);
}

void sums_of_squares(const std::byte* grad, GradType type, size_t count, double* pieces) {
  for (size_t at = 0; at < count; at += kNormPiece)
    *pieces++ = scalar::sum_piece(grad + at * grad_bytes(type), type, std::min(kNormPiece, count - at));
}

double sum_of_squares(const std::byte* grad, GradType type, size_t count, double so_far) {
  for (size_t at = 0; at < count; at += kNormPiece)
    so_far += scalar::sum_piece(grad + at * grad_bytes(type), type, std::min(kNormPiece, count - at));
  return so_far;
}

void scale_in_place(std::byte* grad, GradType type, size_t count, float factor) {
  scalar::scale_in_place(grad, type, count, factor);
}

const char* target_name() { return "scalar"; }

}  // namespace stoker::optim
