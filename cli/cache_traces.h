// What `stoker bench cache` reads, and what a cache would fetch of it: the policy and the followers
// of the cached store, played without bytes, beside LRU and the least that is possible.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "stoker/store/plan.h"

namespace stoker::cli {

// Reads of items in blocks of one size. Objects have equally many blocks each.
struct CacheTrace {
  std::string regime;
  Plan plan = {};
  uint64_t blocks = 0;
  uint64_t items_a_block = 1;
  uint32_t block_bytes = 0;
  std::vector<uint64_t> reads = {};  // items, in the order of the readers
  uint64_t epochs = 0;  // of equally many reads; 0: it has none, and its bound is Belady's

  uint64_t item_bytes() const { return block_bytes / items_a_block; }
};

struct TraceShape {
  uint64_t blocks = 0;
  uint32_t block_bytes = 0;
  uint64_t objects = 1;
  uint64_t epochs = 3;
};

// Each item once an epoch.
CacheTrace epochs_trace(const TraceShape& shape, uint64_t items_a_block);
// Windows that slide over the blocks by a quarter of themselves, each shuffled, `epochs` times.
CacheTrace windows_trace(const TraceShape& shape);
// Three sources of 5, 25 and 70 % of the blocks, drawn 3 : 3 : 4.
CacheTrace mixture_trace(const TraceShape& shape);
// The same, read by many: each read up to so many places away from where the plan has it.
CacheTrace out_of_order(CacheTrace trace, uint64_t places);

enum class CachePolicy : uint8_t { plan, s3fifo, lru };

// In bytes.
struct CacheRun {
  std::vector<uint64_t> fetched;  // by epoch; one where there are none
  uint64_t admitted = 0;
  uint64_t written = 0;  // blocks, and their records
};

CacheRun simulate(const CacheTrace& trace, CachePolicy policy, uint64_t places);
// What no cache of so many places can go below: of an epoch from the second on, or of all reads.
uint64_t bound_bytes(const CacheTrace& trace, uint64_t places);
// The worst epoch from the second on, or all reads, over the bound.
double over_bound(const CacheTrace& trace, const CacheRun& run, uint64_t places);

}  // namespace stoker::cli
