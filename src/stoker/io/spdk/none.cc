// In builds without SPDK.
#include "stoker/io/spdk/engine.h"

namespace stoker {

Result<SpdkEngine> make_spdk_engine(const std::vector<std::string>& targets, uint32_t) {
  const std::string address = targets.empty() ? "0000:00:04.0" : targets[0].substr(10);
  return fail(Code::unsupported,
              "this build has no SPDK; build it where pkg-config finds spdk_nvme and "
              "spdk_env_dpdk, or use Stoker's own driver: nvme:{}",
              address);
}

}  // namespace stoker
