#include "stoker/io/gpu/probe.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "stoker/base/bytes.h"
#include "stoker/io/gpu/engine.h"

namespace stoker::gpu {
namespace {

constexpr uint32_t kDepth = 32;
constexpr uint64_t kMemory = 32 * kMiB;
constexpr uint64_t kHostMemory = 16 * kMiB;

struct Plan {
  Load::Kind kind;
  uint64_t block_bytes;
  uint32_t depth;
};
constexpr std::array kPlans = {
    Plan{Load::Kind::write, kMiB, kDepth}, Plan{Load::Kind::read, kMiB, kDepth},
    Plan{Load::Kind::read, kMiB, 8},       Plan{Load::Kind::read, kMiB, 1},
    Plan{Load::Kind::read, 4 * kMiB, 8},   Plan{Load::Kind::read, 64 * kKiB, kDepth}};

// One way over one Loop of its own.
class Way {
 public:
  Way(std::string name, const std::string& folder, const GpuProbeOptions& options)
      : name_(std::move(name)), folder_(folder), options_(options) {}

  Status measure(const std::shared_ptr<Gpu>& gpu, double begin, double end, GpuProbe* probe) {
    Budget budget(kHostMemory), gpu_budget(kMemory + kMiB);
    STOKER_ASSIGN(GpuEngine made,
                  make_gpu_engine(
                      gpu, budget,
                      {.depth = kDepth, .direct = name_ == "cufile", .bounce_bytes = kHostMemory}));
    STOKER_ASSIGN(const auto loop,
                  Loop::make(std::move(made.engine), {.depth = kDepth, .background_bytes = 0}));
    STOKER_ASSIGN(const auto arena, gpu->make_arena(kMemory, gpu_budget));
    STOKER_ASSIGN(const Buffer buffer, arena->take(kMemory));
    STOKER_TRY(loop->adopt(*arena));
    const std::string path = folder_ + "/.stoker.probe." + std::to_string(getpid());
    const auto file =
        loop->open({.path = path, .create = true, .reserve_bytes = options_.file_bytes});
    unlink(path.c_str());  // whatever happens from here on, nothing stays behind
    if (!file) return file.error().with("cannot probe '" + folder_ + "'");
    Status status = run(*loop, file->id, buffer.slice(), begin, end, *made.counters, probe);
    if (name_ == "cufile") probe->bounced_bytes = made.counters->bounced_bytes.get();
    STOKER_TRY(loop->close(file->id));
    STOKER_TRY(loop->unadopt(*arena));
    return status;
  }

 private:
  Status run(Loop& loop, FileId file, const Slice& memory, double begin, double end,
             const GpuCounters& counters, GpuProbe* probe) {
    // Blocks that were never written are slower to write, and need no disk to be read.
    tell("first write", begin);
    STOKER_TRY(
        run_load(loop, file, memory, {Load::Kind::write, kMiB, kDepth, options_.file_bytes}));
    if (name_ == "cufile" && counters.direct_bytes.get() == 0) {
      probe->why_no_cufile = "it does not serve this folder; a warning says why";
      return {};
    }
    const double each = options_.seconds * (end - begin) / static_cast<double>(kPlans.size());
    for (size_t i = 0; i < kPlans.size(); ++i) {
      const Plan& plan = kPlans[i];
      tell(std::string(stoker::name(plan.kind)) + " " + human_bytes(plan.block_bytes) + " depth " +
               std::to_string(plan.depth),
           begin + (end - begin) * static_cast<double>(i) / static_cast<double>(kPlans.size()));
      STOKER_ASSIGN(const LoadResult result,
                    run_load(loop, file, memory,
                             {plan.kind, plan.block_bytes, plan.depth, options_.file_bytes,
                              static_cast<uint64_t>(each * 1e9)}));
      probe->points.push_back(
          {name_, plan.kind, plan.block_bytes, plan.depth, result.bytes_per_second()});
    }
    return {};
  }
  void tell(const std::string& doing, double fraction) const {
    if (options_.progress) options_.progress(name_ + " " + doing, fraction);
  }

  const std::string name_;
  const std::string& folder_;
  const GpuProbeOptions& options_;
};

}  // namespace

Result<GpuProbe> probe_gpu(const std::string& folder, const std::shared_ptr<Gpu>& gpu,
                           const GpuProbeOptions& options) {
  GpuProbe probe;
  probe.device = gpu->name();
  probe.why_no_cufile = gpu->why_no_cufile();
  probe.file_bytes = options.file_bytes;
  if (probe.why_no_cufile.empty())
    STOKER_TRY(Way("cufile", folder, options).measure(gpu, 0, 0.5, &probe));
  const double begin = probe.why_no_cufile.empty() ? 0.5 : 0;
  STOKER_TRY(Way("host", folder, options).measure(gpu, begin, 1, &probe));
  if (options.progress) options.progress("done", 1);
  return probe;
}

std::string gpu_probe_json(const GpuProbe& probe) {
  nlohmann::ordered_json json = {{"version", 1},
                                 {"device", probe.device},
                                 {"why_no_cufile", probe.why_no_cufile},
                                 {"file_bytes", probe.file_bytes},
                                 {"bounced_bytes", probe.bounced_bytes}};
  json["points"] = nlohmann::ordered_json::array();
  for (const GpuPoint& point : probe.points) {
    json["points"].push_back({{"way", point.way},
                              {"op", std::string(name(point.kind))},
                              {"block_bytes", point.block_bytes},
                              {"depth", point.depth},
                              {"bytes_per_second", point.bytes_per_second}});
  }
  return json.dump(2) + "\n";
}

}  // namespace stoker::gpu
