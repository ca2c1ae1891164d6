// SpdkEngine: SPDK's NVMe driver as an engine, in builds where its libraries were found. Its files
// are namespaces of drives that are bound to vfio-pci or uio: "nvme:spdk:0000:00:04.0", or
// "nvme:spdk:0000:00:04.0/2" for the second namespace.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "stoker/base/counters.h"
#include "stoker/io/engine.h"

namespace stoker {

struct SpdkCounters {
  Counter bounced_bytes;  // of memory that SPDK does not know: copied
};

struct SpdkEngine {
  std::unique_ptr<Engine> engine;
  std::shared_ptr<const SpdkCounters> counters;
};

// SPDK is started once a process, and is shown the drives of these targets and no other device. An
// engine for others is refused later on (busy). unsupported: this build has no SPDK.
Result<SpdkEngine> make_spdk_engine(const std::vector<std::string>& targets, uint32_t depth = 64);

// The engine for targets named by their PCI addresses: SPDK's or our own (vfio), as their names
// say; refused where they differ in that.
Result<std::unique_ptr<Engine>> make_pci_engine(const std::vector<std::string>& targets,
                                                uint32_t depth = 64);

}  // namespace stoker
