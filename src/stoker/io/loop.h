// Loop: one thread that owns an Engine and decides what it does next.
//
// Any thread submits Ops. Each class has a queue, ordered by deadline, then arrival. Ops go to the
// engine in order of class, with a floor for each class so that none starves. Up to `depth` are in
// flight across all files, so the queue does not drain at the edge of one request. done() runs on
// the Loop's thread.
//
// Memory that is not aligned goes through the one bounce path (bounce.h); everything else moves
// without a copy.
//
// A disk that stops answering is named in the log after `stall_warn_ns`, and given up after
// `stall_error_ns`: its ops, those to come too, end with the error io (errno ETIMEDOUT). What the
// kernel may still read or write then stays untouched for the life of the process: its owner keeps
// back the memory (memory/lost.h), close() keeps the file and refuses. An op on memory that nobody
// could keep back is waited for.
#pragma once

#include <array>
#include <memory>

#include "stoker/base/clock.h"
#include "stoker/base/counters.h"
#include "stoker/base/trace.h"
#include "stoker/io/engine.h"

namespace stoker {

class Loop;

struct LoopOptions {
  uint32_t depth = 64;           // ops in flight at most (also bounded by the engine)
  uint32_t queue_max = 1 << 16;  // ops waiting at most; beyond it submit() says busy
  // of dispatches, while such ops wait
  std::array<uint8_t, kPriorities> floor_percent = {0, 5, 10, 5, 2};
  // In flight at most of all classes but demand, so that a demand waits for that much and no more;
  // 0: no bound. 8 MiB keep the disks we know busy. It may be passed by one op.
  uint64_t background_bytes = 32 << 20;
  // the 1 MiB of bounce memory is drawn on it, if given; must outlive the Loop
  Budget* budget = nullptr;
  uint64_t stall_warn_ns = 30'000'000'000, stall_error_ns = 300'000'000'000;
  // gets a span for each op's wait in the queue, and one for its service; must outlive the Loop
  Trace* trace = nullptr;
  // another Loop, which outlives this one: what it has adopted, or will, is adopted here too
  Loop* follows = nullptr;
};

// What went through, by class; read by any thread.
struct ClassCounters {
  Counter ops, bytes_read, bytes_written, queue_ns, service_ns, errors;
};

class Loop {
 public:
  static Result<std::unique_ptr<Loop>> make(std::unique_ptr<Engine> engine,
                                            LoopOptions options = {},
                                            const Clock& clock = Clock::real());
  ~Loop();  // finishes everything submitted, then stops the thread
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  Result<FileInfo> open(const OpenFile& file);
  Status close(FileId file);  // busy: it was given up, and the kernel still has transfers of it
  Status adopt(const Arena& arena);
  Status unadopt(const Arena& arena);
  // Queues the ops (any thread; also from within done()). All are taken, or none and the error is
  // busy.
  Status submit(std::span<Op* const> ops);
  Status submit(Op& op);

  EngineTraits traits() const;
  const IoCounters& counters() const;
  const ClassCounters& counters(Priority priority) const;
  const Clock& clock() const;
  bool here() const;  // the calling thread is the Loop's

 private:
  class Impl;
  explicit Loop(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The best engine this machine allows: uring, else posix with a log line that says why. `name`:
// "auto", "uring" or "posix".
Result<std::unique_ptr<Engine>> make_engine(const std::string& name = "auto", uint32_t depth = 64);

}  // namespace stoker
