// libcuda.so.1 of the GPU made of software.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>

#include "stoker/base/mutex.h"
#include "stoker/testing/fake_gpu/fake_gpu.h"

namespace {

using stoker::Mutex, stoker::MutexLock;

struct Piece {
  std::byte* touchable;
  size_t bytes;
};

Mutex mutex;
std::map<const std::byte*, Piece> pieces GUARDED_BY(mutex);  // by where the GPU has them
int context_object = 0;
thread_local bool current = false;

// NOLINTNEXTLINE(performance-no-int-to-ptr): CUDA has its addresses as numbers
const std::byte* pointer(uint64_t at) { return reinterpret_cast<const std::byte*>(at); }

}  // namespace

extern "C" {

stoker::FakeGpu* fake_gpu() {
  static stoker::FakeGpu gpu;
  return &gpu;
}

std::byte* fake_gpu_touchable(const void* at) {
  const auto* data = static_cast<const std::byte*>(at);
  MutexLock lock(mutex);
  auto piece = pieces.upper_bound(data);
  if (piece != pieces.begin() && data < (--piece)->first + piece->second.bytes)
    return piece->second.touchable + (data - piece->first);
  return const_cast<std::byte*>(data);
}

bool fake_gpu_is_current() { return current; }

// NOLINTBEGIN(readability-identifier-naming): names of others
int cuInit(unsigned) { return 0; }

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? 0 : 101;
}

int cuDeviceGetName(char* name, int bytes, int) {
  std::strncpy(name, "a GPU made of software", static_cast<size_t>(bytes));
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &context_object;
  ++fake_gpu()->contexts;
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int) {
  --fake_gpu()->contexts;
  return 0;
}

int cuCtxSetCurrent(void* context) {
  current = context == &context_object;
  return current ? 0 : 201;
}

int cuMemAlloc_v2(uint64_t* at, size_t bytes) {
  if (!current) return 201;
  if (bytes > fake_gpu()->memory_left) return 2;
  const int fd = memfd_create("gpu", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return 2;
  void* touchable = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  void* data = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (touchable == MAP_FAILED || data == MAP_FAILED) return 2;
  MutexLock lock(mutex);
  pieces[static_cast<std::byte*>(data)] = {static_cast<std::byte*>(touchable), bytes};
  *at = reinterpret_cast<uintptr_t>(data);
  ++fake_gpu()->allocations;
  return 0;
}

int cuMemFree_v2(uint64_t at) {
  MutexLock lock(mutex);
  const auto piece = pieces.find(pointer(at));
  if (!current || piece == pieces.end()) return 1;
  munmap(piece->second.touchable, piece->second.bytes);
  munmap(const_cast<std::byte*>(piece->first), piece->second.bytes);
  pieces.erase(piece);
  --fake_gpu()->allocations;
  return 0;
}

int cuMemcpy(uint64_t to, uint64_t from, size_t bytes) {
  if (!current) return 201;
  std::memcpy(fake_gpu_touchable(pointer(to)), fake_gpu_touchable(pointer(from)), bytes);
  return 0;
}

int cuMemHostRegister_v2(void*, size_t, unsigned) {
  ++fake_gpu()->pinned;
  return 0;
}

int cuMemHostUnregister(void*) {
  --fake_gpu()->pinned;
  return 0;
}
// NOLINTEND(readability-identifier-naming)

}  // extern "C"
