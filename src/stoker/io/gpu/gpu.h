// Gpu: the memory of one GPU, as Arenas. And cuFile (GPUDirect Storage), by which bytes go between
// it and a disk without host memory.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "stoker/io/gpu/table.h"
#include "stoker/memory/arena.h"

namespace stoker::gpu {

struct Libraries {
  std::string cuda = "libcuda.so.1";
  std::string cufile = "libcufile.so.0";
};

// Any thread. What it made keeps it alive.
class Gpu : public std::enable_shared_from_this<Gpu> {
 public:
  // unsupported where there is no driver of CUDA, not_found where there is no such GPU.
  static Result<std::shared_ptr<Gpu>> open(int ordinal, const Libraries& libraries = {});
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const std::string& name() const { return name_; }
  // Null where cuFile cannot be used, and then why not.
  const CuFileTable* cufile() const { return cufile_ ? &*cufile_ : nullptr; }
  const std::string& why_no_cufile() const { return why_no_cufile_; }

  // Memory of the GPU, which this processor cannot touch. `bytes` are drawn on `budget`: one of the
  // GPU's.
  Result<std::unique_ptr<Arena>> make_arena(uint64_t bytes, Budget& budget);
  // Between memory of the host and of the GPU; waits for the end of it.
  Status copy(void* to, const void* from, size_t bytes);
  // Host memory that the GPU's copies need not stage; best effort.
  bool pin(const Arena& arena);
  void unpin(const Arena& arena);
  // The calling thread works for this GPU from now on: needed before calls of cuFile.
  Status enter();

 private:
  explicit Gpu(const CudaTable& cuda) : cuda_(cuda) {}
  Status start(int ordinal);
  void open_door(const std::string& library);
  Status check(int error, const char* doing) const;

  const CudaTable cuda_;
  std::optional<CuFileTable> cufile_;
  std::string name_, why_no_cufile_;
  int device_ = -1;
  void* context_ = nullptr;
};

}  // namespace stoker::gpu
