// Small things of stoker::base that the Python front shares with the core.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "convert.h"
#include "stoker/base/bytes.h"
#include "stoker/base/crc32c.h"

namespace nb = nanobind;

void bind_base(nb::module_& module) {
  module.def(
      "parse_bytes", [](const std::string& text) { return stoker::python::unwrap(stoker::parse_bytes(text)); }, nb::arg("text"),
      "'20GiB', '160 MiB', '7GB' or '4096' as a number of bytes; InvalidArgument otherwise.");
  module.def(
      "crc32c",
      [](uintptr_t address, size_t bytes, uint32_t seed) { return stoker::crc32c(reinterpret_cast<const void*>(address), bytes, seed); },
      nb::arg("address"), nb::arg("bytes"), nb::arg("seed") = 0, nb::call_guard<nb::gil_scoped_release>(), "CRC32C of memory; `seed` is the CRC of the bytes before.");
}
