#include "stoker/base/log.h"
#include "stoker/io/loop.h"
#include "stoker/io/nvme/vfio_engine.h"
#include "stoker/io/posix/engine.h"
#include "stoker/io/uring/engine.h"

namespace stoker {

Result<std::unique_ptr<Engine>> make_engine(const std::string& name, uint32_t depth) {
  if (name != "auto" && name != "uring" && name != "posix" && name != "vfio") {
    return make_error(Code::invalid_argument,
                      "unknown I/O engine '" + name + "': choose auto, uring, posix or vfio", "io");
  }
  if (name == "vfio") {
    STOKER_ASSIGN(std::unique_ptr<Engine> vfio, nvme::VfioEngine::make(depth));
    return vfio;
  }
  if (name != "posix") {
    auto uring = UringEngine::make(depth);
    if (uring) return std::unique_ptr<Engine>(std::move(*uring));
    if (name == "uring" || uring.error().code == Code::invalid_argument) return uring.error();
    log().warn("disk I/O by threads (the posix engine): {}", uring.error().message());
  }
  STOKER_ASSIGN(std::unique_ptr<Engine> posix, PosixEngine::make(depth));
  return posix;
}

}  // namespace stoker
