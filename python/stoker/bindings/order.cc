// Permutation and Mixture for Python: one position at a time, or a range of them as an array.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <vector>

#include "convert.h"
#include "stoker/base/order.h"

namespace nb = nanobind;

namespace stoker::python {
namespace {

using Positions = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Row = nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>>;
using Rows = nb::ndarray<nb::numpy, uint64_t, nb::ndim<2>>;

[[noreturn]] void throw_outside(const Permutation& order, const std::string& position) {
  throw nb::index_error(
      (position + " is outside the " + std::to_string(order.count()) + " samples of this order")
          .c_str());
}

uint64_t inside(const Permutation& order, int64_t value) {
  if (value < 0 || static_cast<uint64_t>(value) >= order.count())
    throw_outside(order, std::to_string(value));
  return static_cast<uint64_t>(value);
}

uint64_t length(int64_t first, int64_t last) {
  if (first < 0 || last < first) {
    throw nb::index_error(("there are no positions from " + std::to_string(first) + " to " +
                           std::to_string(last) +
                           ": they count from 0, and the first is not above the last")
                              .c_str());
  }
  return static_cast<uint64_t>(last - first);
}

// An array of numpy that owns the numbers.
std::pair<uint64_t*, nb::capsule> numbers(uint64_t count) {
  auto owned = std::make_unique<uint64_t[]>(count);
  uint64_t* const data = owned.release();
  return {data,
          nb::capsule(data, [](void* each) noexcept { delete[] static_cast<uint64_t*>(each); })};
}

Row samples(const Permutation& order, const Positions& positions) {
  const uint64_t count = positions.shape(0);
  const auto [data, owner] = numbers(count);
  for (uint64_t i = 0; i < count; ++i) {
    if (positions(i) >= order.count()) throw_outside(order, std::to_string(positions(i)));
  }
  {
    const WithoutGil without;
    for (uint64_t i = 0; i < count; ++i) data[i] = order.sample(positions(i));
  }
  return Row(data, {count}, owner);
}

Rows draws(const Mixture& mixture, int64_t first, int64_t last) {
  const uint64_t count = length(first, last);
  const auto [data, owner] = numbers(2 * count);
  {
    const WithoutGil without;
    for (uint64_t i = 0; i < count; ++i) {
      const Draw draw = mixture.draw(static_cast<uint64_t>(first) + i);
      data[2 * i] = draw.source;
      data[2 * i + 1] = draw.number;
    }
  }
  return Rows(data, {count, 2}, owner);
}

uint64_t position_of(const Mixture& mixture, uint32_t source, uint64_t number) {
  if (source >= mixture.counts().size())
    throw nb::index_error(("there is no source " + std::to_string(source) + ": the mixture has " +
                           std::to_string(mixture.counts().size()))
                              .c_str());
  return mixture.position({source, number});
}

}  // namespace
}  // namespace stoker::python

void bind_order(nb::module_& module) {
  using namespace stoker;
  using namespace stoker::python;
  nb::class_<Permutation>(
      module, "Permutation",
      "An invertible permutation of [0, count), keyed by (seed, epoch). Needs no array.")
      .def(
          "__init__",
          [](Permutation* self, int64_t count, const nb::int_& seed, const nb::int_& epoch) {
            if (count < 1) {
              throw nb::value_error(
                  ("a permutation needs at least one sample, not " + std::to_string(count))
                      .c_str());
            }
            new (self) Permutation(static_cast<uint64_t>(count), low_bits(seed), low_bits(epoch));
          },
          nb::arg("count"), nb::arg("seed"), nb::arg("epoch"))
      .def("__len__", &Permutation::count)
      .def(
          "sample",
          [](const Permutation& order, int64_t at) { return order.sample(inside(order, at)); },
          nb::arg("position"))
      .def(
          "position",
          [](const Permutation& order, int64_t of) { return order.position(inside(order, of)); },
          nb::arg("sample"))
      .def("samples", &samples, nb::arg("positions"));
  nb::class_<Mixture>(
      module, "Mixture",
      "Which source each position of an endless sequence draws from, by exact shares.")
      .def(
          "__init__",
          [](Mixture* self, const std::vector<double>& weights, const nb::int_& seed) {
            new (self) Mixture(unwrap(Mixture::make(weights, low_bits(seed))));
          },
          nb::arg("weights"), nb::arg("seed"))
      .def_prop_ro("counts",
                   [](const Mixture& mixture) {
                     return std::vector<uint32_t>(mixture.counts().begin(), mixture.counts().end());
                   })
      .def(
          "draw",
          [](const Mixture& mixture, uint64_t at) {
            const Draw draw = mixture.draw(at);
            return std::pair(draw.source, draw.number);
          },
          nb::arg("position"))
      .def("position", &position_of, nb::arg("source"), nb::arg("number"))
      .def("draws", &draws, nb::arg("first"), nb::arg("last"));
}
