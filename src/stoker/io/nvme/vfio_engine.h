// VfioEngine: our own NVMe driver as an engine. Its files are namespaces of drives that are bound
// to vfio-pci: "nvme:0000:00:04.0", or "nvme:0000:00:04.0/2" for the second namespace.
//
// A transfer costs no system call and no copy while the engine is busy: commands are laid into the
// drive's queue and answers are polled. With nothing to take poll() spins, where answers come soon,
// for twice as long as they took of late. Only where they come later does it ask for interrupts,
// and sleeps until one.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/io/engine.h"
#include "stoker/io/file_table.h"
#include "stoker/io/nvme/driver.h"
#include "stoker/io/nvme/vfio.h"
#include "stoker/io/op_list.h"

namespace stoker::nvme {

struct VfioOptions {
  // A command that took so long is aborted; as long again, and the controller is reset.
  uint64_t command_ns = 10'000'000'000;
  uint32_t resets_max = 2;   // of a controller that still does not answer; then it is given up
  uint32_t repeats_max = 2;  // of a command that the controller aborted, as it was asked to
  std::function<Result<std::shared_ptr<Bus>>()> make_bus = VfioBus::of_process;
};

// Read by any thread.
struct VfioCounters {
  Counter system_calls;  // of the polling thread
  Counter wasted_polls;  // spins that found nothing
  Counter loud_ops;      // whose answers interrupt
  Counter mapped_ops;    // on memory that no arena had registered: mapped for the one transfer
  Counter aborts, resets;
};

class VfioEngine final : public Engine {
 public:
  static Result<std::unique_ptr<VfioEngine>> make(uint32_t depth, const VfioOptions& options = {});
  ~VfioEngine() override;

  EngineTraits traits() const override { return {"vfio", depth_, true}; }
  Result<FileInfo> open(const OpenFile& file) override;
  Status close(FileId file) override;
  Status adopt(const Arena& arena) override;
  Status unadopt(const Arena& arena) override;
  size_t submit(std::span<Op* const> ops) override;
  size_t poll(uint64_t wait_ns) override;
  void wake() override;
  const VfioCounters& vfio_counters() const { return vfio_counters_; }

 private:
  static constexpr size_t kDrivesMax = 16;
  static constexpr uint64_t kSpinMax = 500'000;
  // A driver with its state of the polling thread.
  struct Drive {
    std::unique_ptr<Driver> driver;
    OpList waiting;       // for room in its queue
    uint32_t resets = 0;  // since it answered last
    bool gone = false;
    std::optional<Error> lost;  // why it is gone
  };
  struct Region {
    const std::byte* data;
    uint64_t bytes, at;
  };
  struct Mapped {
    uint64_t at, bytes;
  };

  VfioEngine(uint32_t depth, int wake_fd, const VfioOptions& options)
      : depth_(depth), wake_fd_(wake_fd), options_(options) {}
  Result<size_t> drive_at(const std::string& address);
  void map_arena(int32_t id) REQUIRES(mutex_);
  uint64_t find(const Slice& bytes);
  void start(Op& op, const FileTable::File& file);
  void start_waiting(Drive& drive);
  void send(Drive& drive, Op& op);
  void end(Op& op);
  bool repeat(Drive& drive, const Driver::Done& done);
  size_t complete_failed();
  size_t reap();
  bool spin(uint64_t until_ns);
  void sleep(uint64_t wait_ns);
  bool quiet() const { return 2 * mean_wait_ns_ <= kSpinMax; }
  void book_wait();
  void ring();
  void watch(uint64_t now_ns);
  void watch(Drive& drive, uint64_t now_ns);
  uint64_t watch_ns() const;
  void reset(Drive& drive, const std::string& why);
  void give_up(Drive& drive, const Error& error);
  size_t drives() const { return drives_made_.load(std::memory_order_acquire); }

  const uint32_t depth_;
  const int wake_fd_;
  const VfioOptions options_;
  VfioCounters vfio_counters_;
  FileTable files_;
  Mutex mutex_;
  std::shared_ptr<Bus> bus_;                                       // made with the first drive
  std::unordered_map<int32_t, Region> arenas_ GUARDED_BY(mutex_);  // at 0: not mapped
  std::atomic<bool> arenas_changed_{false};
  std::array<std::unique_ptr<Drive>, kDrivesMax> drives_;
  std::atomic<size_t> drives_made_{0};
  std::atomic<bool> woken_{false}, sleeping_{false};
  // Of the polling thread.
  OpList failed_;
  std::unordered_map<int32_t, Region> known_arenas_;  // arenas_ as of its last change
  std::unordered_map<Op*, Mapped> mapped_;
  std::unordered_map<Op*, uint32_t> repeats_;  // of ops whose command was aborted
  uint32_t in_flight_ = 0;
  uint64_t waits_since_ns_ = 0;     // for an answer, with none to take; 0: it does not
  uint64_t mean_wait_ns_ = 20'000;  // of late; 0 is a wait that found one there
  uint64_t batch_ns_ = 0;  // a clock may cost more than a command: it is read once for many
  uint64_t watched_ns_ = 0;
};

}  // namespace stoker::nvme
