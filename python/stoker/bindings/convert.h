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

// A seed of Python's may be negative or longer than 64 bits: its low 64 bits count.
uint64_t low_bits(const nb::int_& value);

template <typename T>
T unwrap(Result<T> result) {
  if (!result) raise(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

// A number of bytes or a place in an object, as Python gives it. What is no such number raises
// InvalidArgument when it is used.
struct Count {
  uint64_t value = 0;
  bool good = true;
  operator uint64_t() const;
};

// A key or a name. Text of Python that is no text in UTF-8 (half a surrogate pair) raises
// InvalidArgument when it is used.
struct Name {
  std::string text;
  bool good = true;
  operator std::string_view() const;
};

// Without the GIL. Once the interpreter is about to end, a thread that it does not wait for stays
// in the destructor for ever: Python would end such a thread by unwinding its stack, which ends the
// process where the frames are of C++.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// In a process that was forked since: raises. What waits for threads would wait for ever.
void check_process(const RuntimeHandle& runtime);

// Waits without the GIL, in slices so that Ctrl-C (or another signal whose handler raises) ends the
// wait. False if `timeout_ns` passed first; no limit if it is negative.
// `answers`: whoever waits may receive them.
template <typename T>
bool wait_until_done(const Future<T>& future, int64_t timeout_ns = -1,
                     const std::weak_ptr<Answers>& answers = {}) {
  constexpr int64_t slice_ns = 50'000'000;
  for (int64_t left = timeout_ns;;) {
    const int64_t now = left < 0 ? slice_ns : std::min(slice_ns, left);
    {
      const WithoutGil without;
      if (const auto from = answers.lock())
        from->receive_until([&] { return future.ready(); },
                            std::chrono::steady_clock::now() + std::chrono::nanoseconds(now));
      if (future.wait_for(std::chrono::nanoseconds(now))) return true;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (timeout_ns >= 0 && (left -= now) <= 0) return false;
  }
}

template <typename T>
T wait_for(const Future<T>& future, const std::weak_ptr<Answers>& answers = {}) {
  wait_until_done(future, -1, answers);
  return unwrap(future.wait());
}

Priority priority_of(std::string_view name);
Store& open(const PyStore& store);  // raises if it was closed
// None where there is nothing of the kind
nb::object health(const PyStore& store);
offload::StepTransaction& open(const PyTransaction& transaction);  // raises if it was abandoned

}  // namespace stoker::python

namespace nanobind::detail {

template <>
struct type_caster<stoker::python::Count> {
  NB_TYPE_CASTER(stoker::python::Count, const_name("int"))
  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    const object number = steal(PyNumber_Index(source.ptr()));
    if (!number.is_valid()) {
      PyErr_Clear();
      return false;
    }
    value.value = PyLong_AsUnsignedLongLong(number.ptr());
    value.good = PyErr_Occurred() == nullptr;
    PyErr_Clear();
    return true;
  }
};

template <>
struct type_caster<stoker::python::Name> {
  NB_TYPE_CASTER(stoker::python::Name, const_name("str"))
  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    if (!PyUnicode_Check(source.ptr())) return false;
    Py_ssize_t bytes = 0;
    const char* text = PyUnicode_AsUTF8AndSize(source.ptr(), &bytes);
    value.good = text != nullptr;
    if (text != nullptr) value.text.assign(text, static_cast<size_t>(bytes));
    PyErr_Clear();
    if (value.good) return true;
    // A name of bytes that are no text, as os.listdir() gives it, and to_text().
    const object raw = steal(PyUnicode_AsEncodedString(source.ptr(), "utf-8", "surrogateescape"));
    value.good = raw.is_valid();
    if (value.good)
      value.text.assign(PyBytes_AS_STRING(raw.ptr()),
                        static_cast<size_t>(PyBytes_GET_SIZE(raw.ptr())));
    PyErr_Clear();
    return true;
  }
};

}  // namespace nanobind::detail
