// The plain reference of every kernel, one element at a time. It defines the results: the SIMD
// kernels must give the same bits, and machines without fused multiply-add instructions run it as
// it is.
#pragma once

#include <array>

#include "stoker/optim/coefficients.h"
#include "stoker/optim/moment_codes.h"
#include "stoker/optim/moments.h"
#include "stoker/optim/optim.h"

namespace stoker::optim::scalar {

void update(const Coefficients& c, WeightType weight_type, GradType grad_type, const Planes& planes,
            size_t count);
// Elements of a float32 parameter's rest (optim.h): a few at most, so this is their only form.
void update_rest(const Coefficients& c, GradType grad_type, const Planes& planes, size_t count);
// Moments as kept, from the start of a group on.
void decode(MomentType type, Which which, const KeptMoment& from, float* to, size_t count);
// `values` are spoiled; of v in q8 their roots are left. `draws`: one an element.
void encode(MomentType type, Which which, float* values, const KeptMoment& to, size_t count,
            const uint32_t* draws);
// What a vector kernel leaves over of one group: taking roots, the bits of the greatest magnitude,
// codes.
uint32_t greatest_part(Which which, float* values, size_t count, uint32_t so_far);
void encode_parts(Which which, const float* parts, float inverse, std::byte* codes, size_t count,
                  const uint32_t* draws);

void split(const float* masters, uint16_t* weights, uint16_t* remainders, size_t count);
void join(const uint16_t* weights, const uint16_t* remainders, float* masters, size_t count);
// Element i is added to lane i mod 16, then the lanes are added as a balanced tree: an order that
// every vector width up to 16 lanes can keep. Squares of float32 are exact in float64. finish_piece
// goes on from 16 lanes so far.
double sum_piece(const std::byte* grad, GradType type, size_t count);
double finish_piece(std::array<double, 16> lanes, const std::byte* grad, GradType type,
                    size_t count);
void scale_in_place(std::byte* grad, GradType type, size_t count, float factor);
bool all_finite(const std::byte* grad, GradType type, size_t count);

}  // namespace stoker::optim::scalar
