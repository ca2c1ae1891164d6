// What the engines that reach an NVMe namespace cost: reads through the kernel's block layer, as
// commands through the kernel's driver (passthrough), or by our own driver (vfio).
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "stoker/base/result.h"

namespace stoker::nvme {

struct ReadPoint {
  std::string engine;  // "uring" (on the block device), "passthrough" or "vfio"
  uint64_t block_bytes = 0;
  uint32_t depth = 0;
  uint64_t transfers = 0;
  double iops = 0, bytes_per_second = 0;
  double p50_us = 0, p99_us = 0, p999_us = 0;  // from submit() to the end of its poll()
  double cpu_seconds_per_gb = 0, cpu_seconds_per_million = 0;  // of the whole process
  double syscalls_per_transfer = 0;                            // as the engine counts them
  double copies_per_transfer = 0;                              // 0 past the page cache
};

struct ReadProbeOptions {
  double seconds = 8;  // about how long it may take
  std::function<void(std::string_view doing, double fraction)> progress = nullptr;
};

// Reads the target, and where it is a device of the kernel's the same blocks of its block device.
// It writes nothing. Each point drives an engine by the calling thread, without a Loop.
Result<std::vector<ReadPoint>> probe_reads(const std::string& target,
                                           const ReadProbeOptions& options = {});
// The same as text.
std::string reads_json(const std::string& target, const std::vector<ReadPoint>& points);

}  // namespace stoker::nvme
