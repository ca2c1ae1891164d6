// Coded stores on simulated disks, for their tests.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "stoker/store/coded/coded_store.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/sim_engine.h"
#include "stoker/testing/store_harness.h"

namespace stoker::coded {

struct CodedWorldOptions {
  size_t k = 4, m = 2, shards = 0;  // 0: k + m
  std::vector<size_t> lost = {};    // shards that go right after the store was made
  uint32_t segment_bytes = 1 << 20;
  uint32_t segments = 8;
  bool background = true;
  uint64_t scrub_rate = 0;  // of the scrub that goes on by itself; 0: none
  // as in CodedOptions
  uint64_t repair_rate = 0, busy_repair_rate = 0, fold_rate = 0, busy_fold_rate = 0;
  std::string rates = {};  // as they stand behind the code in a composition
  // that rates are counted by; null: the real one, as the engine's stands still while nobody
  // transfers
  const Clock* clock = nullptr;
  const ClassTree* tree = nullptr;  // that tells classes; null: the one that ships
  bool faults = false;              // transfers that are short or interrupted
  uint64_t seed = 1;
  uint64_t budget_bytes = UINT64_MAX;  // the cap on memory
  // as in RuntimeOptions; 0: as it is there. Time passes with the latency of transfers
  uint64_t stall_seconds = 0;
  // of each transfer, and nothing else takes time: what starts together takes one of them
  uint64_t latency_ns = 0;
};

class CodedWorld final : public StoreWorld {
 public:
  explicit CodedWorld(CodedWorldOptions options)
      : options_(std::move(options)), disk_(std::make_shared<SimDisk>(options_.seed)) {
    if (options_.shards == 0) options_.shards = options_.k + options_.m;
    for (size_t i = 0; i < options_.shards; ++i) paths_.push_back("d" + std::to_string(i));
    if (options_.faults) {
      SimFaults faults;
      faults.short_transfer = 100'000;
      faults.interrupted = 100'000;
      disk_->set_faults(faults);
    }
    SimDevice device;
    device.seed = options_.seed;
    RuntimeOptions runtime;
    runtime.cpu_threads = 1;
    runtime.budget_bytes = options_.budget_bytes;
    if (options_.stall_seconds != 0) runtime.stall_seconds = options_.stall_seconds;
    if (options_.latency_ns != 0) {
      device.latency_ns = options_.latency_ns;
      device.jitter_ns = 0;
      runtime.depth = 1024;
    }
    auto engine = std::move(*SimEngine::make(disk_, runtime.depth, device));
    const Clock& clock = static_cast<SimEngine&>(*engine).clock();
    runtime_ = std::move(*RuntimeOwner::make(std::move(engine), runtime, clock));
  }

  Result<std::unique_ptr<Store>> open(const StoreOptions& options) override {
    STOKER_ASSIGN(auto store, open_coded(options));
    if (!made_ && !options_.lost.empty()) {
      store.reset();
      for (const size_t shard : options_.lost) disk_->remove(paths_[shard]);
      STOKER_ASSIGN(store, open_coded(options));
    }
    made_ = true;
    return std::unique_ptr<Store>(std::move(store));
  }
  bool persists() const override { return true; }

  Result<std::unique_ptr<CodedStore>> open_coded(const StoreOptions& options) {
    CodedOptions coded;
    coded.files = false;
    coded.segment_bytes = options_.segment_bytes;
    coded.segments = options_.segments;
    coded.background = options_.background;
    coded.scrub_rate = options_.scrub_rate;
    coded.repair_rate = options_.repair_rate;
    coded.busy_repair_rate = options_.busy_repair_rate;
    coded.fold_rate = options_.fold_rate;
    coded.busy_fold_rate = options_.busy_fold_rate;
    coded.clock = options_.clock != nullptr ? options_.clock : &Clock::real();
    coded.tree = options_.tree;
    STOKER_ASSIGN(
        const auto plan,
        coded_plan("coded(" + std::to_string(options_.k) + "+" + std::to_string(options_.m) + " " +
                   options_.rates + ", d{0.." + std::to_string(paths_.size() - 1) + "})"));
    return CodedStore::open(*plan, runtime_->runtime(), options, coded);
  }
  Result<std::unique_ptr<CodedStore>> open_small(bool read_only = false,
                                                 uint32_t chunk_bytes = 64 << 10) {
    StoreOptions options;
    options.create = !read_only;
    options.read_only = read_only;
    options.capacity_bytes = uint64_t{64} * chunk_bytes;
    options.chunk_bytes = chunk_bytes;
    options.objects_max = 64;
    return open_coded(options);
  }

  SimDisk& disk() { return *disk_; }
  // How many transfers there were one after the other: needs a latency.
  uint64_t waits() const { return runtime_->loop().clock().now_ns() / options_.latency_ns; }
  // From the next opening on, it works by itself, and scrubs at this rate.
  void begin_background(uint64_t scrub_rate) {
    options_.background = true;
    options_.scrub_rate = scrub_rate;
  }
  RuntimeOwner& runtime() { return *runtime_; }
  const std::vector<std::string>& paths() const { return paths_; }

 private:
  CodedWorldOptions options_;
  std::shared_ptr<SimDisk> disk_;
  std::vector<std::string> paths_;
  std::unique_ptr<RuntimeOwner> runtime_;
  bool made_ = false;
};

}  // namespace stoker::coded
