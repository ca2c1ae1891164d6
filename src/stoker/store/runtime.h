// RuntimeOwner: owns the threads and the memory cap that the stores of one process share, and ends
// them in the right order.
#pragma once

#include <memory>
#include <string>

#include "stoker/store/open.h"

namespace stoker {

struct RuntimeOptions {
  std::string engine = "auto";         // "auto", "uring" or "posix"
  size_t cpu_threads = 0;              // of the pool; 0 = as many as the process may use cores
  uint64_t budget_bytes = UINT64_MAX;  // the hard cap on memory; the default is none
  uint32_t depth = 64;                 // transfers in flight
  // a disk that has not answered for so long is given up (loop.h); the log names it before that
  uint64_t stall_seconds = 300;
};

// Every store opened with runtime() must be closed before its owner goes.
class RuntimeOwner {
 public:
  static Result<std::unique_ptr<RuntimeOwner>> make(const RuntimeOptions& options = {});
  // Takes an engine made elsewhere (a simulated disk, say). `clock` is what the Loop measures and
  // orders deadlines by.
  static Result<std::unique_ptr<RuntimeOwner>> make(std::unique_ptr<Engine> engine,
                                                    const RuntimeOptions& options,
                                                    const Clock& clock = Clock::real());

  Runtime runtime() { return {*loop_, pool_, budget_, &trace_}; }
  Loop& loop() { return *loop_; }
  Pool& pool() { return pool_; }
  Budget& budget() { return budget_; }
  Trace& trace() { return trace_; }

 private:
  explicit RuntimeOwner(const RuntimeOptions& options);
  // Destroyed from the last to the first: the Loop finishes its transfers, which may hand work to
  // the pool, which draws on the budget.
  Trace trace_;
  Budget budget_;
  Pool pool_;
  std::unique_ptr<Loop> loop_;
};

}  // namespace stoker
