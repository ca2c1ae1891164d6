// What offloading moved and how long it took: the counts a Ledger shows. Added to by any thread,
// read by any.
#pragma once

#include <array>

#include "stoker/base/clock.h"
#include "stoker/base/counters.h"
#include "stoker/base/trace.h"
#include "stoker/offload/block.h"

namespace stoker::offload {

struct Traffic {
  // By plane, as handed to and from the Store, padding included.
  std::array<Counter, kPlanes> read_bytes, written_bytes;
  // Seconds of pool threads, in ns: optimizer kernel, gradient hash, copying unchanged weights,
  // checksums + queueing of writes.
  Counter kernel_ns, hash_ns, copy_ns, stage_ns;
  // Summed over tiles: from issuing its reads (writes) until the last of them was done.
  Counter read_latency_ns, write_latency_ns;
  // Callers blocked until kernels, or writes, were through.
  Counter wait_compute_ns, wait_written_ns;
  // Tiles updated; those of them whose state had been prefetched; whose state was retained;
  // prefetched ones that were of no use.
  Counter tiles, tiles_prefetched, tiles_retained, prefetch_dropped;
  // gets a span for each tile's kernels, and one for staging what they wrote
  Trace* trace = nullptr;

  void read(Plane plane, uint64_t bytes) { read_bytes[static_cast<size_t>(plane)].add(bytes); }
  void wrote(Plane plane, uint64_t bytes) { written_bytes[static_cast<size_t>(plane)].add(bytes); }
};

// Adds the time of a scope to a counter.
class Stopwatch {
 public:
  explicit Stopwatch(Counter& counter) : counter_(counter), start_(Clock::real().now_ns()) {}
  ~Stopwatch() { counter_.add(Clock::real().now_ns() - start_); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  Counter& counter_;
  const uint64_t start_;
};

}  // namespace stoker::offload
