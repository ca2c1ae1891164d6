#include "stoker/io/gpu/table.h"

#include <dlfcn.h>

namespace stoker::gpu {
namespace {

// One library, and what of it is missing.
class Library {
 public:
  explicit Library(const std::string& name)
      : name_(name), handle_(dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ != nullptr) return;
    const char* why = dlerror();  // NOLINT(concurrency-mt-unsafe): of this thread
    problem_ = "cannot load " + name + (why == nullptr ? "" : std::string(": ") + why);
  }

  template <typename Function>
  void find(const char* symbol, Function*& function) {
    if (handle_ == nullptr) return;
    function = reinterpret_cast<Function*>(dlsym(handle_, symbol));
    if (function == nullptr && problem_.empty())
      problem_ = name_ + " has no " + symbol + "; it is too old";
  }

  Status status() const {
    return problem_.empty() ? Status{} : fail(Code::unsupported, "{}", problem_);
  }

 private:
  const std::string name_;
  void* const handle_;
  std::string problem_;
};

}  // namespace

Result<CudaTable> load_cuda(const std::string& name) {
  Library library(name);
  CudaTable table;
  library.find("cuInit", table.init);
  library.find("cuDeviceGet", table.device_get);
  library.find("cuDeviceGetName", table.device_name);
  library.find("cuDevicePrimaryCtxRetain", table.context_retain);
  library.find("cuDevicePrimaryCtxRelease_v2", table.context_release);
  library.find("cuCtxSetCurrent", table.context_set);
  library.find("cuMemAlloc_v2", table.allocate);
  library.find("cuMemFree_v2", table.free);
  library.find("cuMemcpy", table.copy);
  library.find("cuMemHostRegister_v2", table.pin);
  library.find("cuMemHostUnregister", table.unpin);
  STOKER_TRY(library.status());
  return table;
}

Result<CuFileTable> load_cufile(const std::string& name) {
  Library library(name);
  CuFileTable table;
  library.find("cuFileDriverOpen", table.driver_open);
  library.find("cuFileDriverClose", table.driver_close);
  library.find("cuFileHandleRegister", table.handle_register);
  library.find("cuFileHandleDeregister", table.handle_deregister);
  library.find("cuFileBufRegister", table.buffer_register);
  library.find("cuFileBufDeregister", table.buffer_deregister);
  library.find("cuFileRead", table.read);
  library.find("cuFileWrite", table.write);
  STOKER_TRY(library.status());
  return table;
}

std::string cufile_sentence(int error) {
  const auto what = [error]() -> const char* {
    switch (error) {
      case 5001:
        return "the kernel module nvidia-fs is not loaded";
      case 5004:
        return "nvidia-fs and libcufile are of different versions";
      case 5007:
        return "this platform is not supported";
      case 5008:
        return "this file system is not supported";
      case 5009:
        return "this GPU is not supported";
      case 5010:
        return "nvidia-fs reports an error";
      case 5011:
        return "the CUDA driver reports an error";
      case 5018:
        return "this kind of file is not supported";
      case 5019:
        return "the file is open in a way that is not supported";
      case 5020:
        return "the file is not open for direct I/O";
      case 5025:
        return "permission denied";
      case 5027:
        return "cuFile cannot register the file, and cufile.log says why";
      default:
        return "cuFile failed, and cufile.log says why";
    }
  };
  return std::string(what()) + " (cuFile error " + std::to_string(error) + ")";
}

}  // namespace stoker::gpu
