#include "stoker/io/nvme/probe.h"

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "stoker/base/bytes.h"
#include "stoker/base/clock.h"
#include "stoker/io/loop.h"
#include "stoker/io/nvme/command.h"
#include "stoker/io/nvme/device.h"
#include "stoker/io/nvme/vfio_engine.h"
#include "stoker/io/uring/engine.h"

namespace stoker::nvme {
namespace {

constexpr size_t kMemory = 8 * kMiB;
constexpr uint64_t kSpanMax = kGiB;  // of the namespace, from the target's begin
constexpr uint32_t kProbeDepth = 128;
constexpr size_t kTimesMax = 1 << 20;

struct Plan {
  uint64_t block_bytes;
  uint32_t depth;
};
constexpr std::array kPlans = {Plan{4 * kKiB, 1},  Plan{4 * kKiB, 2},   Plan{4 * kKiB, 4},
                               Plan{4 * kKiB, 8},  Plan{4 * kKiB, 16},  Plan{4 * kKiB, 32},
                               Plan{4 * kKiB, 64}, Plan{4 * kKiB, 128}, Plan{kMiB, 8}};

double cpu_seconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// As the engine counts them.
uint64_t system_calls(const Engine& engine) {
  if (const auto* vfio = dynamic_cast<const VfioEngine*>(&engine))
    return vfio->vfio_counters().system_calls.get();
  return dynamic_cast<const UringEngine&>(engine).system_calls().get();
}

// One engine with its file open.
struct Way {
  std::string name, path;
  uint64_t offset = 0;
  std::unique_ptr<Engine> engine;
  FileInfo file;
};

Status open_way(Way& way, const std::string& engine, const Arena& arena) {
  STOKER_ASSIGN(way.engine, make_engine(engine, kProbeDepth));
  STOKER_TRY(way.engine->adopt(arena));
  STOKER_ASSIGN(way.file, way.engine->open({.path = way.path, .write = false}));
  return {};
}

// Keeps `depth` reads under way until the time is over.
class Reads {
 public:
  Reads(Way& way, const Slice& memory, const Plan& plan, uint64_t span)
      : way_(way), plan_(plan), blocks_(span / plan.block_bytes), ops_(plan.depth) {
    times_.reserve(kTimesMax);
    for (size_t i = 0; i < ops_.size(); ++i) {
      Read& read = ops_[i];
      read.op.bytes = memory.sub(i * plan.block_bytes, plan.block_bytes);
      read.op.file = way.file.id;
      read.owner = this;
      read.op.context = &read;
      read.op.done = [](Op& op) noexcept {
        auto& done = *static_cast<Read*>(op.context);
        done.owner->completed(done);
      };
      ready_.push_back(&read.op);
    }
  }

  Result<ReadPoint> run(uint64_t limit_ns) {
    const uint64_t calls = system_calls(*way_.engine);
    const double cpu = cpu_seconds();
    const uint64_t begin = Clock::real().now_ns();
    uint64_t at = begin;
    do {
      refill(at);
      way_.engine->poll(1'000'000'000);
      at = Clock::real().now_ns();
      book(at);
    } while (at - begin < limit_ns && !error_);
    ready_.clear();
    while (active_ > 0) way_.engine->poll(1'000'000'000);
    book(Clock::real().now_ns());
    const auto ns = static_cast<double>(Clock::real().now_ns() - begin);
    if (error_) return *error_;
    ReadPoint point;
    point.cpu_seconds_per_million = (cpu_seconds() - cpu) * 1e6;
    point.engine = way_.name;
    point.block_bytes = plan_.block_bytes;
    point.depth = plan_.depth;
    point.transfers = transfers_;
    const auto count = static_cast<double>(transfers_);
    point.cpu_seconds_per_million /= count;
    point.cpu_seconds_per_gb =
        point.cpu_seconds_per_million * 1e3 / static_cast<double>(plan_.block_bytes);
    point.iops = count * 1e9 / ns;
    point.bytes_per_second = point.iops * static_cast<double>(plan_.block_bytes);
    point.syscalls_per_transfer = static_cast<double>(system_calls(*way_.engine) - calls) / count;
    point.copies_per_transfer = way_.file.direct ? 0 : 1;
    std::sort(times_.begin(), times_.end());
    point.p50_us = percentile(0.5);
    point.p99_us = percentile(0.99);
    point.p999_us = percentile(0.999);
    return point;
  }

 private:
  struct Read {
    Op op;
    Reads* owner = nullptr;
    uint64_t began_ns = 0;
  };

  void refill(uint64_t at_ns) {
    for (Op* op : ready_) {
      // Neighbours are not read one after the other, so that no layer joins them.
      op->offset = way_.offset + next_++ * 7919 % blocks_ * plan_.block_bytes;
      static_cast<Read*>(op->context)->began_ns = at_ns;
    }
    const size_t taken = way_.engine->submit(ready_);
    active_ += taken;
    ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(taken));
  }

  void completed(Read& read) {
    --active_;
    if (!read.op.result) {
      if (!error_) error_ = read.op.result.error();
      return;
    }
    ++transfers_;
    begun_.push_back(read.began_ns);
    ready_.push_back(&read.op);
  }

  // The times of what came since the last time: a look at the clock may cost as much as a transfer.
  void book(uint64_t at_ns) {
    for (const uint64_t began_ns : begun_) {
      if (times_.size() == kTimesMax) break;
      times_.push_back(static_cast<uint32_t>(std::min<uint64_t>(at_ns - began_ns, UINT32_MAX)));
    }
    begun_.clear();
  }

  double percentile(double part) const {
    if (times_.empty()) return 0;
    const auto at = static_cast<size_t>(part * static_cast<double>(times_.size() - 1));
    return times_[at] / 1e3;
  }

  Way& way_;
  const Plan plan_;
  const uint64_t blocks_;
  std::vector<Read> ops_;
  std::vector<Op*> ready_;
  std::vector<uint64_t> begun_;  // when the reads began that came since book()
  std::vector<uint32_t> times_;
  std::optional<Error> error_;
  uint64_t next_ = 0, transfers_ = 0;
  size_t active_ = 0;
};

}  // namespace

Result<std::vector<ReadPoint>> probe_reads(const std::string& target,
                                           const ReadProbeOptions& options) {
  Budget budget(kMemory);
  STOKER_ASSIGN(const auto arena, Arena::make(kMemory, budget));
  STOKER_ASSIGN(const Buffer buffer, arena->take(kMemory));
  STOKER_ASSIGN(const Target parsed, parse_target(target));
  std::vector<Way> ways(1);
  ways[0].path = target;
  if (is_pci_target(target)) {
    ways[0].name = "vfio";
    STOKER_TRY(open_way(ways[0], "vfio", *arena));
  } else {
    ways[0].name = "passthrough";
    STOKER_TRY(open_way(ways[0], "uring", *arena));
    ways.emplace_back();
    ways[1].name = "uring";
    ways[1].path = block_device_of(parsed.device);
    ways[1].offset = parsed.offset;
    STOKER_TRY(open_way(ways[1], "uring", *arena));
  }
  const uint64_t span = std::min(kSpanMax, ways[0].file.bytes);
  const size_t all = kPlans.size() * ways.size();
  const auto each_ns = static_cast<uint64_t>(options.seconds * 1e9 / static_cast<double>(all));
  std::vector<ReadPoint> points;
  for (const Plan& plan : kPlans) {
    if (span < plan.block_bytes)
      return fail(Code::invalid_argument, "'{}' is too small to be measured: it needs 1 MiB",
                  target);
    for (Way& way : ways) {
      if (options.progress)
        options.progress(
            way.name + " " + human_bytes(plan.block_bytes) + " depth " + std::to_string(plan.depth),
            static_cast<double>(points.size()) / static_cast<double>(all));
      STOKER_ASSIGN(ReadPoint point, Reads(way, buffer.slice(), plan, span).run(each_ns));
      points.push_back(std::move(point));
    }
  }
  if (options.progress) options.progress("done", 1);
  for (Way& way : ways) {
    STOKER_TRY(way.engine->close(way.file.id));
    STOKER_TRY(way.engine->unadopt(*arena));
  }
  return points;
}

std::string reads_json(const std::string& target, const std::vector<ReadPoint>& points) {
  nlohmann::ordered_json json = {{"version", 1}, {"target", target}};
  json["points"] = nlohmann::ordered_json::array();
  for (const ReadPoint& point : points) {
    json["points"].push_back({{"engine", point.engine},
                              {"block_bytes", point.block_bytes},
                              {"depth", point.depth},
                              {"transfers", point.transfers},
                              {"iops", point.iops},
                              {"bytes_per_second", point.bytes_per_second},
                              {"p50_us", point.p50_us},
                              {"p99_us", point.p99_us},
                              {"p999_us", point.p999_us},
                              {"cpu_seconds_per_gb", point.cpu_seconds_per_gb},
                              {"cpu_seconds_per_million", point.cpu_seconds_per_million},
                              {"syscalls_per_transfer", point.syscalls_per_transfer},
                              {"copies_per_transfer", point.copies_per_transfer}});
  }
  return json.dump(2) + "\n";
}

}  // namespace stoker::nvme
