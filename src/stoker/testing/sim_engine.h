// SimEngine: an Engine over a SimDisk, on a virtual clock. No thread, no waiting: a transfer
// "takes" the time the device model says, and poll() moves the clock to the next completion at
// once. Completions come in the order of their modelled times, which the seeded jitter shuffles.
#pragma once

#include <memory>
#include <queue>

#include "stoker/base/clock.h"
#include "stoker/base/mutex.h"
#include "stoker/io/engine.h"
#include "stoker/testing/sim_disk.h"

namespace stoker {

// The defaults are a disk that takes no time but completes in any order.
struct SimDevice {
  uint64_t read_bytes_per_s = 0;  // 0: as fast as can be
  uint64_t write_bytes_per_s = 0;
  // of each transfer and sync, on top of its share of the bandwidth
  uint64_t latency_ns = 0;
  uint64_t jitter_ns = 1000;  // a random part of it is added to each
  uint64_t seed = 1;
};

class SimEngine final : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> make(std::shared_ptr<SimDisk> disk, uint32_t depth,
                                              const SimDevice& device = {});
  ~SimEngine() override;

  EngineTraits traits() const override { return {"sim", depth_, false}; }
  Result<FileInfo> open(const OpenFile& file) override;
  Status close(FileId file) override;
  Status adopt(const Arena&) override { return {}; }
  size_t submit(std::span<Op* const> ops) override;
  size_t poll(uint64_t wait_ns) override;
  void wake() override;

  const VirtualClock& clock() const { return clock_; }

 private:
  struct File {
    std::string path;
    bool write = false;
    bool open = false;
  };
  struct Flight {
    uint64_t due_ns;
    uint64_t order;
    Op* op;
    SimDisk::Plan plan;
    std::string path;  // empty: refused before it started, op->result says why
  };
  struct Later {
    bool operator()(const std::unique_ptr<Flight>& a, const std::unique_ptr<Flight>& b) const {
      return a->due_ns != b->due_ns ? a->due_ns > b->due_ns : a->order > b->order;
    }
  };

  SimEngine(std::shared_ptr<SimDisk> disk, uint32_t depth, const SimDevice& device)
      : disk_(std::move(disk)), depth_(depth), device_(device), random_(device.seed) {}
  uint64_t due(const Op& op, const std::string& path);
  void launch(Op& op);
  void put_in_flight(std::unique_ptr<Flight> flight);  // with the disk's mutex
  void start_let_go();
  bool start(Flight& flight);

  const std::shared_ptr<SimDisk> disk_;
  const uint32_t depth_;
  const SimDevice device_;
  // Of the polling thread.
  VirtualClock clock_;
  std::mt19937_64 random_;
  uint64_t read_free_ns_ = 0, write_free_ns_ = 0;  // when the device can begin the next transfer
  std::map<std::string, uint64_t> throttled_free_ns_;  // the same for throttled disks
  uint64_t orders_ = 0;
  std::priority_queue<std::unique_ptr<Flight>, std::vector<std::unique_ptr<Flight>>, Later>
      flights_;
  std::vector<std::unique_ptr<Flight>> held_;  // not started: the disk holds them

  Mutex mutex_;  // guards what follows
  std::vector<File> files_;
  bool woken_ = false;
  CondVar wake_;
};

}  // namespace stoker
