// The optimizer kernels as functions over raw memory: addresses (tensor.data_ptr()), an element
// count and keyword hyperparameters. All of them release the GIL; the caller keeps the tensors
// alive and contiguous meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "convert.h"
#include "names.h"
#include "stoker/optim/moments.h"

namespace nb = nanobind;

namespace {

using namespace stoker::optim;
using stoker::python::WithoutGil;

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

WeightType weight_type_of(std::string_view name) {
  return is_bf16(name) ? WeightType::bf16 : WeightType::f32;
}
// A null plane that the algorithm needs is the caller's mistake: an exception here, where the
// kernel would abort.
void require(bool given, const char* plane) {
  if (!given)
    throw nb::value_error((std::string("optim_update: the address of the plane '") + plane +
                           "' is 0, and this algorithm, weight_type or moments needs it")
                              .c_str());
}

void make_hyper(Hyper* self, std::string_view algorithm, double lr, uint64_t step, double beta1,
                double beta2, double eps, double weight_decay, double momentum, double dampening,
                bool nesterov, bool maximize, double grad_scale) {
  if (step == 0)
    throw nb::value_error("step counts from 1: it is 1 for a parameter's first update");
  new (self) Hyper{.algorithm = algorithm_of(algorithm),
                   .lr = lr,
                   .beta1 = beta1,
                   .beta2 = beta2,
                   .eps = eps,
                   .weight_decay = weight_decay,
                   .momentum = momentum,
                   .dampening = dampening,
                   .nesterov = nesterov,
                   .maximize = maximize,
                   .grad_scale = grad_scale,
                   .step = step};
}

void update_planes(size_t count, std::string_view weight_type, std::string_view grad_type,
                   uintptr_t weight_in, uintptr_t weight_out, uintptr_t grad, uintptr_t remainder,
                   uintptr_t m, uintptr_t v, const Hyper& hyper, std::string_view moments,
                   uintptr_t m_scales, uintptr_t v_scales, uint64_t seed, uint64_t parameter) {
  const auto weights = weight_type_of(weight_type);
  const auto grads = grad_type_of(grad_type);
  require(weight_in != 0, "weight_in");
  require(weight_out != 0, "weight_out");
  require(grad != 0, "grad");
  require(remainder != 0 || weights == WeightType::f32, "remainder");
  require(m != 0 || !uses_m(hyper), "m");
  require(v != 0 || !uses_v(hyper), "v");
  const MomentType type = moment_type_of(moments);
  require(m == 0 || m_scales != 0 || type != MomentType::q8, "m_scales");
  require(v == 0 || v_scales != 0 || type != MomentType::q8, "v_scales");
  const Planes planes{.weight_in = pointer<std::byte>(weight_in),
                      .weight_out = pointer<std::byte>(weight_out),
                      .remainder = pointer<uint16_t>(remainder),
                      .grad = pointer<std::byte>(grad)};
  const Moments kept{.type = type,
                     .m = {pointer<std::byte>(m), pointer<float>(m_scales)},
                     .v = {pointer<std::byte>(v), pointer<float>(v_scales)},
                     .seed = seed,
                     .parameter = parameter};
  const WithoutGil without;
  update(hyper, weights, grads, planes, kept, Part::all(count));
}

Which which_of(std::string_view name) {
  if (name == "m") return Which::m;
  if (name == "v") return Which::v;
  throw unknown_name("moment", name, "m, v");
}

void decode_moment(std::string_view moments, std::string_view which, uintptr_t data,
                   uintptr_t scales, uintptr_t to, size_t count) {
  decode(moment_type_of(moments), which_of(which),
         {pointer<std::byte>(data), pointer<float>(scales)}, pointer<float>(to), count);
}

void encode_moment(std::string_view moments, std::string_view which, uintptr_t from, uintptr_t data,
                   uintptr_t scales, size_t count) {
  encode(moment_type_of(moments), which_of(which), pointer<float>(from),
         {pointer<std::byte>(data), pointer<float>(scales)}, count);
}

std::vector<double> piece_sums(uintptr_t grad, std::string_view type, size_t count) {
  const auto grads = grad_type_of(type);
  std::vector<double> pieces(norm_pieces(count));
  const WithoutGil without;
  sums_of_squares(pointer<std::byte>(grad), grads, count, pieces.data());
  return pieces;
}

double sum(uintptr_t grad, std::string_view type, size_t count, double so_far) {
  const auto grads = grad_type_of(type);
  const WithoutGil without;
  return sum_of_squares(pointer<std::byte>(grad), grads, count, so_far);
}

void scale(uintptr_t grad, std::string_view type, size_t count, float factor) {
  const auto grads = grad_type_of(type);
  const WithoutGil without;
  scale_in_place(pointer<std::byte>(grad), grads, count, factor);
}

}  // namespace

void bind_optim(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<Hyper>(module, "Hyper",
                    "Hyperparameters of one parameter's update. algorithm: 'adamw', 'adam', 'sgd' "
                    "or 'lion'.\nstep: the parameter's own count, 1 for its first update. Raises "
                    "ValueError for others.")
      .def("__init__", &make_hyper, nb::kw_only(), "algorithm"_a, "lr"_a, "step"_a, "beta1"_a = 0.9,
           "beta2"_a = 0.999, "eps"_a = 1e-8, "weight_decay"_a = 0.0, "momentum"_a = 0.0,
           "dampening"_a = 0.0, "nesterov"_a = false, "maximize"_a = false, "grad_scale"_a = 1.0)
      .def("__eq__", [](const Hyper& one, const Hyper& other) { return one == other; })
      .def_ro("lr", &Hyper::lr)
      .def_ro("step", &Hyper::step);
  module.def("optim_update", &update_planes, "count"_a, nb::kw_only(), "weight_type"_a,
             "grad_type"_a, "weight_in"_a, "weight_out"_a, "grad"_a, "remainder"_a = 0, "m"_a = 0,
             "v"_a = 0, "hyper"_a, "moments"_a = "exact", "m_scales"_a = 0, "v_scales"_a = 0,
             "seed"_a = 0, "parameter"_a = 0,
             "One optimizer step of a whole parameter of `count` elements, in the memory at the\n"
             "given addresses.\n\n"
             "weight_type and grad_type: 'bf16' or 'f32'. moments: how m and v are kept, "
             "'exact', 'bf16' or '8bit' (with\n"
             "scales); seed, parameter: the key of the draws that round them, beside step and\n"
             "element. Raises ValueError for a plane that is missing.");
  module.def("optim_decode_moment", &decode_moment, "moments"_a, "which"_a, "data"_a, "scales"_a,
             "to"_a, "count"_a,
             "m or v ('m', 'v'), as kept, from the start of a group on -> float32.");
  module.def("optim_encode_moment", &encode_moment, "moments"_a, "which"_a, "from_"_a, "data"_a,
             "scales"_a, "count"_a, "float32 -> m or v as kept, to the nearest.");
  module.def(
      "optim_split",
      [](uintptr_t masters, uintptr_t weights, uintptr_t remainders, size_t count) {
        split(pointer<float>(masters), pointer<uint16_t>(weights), pointer<uint16_t>(remainders),
              count);
      },
      "masters"_a, "weights"_a, "remainders"_a, "count"_a,
      nb::call_guard<stoker::python::WithoutGil>(),
      "float32 masters -> bf16 weights and their 16-bit remainders.");
  module.def(
      "optim_join",
      [](uintptr_t weights, uintptr_t remainders, uintptr_t masters, size_t count) {
        join(pointer<uint16_t>(weights), pointer<uint16_t>(remainders), pointer<float>(masters),
             count);
      },
      "weights"_a, "remainders"_a, "masters"_a, "count"_a,
      nb::call_guard<stoker::python::WithoutGil>(),
      "bf16 weights and their 16-bit remainders -> float32 masters.");
  module.def("optim_sums_of_squares", &piece_sums, "grad"_a, "grad_type"_a, "count"_a,
             "float64 sum of squares of each piece of 65,536 elements (the last may be shorter).");
  module.def("optim_sum_of_squares", &sum, "grad"_a, "grad_type"_a, "count"_a, "so_far"_a = 0.0,
             "so_far plus the pieces' sums of squares in order, in float64.");
  module.def("optim_scale", &scale, "grad"_a, "grad_type"_a, "count"_a, "factor"_a,
             "grad *= factor in float32, rounded to the gradient's type: torch's "
             "grad.mul_(tensor(factor)).");
  module.def("optim_target", &target_name,
             "The instruction set in use: 'AVX3' (AVX-512), 'AVX2' or 'scalar'.");
}
