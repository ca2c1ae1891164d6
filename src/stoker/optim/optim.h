// Fused optimizer updates over state planes, and the two things gradient clipping needs.
//
// Everything here is a pure function over memory the caller owns: no allocation, no threads, no
// state. A caller splits a tensor over threads or disk chunks anywhere it likes: each element
// depends on its own inputs and its place in the tensor (Part) only, and slicing changes no bit.
// All targets (AVX-512, AVX2, scalar) give the same bits: products that are added are fused
// multiply-adds everywhere. A result that is NaN is always stored as 0x7fc00000 (float32) or 0x7fc0
// (bfloat16). Assumes the default floating-point environment (round to nearest; no flushing of
// denormals).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace stoker::optim {

enum class Algorithm : uint8_t { adamw, adam, sgd, lion };
enum class WeightType : uint8_t { bf16, f32 };
enum class GradType : uint8_t { bf16, f32 };

constexpr size_t weight_bytes(WeightType type) { return type == WeightType::bf16 ? 2 : 4; }
constexpr size_t grad_bytes(GradType type) { return type == GradType::bf16 ? 2 : 4; }

// The arithmetic is that of torch's fused CPU kernels in float32, element for element. These are
// compiled for AVX2; processors with AVX-512 run them too.
// - adamw: decoupled weight decay, torch.optim.AdamW(fused=True)
// - adam: weight decay added to the gradient, torch.optim.Adam(fused=True)
// - sgd: torch.optim.SGD(fused=True). `m` is the momentum buffer; without momentum there is no
// state
// - lion: decoupled weight decay; `m` is the only state:
//   w -= lr * sign(beta1 m + (1-beta1) g); m = beta2 m + (1-beta2) g
struct Hyper {
  Algorithm algorithm = Algorithm::adamw;
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;  // adamw, adam; lion uses the betas
  double weight_decay = 0;
  double momentum = 0, dampening = 0;  // sgd
  bool nesterov = false;               // sgd
  bool maximize = false;
  // the gradient is divided by this first, as torch's fused kernels do for GradScaler
  double grad_scale = 1;
  // this parameter's own count, 1 for its first update (torch's state["step"] afterwards)
  uint64_t step = 1;

  bool operator==(const Hyper&) const = default;
};

// Where one slice lives. Pointers need only the alignment of their element type. Planes must not
// overlap, but weight_in == weight_out updates in place. The update reads: weight_in, remainder, m,
// v, grad.
struct Planes {
  const std::byte* weight_in = nullptr;  // bf16 or float32
  std::byte* weight_out = nullptr;
  uint16_t* remainder = nullptr;    // bf16 weights only; updated in place
  float* m = nullptr;               // null for sgd without momentum; updated in place
  float* v = nullptr;               // adamw, adam; updated in place
  const std::byte* grad = nullptr;  // not changed

  Planes from(size_t element, WeightType weight_type, GradType grad_type) const;
};

// torch's kernels take 8 float32 at a time, and the rest of a tensor one by one. Two products make
// the new v (sgd: m): one is rounded, the other is fused with the sum. Up to the rest the product
// with the old value is rounded; in the rest it is fused. Threads of torch begin at multiples of
// 16, so a tensor has a rest at its end alone.
inline constexpr uint64_t kTorchLanes = 8;

// Which elements of a parameter a slice holds: `count` from `first` on, of `elements`.
struct Part {
  uint64_t first = 0;
  size_t count = 0;
  uint64_t elements = 0;

  static constexpr Part all(size_t count) { return {0, count, count}; }
  // How many of the slice lie before the parameter's rest.
  constexpr size_t before_rest() const {
    const uint64_t rest = elements - elements % kTorchLanes;
    return rest <= first ? 0 : static_cast<size_t>(std::min<uint64_t>(count, rest - first));
  }
};

// Does the algorithm read and write m (v) with these settings? What it does not need stays null and
// untouched.
bool uses_m(const Hyper& hyper);
bool uses_v(const Hyper& hyper);

// One optimizer step on a part of a parameter. m and v hold zeros before step 1 (sgd ignores what m
// holds at step 1). With bf16 weights the float32 master join(weight, remainder) is updated as a
// float32 weight before the rest is, then split again: torch keeps no masters, so there is no rest
// to follow.
void update(const Hyper& hyper, WeightType weight_type, GradType grad_type, const Planes& planes,
            const Part& part);

// float32 masters <-> bf16 plane + 16-bit remainder. planes.h states the encoding and its limits.
void split(const float* masters, uint16_t* weights, uint16_t* remainders, size_t count);
void join(const uint16_t* weights, const uint16_t* remainders, float* masters, size_t count);

// Sums of squares in float64, for the norm of gradients. One piece is kNormPiece elements summed in
// a fixed order. So a tensor cut at multiples of kNormPiece gives the same piece sums, whatever the
// slices and threads are.
inline constexpr size_t kNormPiece = size_t{64} << 10;
constexpr size_t norm_pieces(size_t count) { return (count + kNormPiece - 1) / kNormPiece; }
// pieces[i] = sum over piece i; `pieces` holds norm_pieces(count) values. Add them up in the
// tensor's order.
void sums_of_squares(const std::byte* grad, GradType type, size_t count, double* pieces);
// so_far + each piece in order: chained over consecutive slices it equals one call over the whole.
double sum_of_squares(const std::byte* grad, GradType type, size_t count, double so_far = 0);

// grad *= factor, computed in float32 and rounded to the gradient's type: torch's
// grad.mul_(tensor(factor)).
void scale_in_place(std::byte* grad, GradType type, size_t count, float factor);

// Whether no element is NaN or infinite.
bool all_finite(const std::byte* grad, GradType type, size_t count);

// The instruction set the calls above use on this machine: "AVX3" (AVX-512), "AVX2" or "scalar".
const char* target_name();

}  // namespace stoker::optim
