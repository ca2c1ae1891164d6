// How m and v are kept between steps: as float32, as bfloat16, or in 8 bits with one scale for each
// group.
//
// f32: as they are.
//
// bf16: rounded stochastically: up with the probability of its distance from below, so the mean is
// kept. Rounded to the nearest, v would stand still: one step at beta2 = 0.999 moves it less than
// half the distance of two bf16 numbers.
//
// q8: each group of kMomentGroup elements has a float32 scale s. An element is a code c of 8 bits:
//   m = s sign(c) y7(|c|), c in -127..127
//   v = (s y8(c))^2, c in 0..255
// y7 and y8 are the levels of dynamic tree quantization (T. Dettmers et al., 8-bit Optimizers via
// Block-wise Quantization, ICLR 2022). y of L bits has 2^p levels, evenly spaced, in the decade
// that ends at 10^-(L-1-p), for each p below L; moment_codes.h gives the formula. Three things
// differ from the paper:
// - A decade's last level is its end, so that s itself is a level.
// - Codes are chosen stochastically, as for bf16.
// - v is kept by its root, which the update divides by and which needs half the decades.
// A v above 0 never gets code 0: no update divides by nothing. s is the greatest magnitude (of m,
// of the roots of v) in the group. It is 0, and so are all codes, if that is below 2^-120. It is
// NaN if one element is not finite: then the whole group is NaN.
//
// Stochastic rounding draws 16 bits an element and moment from a hash of (seed, step, parameter,
// element): nothing depends on how a tensor is sliced, on threads, on the order of updates, or on
// how often one is made anew.
#pragma once

#include "stoker/optim/optim.h"

namespace stoker::optim {

enum class MomentType : uint8_t { f32, bf16, q8 };
enum class Which : uint8_t { m, v };

inline constexpr size_t kMomentGroup = 256;  // elements of q8 that share a scale
constexpr size_t moment_bytes(MomentType type) {
  return type == MomentType::f32 ? 4 : type == MomentType::bf16 ? 2 : 1;
}
constexpr size_t moment_scales(MomentType type, size_t count) {
  return type == MomentType::q8 ? (count + kMomentGroup - 1) / kMomentGroup : 0;
}

// One moment of a slice, as kept.
struct KeptMoment {
  // moment_bytes an element; null where the algorithm has no such moment
  std::byte* data = nullptr;
  float* scales = nullptr;  // q8: moment_scales of them
};

struct Moments {
  MomentType type = MomentType::f32;
  KeptMoment m = {}, v = {};
  uint64_t seed = 0, parameter = 0;  // key of the draws, beside Hyper::step and the element
};

// One optimizer step as optim.h tells, with m and v as kept: exactly the float32 update of what
// they stand for, then kept again. planes.m and planes.v are ignored. With moments that are rounded
// there is no rest (optim.h), for torch keeps none of these. For q8 a part begins at a multiple of
// kMomentGroup, and ends on one or where the parameter does.
void update(const Hyper& hyper, WeightType weight_type, GradType grad_type, const Planes& planes,
            const Moments& moments, const Part& part);

// What is kept, as float32. And back, to the nearest (of two equally near ones the greater): what
// decode gave comes back as it was.
void decode(MomentType type, Which which, const KeptMoment& from, float* to, size_t count);
void encode(MomentType type, Which which, const float* from, const KeptMoment& to, size_t count);

}  // namespace stoker::optim
