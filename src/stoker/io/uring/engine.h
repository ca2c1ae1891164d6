// UringEngine: io_uring with direct I/O, registered files and registered memory. The engine of
// choice.
//
// A file "nvme:/dev/ng0n1" is a namespace: its ops go to the drive as NVMe commands through the
// same ring, without the kernel's block layer ("passthrough").
//
// No allocation an Op: the Op itself is the request, its address the user data. submit() only fills
// the ring. poll() hands what is there to the kernel in the same system call that waits, so a busy
// Loop makes one call a batch.
#pragma once

#include <liburing.h>

#include <memory>

#include "stoker/io/engine.h"
#include "stoker/io/file_table.h"
#include "stoker/io/op_list.h"
#include "stoker/io/uring/registry.h"

namespace stoker {

class UringEngine final : public Engine {
 public:
  // unsupported, with the reason, where the kernel (or a container's filter) refuses io_uring.
  static Result<std::unique_ptr<UringEngine>> make(uint32_t depth);
  ~UringEngine() override;

  EngineTraits traits() const override { return {"uring", depth_, registry_.has_memory()}; }
  Result<FileInfo> open(const OpenFile& file) override;
  Status close(FileId file) override;
  Status adopt(const Arena& arena) override;
  Status unadopt(const Arena& arena) override;
  size_t submit(std::span<Op* const> ops) override;
  size_t poll(uint64_t wait_ns) override;
  void wake() override;
  const Counter& system_calls() const { return system_calls_; }  // to hand over and to wait

 private:
  UringEngine(uint32_t depth, int wake_fd) : depth_(depth), wake_fd_(wake_fd), registry_(&ring_) {}
  Status start();
  void prepare_command(io_uring_sqe& sqe, const Op& op, const FileTable::File& file);
  bool settle(Op& op, int outcome, bool registered);
  io_uring_sqe* slot();
  void prepare(Op& op);
  void arm_wake();
  void enter(uint64_t wait_ns);
  size_t reap();
  size_t complete_failed();

  const uint32_t depth_;
  const int wake_fd_;  // an eventfd, always being read by the ring
  io_uring ring_{};
  bool ring_made_ = false;
  bool takes_commands_ = false;  // of NVMe drives
  UringRegistry registry_;
  FileTable files_;
  // Of the polling thread.
  OpList failed_;  // accepted, but could not be started; poll() completes them
  uint32_t in_flight_ = 0;
  Counter system_calls_;
  bool commands_registered_ = true;  // commands may name registered memory
  uint64_t wake_count_ = 0;          // where the kernel puts what it reads from wake_fd_
};

}  // namespace stoker
