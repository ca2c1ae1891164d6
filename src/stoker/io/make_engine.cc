#include <algorithm>

#include "stoker/base/log.h"
#include "stoker/io/loop.h"
#include "stoker/io/nvme/command.h"
#include "stoker/io/nvme/vfio_engine.h"
#include "stoker/io/posix/engine.h"
#include "stoker/io/spdk/engine.h"
#include "stoker/io/uring/engine.h"

namespace stoker {

Result<std::unique_ptr<Engine>> make_engine(const std::string& name, uint32_t depth) {
  if (name != "auto" && name != "uring" && name != "posix" && name != "vfio") {
    return fail(Code::invalid_argument,
                "unknown I/O engine '{}': choose auto, uring, posix or vfio", name);
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

Result<std::unique_ptr<Engine>> make_pci_engine(const std::vector<std::string>& targets,
                                                uint32_t depth) {
  const auto by_spdk = std::count_if(targets.begin(), targets.end(), [](const std::string& path) {
    return nvme::is_spdk_target(path);
  });
  if (by_spdk == 0) return make_engine("vfio", depth);
  if (static_cast<size_t>(by_spdk) != targets.size())
    return fail(Code::invalid_argument,
                "the drives of a store are all driven by SPDK (nvme:spdk:...), or none is: '{}' "
                "and the others do not share an engine",
                targets[0]);
  STOKER_ASSIGN(SpdkEngine spdk, make_spdk_engine(targets, depth));
  return std::move(spdk.engine);
}

}  // namespace stoker
