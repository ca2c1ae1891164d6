// Monotonic counters that anyone may add to and the Ledger reads: bytes and requests by class.
#pragma once

#include <atomic>
#include <cstdint>

namespace stoker {

class Counter {
 public:
  void add(uint64_t amount) { value_.fetch_add(amount, std::memory_order_relaxed); }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// What an Engine moved since it was made. Read by any thread.
struct IoCounters {
  Counter reads, writes, syncs;       // operations completed
  Counter read_bytes, written_bytes;  // bytes of completed operations
  Counter submissions;                // batches handed to the kernel
  // continued after a short transfer; resubmitted after EINTR/EAGAIN
  Counter short_transfers, retries;
};

}  // namespace stoker
