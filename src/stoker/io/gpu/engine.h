// An engine whose ops may lie in memory of a GPU: their bytes go by cuFile, or where that is not to
// be had through host memory. Ops in host memory go as by the posix engine.
#pragma once

#include <memory>

#include "stoker/base/counters.h"
#include "stoker/io/engine.h"
#include "stoker/io/gpu/gpu.h"

namespace stoker::gpu {

// Read by any thread.
struct GpuCounters {
  Counter direct_bytes;   // by cuFile
  Counter bounced_bytes;  // through host memory
};

struct GpuEngineOptions {
  uint32_t depth = 64;
  bool direct = true;  // false: through host memory in any case
  // of host memory, for what goes through it; drawn on the budget, which outlives the engine
  uint64_t bounce_bytes = 8 << 20;
};

struct GpuEngine {
  std::unique_ptr<Engine> engine;
  std::shared_ptr<const GpuCounters> counters;
};

// Arenas of the GPU take part once they are adopted. One line in the log says why cuFile is not
// used, for all files or for one.
Result<GpuEngine> make_gpu_engine(std::shared_ptr<Gpu> gpu, Budget& budget,
                                  const GpuEngineOptions& options = {});

}  // namespace stoker::gpu
