#include "stoker/store/runtime.h"

#include <sched.h>

#include <algorithm>
#include <utility>

namespace stoker {
namespace {

// The cores this process may run on, which in a container are fewer than the machine has.
size_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0)
    return std::max<size_t>(1, std::thread::hardware_concurrency());
  return static_cast<size_t>(std::max(1, CPU_COUNT(&set)));
}

}  // namespace

RuntimeOwner::RuntimeOwner(const RuntimeOptions& options)
    : budget_(options.budget_bytes),
      pool_(options.cpu_threads != 0 ? options.cpu_threads : usable_cores()) {}

Result<std::unique_ptr<RuntimeOwner>> RuntimeOwner::make(const RuntimeOptions& options) {
  // Deeper than the Loop goes: what a disk that was given up still holds takes no place from the
  // others.
  STOKER_ASSIGN(auto engine, make_engine(options.engine, std::min(options.depth, 1U << 20) * 4));
  return make(std::move(engine), options);
}

Result<std::unique_ptr<RuntimeOwner>> RuntimeOwner::make(std::unique_ptr<Engine> engine,
                                                         const RuntimeOptions& options,
                                                         const Clock& clock) {
  std::unique_ptr<RuntimeOwner> owner(new RuntimeOwner(options));
  LoopOptions loop_options;
  loop_options.depth = options.depth;
  loop_options.trace = &owner->trace_;
  loop_options.stall_error_ns =
      std::clamp<uint64_t>(options.stall_seconds, 1, 1'000'000'000) * 1'000'000'000;
  loop_options.stall_warn_ns =
      std::min(loop_options.stall_warn_ns, loop_options.stall_error_ns / 2);
  STOKER_ASSIGN(owner->loop_, Loop::make(std::move(engine), loop_options, clock));
  return owner;
}

}  // namespace stoker
