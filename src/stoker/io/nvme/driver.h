// Driver: one NVMe controller, driven from user space: an admin queue, and two pairs of queues for
// I/O. Answers of the loud one raise the drive's interrupt; those of the quiet one must be polled
// for, and spare the processor an interrupt each.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/io/nvme/bus.h"
#include "stoker/io/nvme/command.h"

namespace stoker::nvme {

// All but make() and space() is of the polling thread.
class Driver {
 public:
  // Resets the controller, whatever a process before left. `depth`: commands in flight at most.
  static Result<std::unique_ptr<Driver>> make(const std::string& address, Bus& bus, uint32_t depth);
  ~Driver();  // nothing may be in flight; the controller is told that its user leaves
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  const std::string& address() const { return address_; }
  int interrupt() const { return device_->interrupt(); }
  Result<Space> space(uint32_t number);  // any thread

  bool room() const { return !free_.empty(); }
  bool idle() const { return free_.size() == sent_.size(); }
  // Needs room(). `data_at` is where the device sees the command's data. The controller learns of
  // it by ring(). Not `quiet`: its answer interrupts, too.
  void send(Op& op, const Command& command, uint64_t data_at, uint64_t now_ns, bool quiet);
  bool quiet_idle() const { return quiet_.busy == 0; }  // no answer comes without an interrupt
  bool ring();                                          // false: there was nothing new
  bool done() const;                                    // whether take() has something
  struct Done {
    Op* op;  // null: the answer names no command that was sent; the drive needs a reset
    int status;
    bool aborted;  // that was asked for
  };
  Done take();         // needs done()
  void acknowledge();  // what was taken makes room for more answers, where the drive may lack it

  // The time at which the oldest command was sent; UINT64_MAX: none.
  uint64_t oldest_ns() const;
  enum class Health { good, failed, gone };
  Health health() const;  // as its status register tells
  // Asks the controller to give up what was sent before, and was not yet: how many commands. It may
  // still answer with success. An error: it does not take that either.
  Result<size_t> abort_before(uint64_t time_ns, uint64_t now_ns);
  // The time at which that was first asked of a command that is still under way; UINT64_MAX: never.
  uint64_t oldest_abort_ns() const;
  // Stops the controller, so that it touches no memory any more, and starts it again. What was in
  // flight is sent again: it is the same bytes at the same place. An error: it is gone.
  Status recover(uint64_t now_ns);
  // After recover() failed: keeps the controller from all memory and takes the ops back.
  std::vector<Op*> give_back();

 private:
  struct Sent {
    Op* op = nullptr;
    uint64_t sent_ns = 0;
    uint64_t aborted_ns = 0;  // when that was asked; 0: it was not
    bool quiet = false;
    std::array<std::byte, 64> entry{};
  };
  struct Queue {
    std::byte* entries = nullptr;
    std::byte* answers = nullptr;
    uint64_t entries_at = 0, answers_at = 0;
    uint32_t number = 0, size = 0, answers_size = 0;
    uint32_t tail = 0, head = 0;
    uint32_t rung = 0, acknowledged = 0;  // the tail and the head that the controller knows
    uint32_t busy = 0;                    // commands without an answer
    uint16_t phase = 1;
    size_t doorbell = 0;
  };

  Driver(std::string address, Bus& bus, uint32_t depth);
  Status start();
  Status check_capabilities();
  Status reset();
  Status wait_ready(bool ready);
  Status make_queues();
  Status make_pair(const Queue& queue, uint32_t interrupts);
  Status administer_locked(const Command& command, uint64_t data_at = 0);
  void write32(size_t at, uint32_t value);
  Status use_shadows();
  void knock(size_t doorbell, uint32_t before, uint32_t value);
  Queue& queue_of(bool quiet) { return quiet ? quiet_ : loud_; }
  static void put(Queue& queue, const std::array<std::byte, 64>& entry);
  bool answered(const Queue& queue) const;
  std::array<std::byte, 64> encode(const Command& command, uint16_t id, uint64_t data_at);

  const std::string address_;
  Bus& bus_;
  const uint32_t depth_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<DmaMemory> memory_;
  size_t stride_ = 4;  // between doorbells
  uint64_t ready_ns_ = 0;
  bool shadowing_ = false;  // doorbells are in memory: the drive looks while it is busy
  Mutex admin_mutex_;
  Queue admin_;  // guarded by admin_mutex_
  Queue loud_, quiet_;
  bool has_quiet_ = false;
  uint64_t lists_ = 0;  // where in the memory the lists of pages are, one of each command
  std::vector<Sent> sent_;
  std::vector<uint16_t> free_;
};

}  // namespace stoker::nvme
