// The functions of libcuda and libcufile that we call, found when a GPU is asked for: nothing of
// CUDA is needed to build or to start.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "stoker/base/result.h"

namespace stoker::gpu {

// As cufile.h has them.
struct CuFileError {
  int error = 0;  // 0, or 5001 and up
  int cuda = 0;
};
struct CuFileDescriptor {
  int type = 1;  // a file descriptor
  union {
    int fd;
    void* other = nullptr;
  } handle;
  const void* operations = nullptr;  // of user-space file systems
};
using CuFileHandle = void*;

struct CudaTable {
  int (*init)(unsigned flags) = nullptr;
  int (*device_get)(int* device, int ordinal) = nullptr;
  int (*device_name)(char* name, int bytes, int device) = nullptr;
  int (*context_retain)(void** context, int device) = nullptr;
  int (*context_release)(int device) = nullptr;
  int (*context_set)(void* context) = nullptr;
  int (*allocate)(uint64_t* at, size_t bytes) = nullptr;
  int (*free)(uint64_t at) = nullptr;
  int (*copy)(uint64_t to, uint64_t from, size_t bytes) = nullptr;
  int (*pin)(void* data, size_t bytes, unsigned flags) = nullptr;
  int (*unpin)(void* data) = nullptr;
};

struct CuFileTable {
  CuFileError (*driver_open)() = nullptr;
  CuFileError (*driver_close)() = nullptr;
  CuFileError (*handle_register)(CuFileHandle* handle, CuFileDescriptor* file) = nullptr;
  void (*handle_deregister)(CuFileHandle handle) = nullptr;
  CuFileError (*buffer_register)(const void* data, size_t bytes, int flags) = nullptr;
  CuFileError (*buffer_deregister)(const void* data) = nullptr;
  // Bytes moved, -1 with errno, or an error of cuFile's negated.
  ssize_t (*read)(CuFileHandle handle, void* base, size_t bytes, off_t at, off_t into) = nullptr;
  ssize_t (*write)(CuFileHandle handle, const void* base, size_t bytes, off_t at,
                   off_t from) = nullptr;
};

// unsupported, with the reason, where the library or one of its functions is missing. Libraries
// stay loaded.
Result<CudaTable> load_cuda(const std::string& library);
Result<CuFileTable> load_cufile(const std::string& library);

// What an error of cuFile's means.
std::string cufile_sentence(int error);

}  // namespace stoker::gpu
