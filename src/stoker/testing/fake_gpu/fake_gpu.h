// A GPU made of software: the libraries libcuda.so.1 and libcufile.so.0 with what we call of them.
// Its memory cannot be touched by the process, as that of a GPU cannot: it is a second mapping of
// memory, without rights. cuFile moves bytes by pread and pwrite.
#pragma once

#include <atomic>
#include <cstddef>

namespace stoker {

struct FakeGpu {
  // What fails on purpose: an error of cuFile's, or 0.
  std::atomic<int> driver_error{0}, handle_error{0}, buffer_error{0}, transfer_error{0};
  std::atomic<size_t> transfer_most{SIZE_MAX};  // bytes of one transfer
  std::atomic<size_t> memory_left{256 << 20};
  // What is held now.
  std::atomic<int> contexts{0}, allocations{0}, pinned{0}, drivers{0}, handles{0}, buffers{0};
};

}  // namespace stoker

extern "C" {
stoker::FakeGpu* fake_gpu();
// Where the process can touch the memory of the GPU; host memory is what it is.
std::byte* fake_gpu_touchable(const void* at);
bool fake_gpu_is_current();  // the calling thread chose the GPU
}
