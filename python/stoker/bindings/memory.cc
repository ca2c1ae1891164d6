// Arena and Buffer for Python, and how errors become exceptions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>

#include "convert.h"
#include "stoker/base/bytes.h"
#include "stoker/base/log.h"

namespace stoker::python {

[[noreturn]] void raise(const Error& error) {
  const std::string code(name(error.code));
  const nb::object type = nb::module_::import_("stoker.errors").attr("BY_CODE")[code.c_str()];
  const nb::object exception = type(error.sentence());
  if (error.sys_errno != 0) exception.attr("errno") = error.sys_errno;
  log().debug("{}", error.message());
  PyErr_SetObject(type.ptr(), exception.ptr());
  throw nb::python_error();
}

uint64_t low_bits(const nb::int_& value) {
  const uint64_t bits = PyLong_AsUnsignedLongLongMask(value.ptr());
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return bits;
}

[[noreturn]] void raise_invalid(const std::string& what) {
  raise(fail(Code::invalid_argument, "{}", what));
}

Count::operator uint64_t() const {
  if (!good) raise_invalid("a size or a place in an object is a whole number from 0 to 2^64 - 1");
  return value;
}

Name::operator std::string_view() const {
  if (!good)
    raise_invalid(
        "a key or a name is text that UTF-8 can hold, and this one has half of a "
        "surrogate pair in it: give it without, or as text of its bytes in hex");
  return text;
}

void check_process(const RuntimeHandle& runtime) {
  if (runtime.here()) return;
  raise(fail(Code::unsupported,
             "the parent process opened this, so it works there only. In a worker of a DataLoader, "
             "leave the model and its store to the parent, or open another store read-only"));
}

Slice RuntimeHandle::slice(uintptr_t address, uint64_t bytes) {
  auto* data = reinterpret_cast<std::byte*>(address);
  MutexLock lock(mutex_);
  for (const Arena* arena : arenas_) {
    if (data >= arena->data() && data + bytes <= arena->data() + arena->size())
      return {data, bytes, arena->id()};
  }
  return {data, bytes};
}

void RuntimeHandle::add(const Arena& arena) {
  MutexLock lock(mutex_);
  arenas_.push_back(&arena);
}

void RuntimeHandle::remove(const Arena& arena) {
  MutexLock lock(mutex_);
  std::erase(arenas_, &arena);
}

ArenaHandle::ArenaHandle(std::shared_ptr<RuntimeHandle> the_runtime,
                         std::unique_ptr<Arena> the_arena)
    : runtime(std::move(the_runtime)), arena(the_arena.release()) {
  runtime->add(*arena);
}

ArenaHandle::~ArenaHandle() {
  if (!runtime->here()) return;
  runtime->remove(*arena);
  if (auto forgotten = runtime->owner->loop().unadopt(*arena); !forgotten)
    log().warn("{}", forgotten.error().message());
}

namespace {

// DLPack's C structures, as its header fixes them.
struct DlDevice {
  int32_t type, id;
};
struct DlDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  int32_t dimensions;
  DlDataType type;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor*);
};
constexpr DlDevice kCpu{1, 0};
constexpr DlDataType kUint8{1, 8, 1};

// One export: the consumer's storage calls `deleter` when it dies, on whatever thread; no Python in
// there.
struct Export {
  DlManagedTensor managed;
  int64_t shape;
  std::shared_ptr<HeldBuffer> held;
};

const std::shared_ptr<HeldBuffer>& held(const PyBuffer& buffer) {
  if (!buffer.held) raise_invalid("this buffer was released");
  return buffer.held;
}

nb::object to_dlpack(const PyBuffer& buffer, const nb::kwargs&) {
  auto* made = new Export{{}, static_cast<int64_t>(held(buffer)->buffer->size()), held(buffer)};
  made->managed.tensor = {made->held->buffer->data(), kCpu, 1, kUint8, &made->shape, nullptr, 0};
  made->managed.context = made;
  made->managed.deleter = [](DlManagedTensor* managed) {
    delete static_cast<Export*>(managed->context);
  };
  // A consumer renames the capsule; under its first name nobody took it.
  PyObject* capsule = PyCapsule_New(&made->managed, "dltensor", [](PyObject* self) {
    if (PyCapsule_IsValid(self, "dltensor") == 0) return;
    auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(self, "dltensor"));
    managed->deleter(managed);
  });
  if (capsule == nullptr) {
    delete made;
    throw nb::python_error();
  }
  return nb::steal(capsule);
}

// The buffer protocol: a view holds the Python Buffer, and with it the memory.
int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const auto& buffer = *nb::inst_ptr<PyBuffer>(self);
  if (!buffer.held) {
    PyErr_SetString(PyExc_BufferError, "this buffer was released");
    return -1;
  }
  return PyBuffer_FillInfo(view, self, buffer.held->buffer->data(),
                           static_cast<Py_ssize_t>(buffer.held->buffer->size()), 0, flags);
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

nb::dict pages(const PyArena& arena) {
  const PageReport report = arena.handle->arena->pages();
  constexpr std::array<const char*, 3> kinds = {"hugetlb", "transparent", "small"};
  nb::dict out;
  out["kind"] = kinds[static_cast<size_t>(report.kind)];
  out["large_bytes"] = report.large_bytes;
  out["total_bytes"] = report.total_bytes;
  return out;
}

PyBuffer take(const PyArena& arena, uint64_t bytes) {
  check_process(*arena.handle->runtime);
  return {std::make_shared<HeldBuffer>(arena.handle, unwrap(arena.handle->arena->take(bytes)))};
}

uint64_t address(const std::byte* data) { return reinterpret_cast<uintptr_t>(data); }

}  // namespace
}  // namespace stoker::python

void bind_memory(nanobind::module_& module) {
  using namespace stoker::python;
  module.def(
      "human_bytes", [](uint64_t bytes) { return stoker::human_bytes(bytes); }, nb::arg("bytes"),
      "'1.5 GiB' style.");
  nb::class_<PyArena>(module, "Arena",
                      "Pre-faulted memory in large pages, out of which Buffers are cut.")
      .def("take", &take, nb::arg("bytes"))
      .def_prop_ro("address", [](const PyArena& a) { return address(a.handle->arena->data()); })
      .def_prop_ro("size", [](const PyArena& a) { return a.handle->arena->size(); })
      .def_prop_ro("used", [](const PyArena& a) { return a.handle->arena->used(); })
      .def_prop_ro("peak", [](const PyArena& a) { return a.handle->arena->peak(); })
      .def_prop_ro("largest_free", [](const PyArena& a) { return a.handle->arena->largest_free(); })
      .def_prop_ro("pages", &pages);

  nb::class_<PyBuffer>(
      module, "Buffer", nb::type_slots(buffer_slots),
      "Memory of an Arena; torch.from_dlpack(buffer) shares it and keeps it alive.")
      .def_prop_ro("address", [](const PyBuffer& b) { return address(held(b)->buffer->data()); })
      .def_prop_ro("size", [](const PyBuffer& b) { return held(b)->buffer->size(); })
      .def_prop_ro("shared", [](const PyBuffer& b) { return b.held && b.held.use_count() > 1; })
      .def("release", [](PyBuffer& b) { b.held.reset(); })
      .def("__dlpack__", &to_dlpack)
      .def("__dlpack_device__", [](const PyBuffer&) { return nb::make_tuple(kCpu.type, kCpu.id); });
}
