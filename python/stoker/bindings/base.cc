// Small things of stoker::base that the Python front shares with the core.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>
#include <xxhash.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "convert.h"
#include "stoker/base/bytes.h"
#include "stoker/base/crc32c.h"
#include "stoker/base/mutex.h"
#include "stoker/codec/reduction.h"

namespace nb = nanobind;

namespace stoker::python {
namespace {

std::atomic<bool> leaving{false};      // the interpreter is about to end
std::atomic<unsigned long> leaver{0};  // the thread that said so, which goes on
std::atomic<int> coming{0};            // threads on their way back to the GIL

struct Parked {
  Mutex mutex;
  std::vector<unsigned long> threads GUARDED_BY(mutex);
};
Parked& parked() {
  static Parked* const parked = new Parked;  // threads may come until the very end
  return *parked;
}

[[noreturn]] void park() {
  {
    MutexLock lock(parked().mutex);
    parked().threads.push_back(PyThread_get_thread_ident());
  }
  for (;;) pause();
}

// From here on no other thread comes back out of the core to Python.
void leave() {
  leaver = PyThread_get_thread_ident();
  leaving = true;
  const WithoutGil without;
  for (int i = 0; coming > 0 && i < 1000; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

std::vector<unsigned long> parked_threads() {
  MutexLock lock(parked().mutex);
  return parked().threads;
}

nb::bytes xxh3_128(uintptr_t address, size_t bytes) {
  XXH128_canonical_t canonical;
  {
    const WithoutGil without;
    XXH128_canonicalFromHash(&canonical,
                             XXH3_128bits(reinterpret_cast<const void*>(address), bytes));
  }
  return nb::bytes(canonical.digest, sizeof canonical.digest);
}

std::pair<size_t, uint32_t> reduce(uintptr_t address, size_t bytes, uintptr_t into) {
  const WithoutGil without;
  const codec::Reduced made = codec::reduce({reinterpret_cast<const std::byte*>(address), bytes},
                                            {reinterpret_cast<std::byte*>(into), bytes});
  return {made.bytes, made.width};
}

void expand(uintptr_t address, size_t stored, uint32_t width, uintptr_t into, size_t bytes) {
  Status status;
  {
    const WithoutGil without;
    status = codec::expand({reinterpret_cast<const std::byte*>(address), stored}, width,
                           {reinterpret_cast<std::byte*>(into), bytes});
  }
  unwrap(std::move(status));
}

}  // namespace

WithoutGil::~WithoutGil() {
  ++coming;
  if (leaving && PyThread_get_thread_ident() != leaver) {
    --coming;
    park();
  }
  PyEval_RestoreThread(state_);
  --coming;
}

}  // namespace stoker::python

void bind_base(nb::module_& module) {
  module.def("leave", &stoker::python::leave,
             "The interpreter is about to end: threads that are in the core stay there for ever.");
  module.def("parked_threads", &stoker::python::parked_threads,
             "Identifiers of the threads that stay in the core since leave().");
  module.def(
      "parse_bytes",
      [](const std::string& text) { return stoker::python::unwrap(stoker::parse_bytes(text)); },
      nb::arg("text"),
      "'20GiB', '160 MiB', '7GB' or '4096' as a number of bytes; InvalidArgument otherwise.");
  module.def(
      "crc32c",
      [](uintptr_t address, size_t bytes, uint32_t seed) {
        return stoker::crc32c(reinterpret_cast<const void*>(address), bytes, seed);
      },
      nb::arg("address"), nb::arg("bytes"), nb::arg("seed") = 0,
      nb::call_guard<stoker::python::WithoutGil>(),
      "CRC32C of memory; `seed` is the CRC of the bytes before.");
  module.def("xxh3_128", &stoker::python::xxh3_128, nb::arg("address"), nb::arg("bytes"),
             "XXH3-128 of memory: 16 bytes, the canonical form.");
  module.def("reduce", &stoker::python::reduce, nb::arg("address"), nb::arg("bytes"),
             nb::arg("into"),
             "Groups the bytes of floats, and packs them into as much memory: the bytes that are "
             "stored, and the width of an element. Width 0: it gets no smaller, and nothing is "
             "written.");
  module.def("expand", &stoker::python::expand, nb::arg("address"), nb::arg("stored"),
             nb::arg("width"), nb::arg("into"), nb::arg("bytes"),
             "The way back. Corruption unless it is what reduce() makes of so many bytes.");
}
