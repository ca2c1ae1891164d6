// libcufile.so.0 of the GPU made of software. STOKER_FAKE_CUFILE in the environment is an error of
// cuFile's with which its driver does not open.
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <set>

#include "stoker/base/mutex.h"
#include "stoker/testing/fake_gpu/fake_gpu.h"

namespace {

// As cufile.h has them.
struct Error {
  int error, cuda;
};
struct Descriptor {
  int type;
  union {
    int fd;
    void* other;
  } handle;
  const void* operations;
};

constexpr int kWrongContext = 5015, kInvalid = 5022, kNotRegistered = 5024, kNotOpen = 5026,
              kNoHandle = 5027;

using stoker::Mutex, stoker::MutexLock;
Mutex mutex;
std::map<const void*, size_t> buffers GUARDED_BY(mutex);
std::set<void*> handles GUARDED_BY(mutex);

ssize_t transfer(void* handle, const void* base, size_t bytes, off_t at, off_t in_base,
                 bool reads) {
  stoker::FakeGpu& gpu = *fake_gpu();
  if (!fake_gpu_is_current()) return -kWrongContext;
  {
    MutexLock lock(mutex);
    if (handles.count(handle) == 0) return -kNoHandle;
    const auto buffer = buffers.find(base);
    if (buffer == buffers.end()) return -kNotRegistered;
    if (in_base < 0 || static_cast<size_t>(in_base) + bytes > buffer->second) return -kInvalid;
  }
  if (gpu.transfer_error != 0) return -gpu.transfer_error;
  const int fd = *static_cast<int*>(handle);
  std::byte* data = fake_gpu_touchable(static_cast<const std::byte*>(base) + in_base);
  const size_t most = std::min(bytes, gpu.transfer_most.load());
  return reads ? pread(fd, data, most, at) : pwrite(fd, data, most, at);
}

}  // namespace

extern "C" {

// NOLINTBEGIN(readability-identifier-naming): names of others
Error cuFileDriverOpen() {
  // NOLINTNEXTLINE(concurrency-mt-unsafe)
  const char* named = std::getenv("STOKER_FAKE_CUFILE");
  if (named != nullptr) return {std::atoi(named), 0};
  if (fake_gpu()->driver_error == 0) ++fake_gpu()->drivers;
  return {fake_gpu()->driver_error, 0};
}

Error cuFileDriverClose() { return {--fake_gpu()->drivers >= 0 ? 0 : kNotOpen, 0}; }

Error cuFileHandleRegister(void** handle, Descriptor* file) {
  if (fake_gpu()->handle_error != 0) return {fake_gpu()->handle_error, 0};
  if (file->type != 1 || file->operations != nullptr) return {kInvalid, 0};
  *handle = new int(file->handle.fd);
  MutexLock lock(mutex);
  handles.insert(*handle);
  ++fake_gpu()->handles;
  return {0, 0};
}

void cuFileHandleDeregister(void* handle) {
  MutexLock lock(mutex);
  if (handles.erase(handle) == 0) std::abort();
  delete static_cast<int*>(handle);
  --fake_gpu()->handles;
}

Error cuFileBufRegister(const void* data, size_t bytes, int) {
  if (!fake_gpu_is_current()) return {kWrongContext, 0};
  if (fake_gpu()->buffer_error != 0) return {fake_gpu()->buffer_error, 0};
  MutexLock lock(mutex);
  buffers[data] = bytes;
  ++fake_gpu()->buffers;
  return {0, 0};
}

Error cuFileBufDeregister(const void* data) {
  MutexLock lock(mutex);
  if (buffers.erase(data) == 0) return {kNotRegistered, 0};
  --fake_gpu()->buffers;
  return {0, 0};
}

ssize_t cuFileRead(void* handle, void* base, size_t bytes, off_t at, off_t into) {
  return transfer(handle, base, bytes, at, into, true);
}

ssize_t cuFileWrite(void* handle, const void* base, size_t bytes, off_t at, off_t from) {
  return transfer(handle, base, bytes, at, from, false);
}
// NOLINTEND(readability-identifier-naming)

}  // extern "C"
