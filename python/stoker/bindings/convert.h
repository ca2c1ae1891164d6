// Between the core's types and Python's: errors, waiting, names.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <string>
#include <string_view>

#include "handles.h"

namespace stoker::python {

namespace nb = nanobind;

// Raises the class that stoker.errors.BY_CODE has for the code. Needs the GIL.
[[noreturn]] void raise(const Error& error);
[[noreturn]] void raise_invalid(const std::string& what);

template <typename T>
T unwrap(Result<T> result) {
  if (!result) raise(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

// Waits without the GIL, in slices so that Ctrl-C (or another signal whose handler raises) ends the wait.
// False if `timeout_ns` passed first; no limit if it is negative.
template <typename T>
bool wait_until_done(const Future<T>& future, int64_t timeout_ns = -1) {
  constexpr int64_t slice_ns = 50'000'000;
  for (int64_t left = timeout_ns;;) {
    const int64_t now = left < 0 ? slice_ns : std::min(slice_ns, left);
    {
      nb::gil_scoped_release release;
      if (future.wait_for(std::chrono::nanoseconds(now))) return true;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (timeout_ns >= 0 && (left -= now) <= 0) return false;
  }
}

template <typename T>
T wait_for(const Future<T>& future) {
  wait_until_done(future);
  return unwrap(future.wait());
}

Priority priority_of(std::string_view name);
Store& open(const PyStore& store);                                  // raises if it was closed
nb::object health(const PyStore& store);                            // None where there is nothing of the kind
offload::StepTransaction& open(const PyTransaction& transaction);   // raises if it was abandoned

}  // namespace stoker::python
