// What it costs to move bytes between a folder's disk and the memory of a GPU: by cuFile, and
// through host memory.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "stoker/io/gpu/gpu.h"
#include "stoker/io/load.h"

namespace stoker::gpu {

struct GpuPoint {
  std::string way;  // "cufile" or "host"
  Load::Kind kind = Load::Kind::read;
  uint64_t block_bytes = 0;
  uint32_t depth = 0;
  double bytes_per_second = 0;
};

struct GpuProbe {
  std::string device;         // the GPU's name
  std::string why_no_cufile;  // empty: it was measured
  uint64_t file_bytes = 0;    // of the temporary file
  // of what was to go by cuFile, how much went through host memory after all
  uint64_t bounced_bytes = 0;
  std::vector<GpuPoint> points;
};

struct GpuProbeOptions {
  double seconds = 8;  // about how long it may take
  uint64_t file_bytes = 256 << 20;
  std::function<void(std::string_view doing, double fraction)> progress = nullptr;
};

// By a temporary file in the folder, unlinked as soon as it is open.
Result<GpuProbe> probe_gpu(const std::string& folder, const std::shared_ptr<Gpu>& gpu,
                           const GpuProbeOptions& options = {});
// The same as text.
std::string gpu_probe_json(const GpuProbe& probe);

}  // namespace stoker::gpu
