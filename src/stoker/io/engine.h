// Engine: moves bytes between memory and files, devices or simulated disks. One queue, one thread,
// no policy.
//
// Thread rules: submit() and poll() are called by one thread (the Loop's). open(), close() and
// adopt() may be called by any thread while the engine is idle or busy. wake() may be called by any
// thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "stoker/base/counters.h"
#include "stoker/base/result.h"
#include "stoker/io/op.h"
#include "stoker/memory/arena.h"

namespace stoker {

struct EngineTraits {
  std::string name;        // "uring", "posix", "sim"
  uint32_t depth_max = 0;  // operations in flight at most; submit() accepts no more
  bool registers = false;  // adopt() registers memory with the kernel
};

struct OpenFile {
  std::string path;
  // make it if missing; of a new or empty file `reserve_bytes` are allocated, or out_of_space
  bool create = false;
  bool write = true;
  uint64_t reserve_bytes = 0;
};

struct FileInfo {
  FileId id = -1;
  uint64_t bytes = 0;     // size after opening; of a block device its capacity
  uint32_t align = 4096;  // offsets, sizes and memory of Ops must be multiples of it
  // O_DIRECT was granted; false on file systems that refuse it (tmpfs): the log says so
  bool direct = true;
};

class Engine {
 public:
  virtual ~Engine() = default;  // nothing may be in flight

  virtual EngineTraits traits() const = 0;
  virtual Result<FileInfo> open(const OpenFile& file) = 0;
  virtual Status close(FileId file) = 0;
  // Registers the arena's memory; failing to register is not an error (logged once, transfers then
  // pin pages each time).
  virtual Status adopt(const Arena& arena) = 0;
  // Forgets it again, before the arena is destroyed; nothing on it may be in flight. Not adopted:
  // nothing happens.
  virtual Status unadopt(const Arena&) { return {}; }
  // Takes the first n ops, in order, and starts them; n < size when the queue is full. An op that
  // cannot be started at all is accepted and completes with its error from poll().
  virtual size_t submit(std::span<Op* const> ops) = 0;
  // Completes what is done, calling done() for each; waits up to wait_ns for the first (0: do not
  // wait). Returns how many.
  virtual size_t poll(uint64_t wait_ns) = 0;
  // Makes a waiting poll() return soon.
  virtual void wake() = 0;

  const IoCounters& counters() const { return counters_; }

 protected:
  IoCounters counters_;
};

}  // namespace stoker
