// cached(FAST, SLOW): reads of SLOW kept as blocks in FAST. docs/stores/cached.md says what it
// promises, docs/formats/cache.md what FAST holds.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "stoker/base/bytes.h"
#include "stoker/store/open.h"

namespace stoker {

struct CachedOptions {
  uint64_t dram_bytes = 256 * kMiB;  // of blocks in memory, those on their way too: the hard limit
  uint64_t disk_bytes = 0;           // of usable slots; 0: as many as FAST has room for
  uint32_t block_bytes = 1 * kMiB;
  // How long after a failure of FAST it is opened again; twice as long each time, 64 times at most.
  std::chrono::milliseconds probe = std::chrono::seconds(10);
  // A read of FAST that took so long counts as one that failed.
  std::chrono::milliseconds late = std::chrono::seconds(3);
  // How long what SLOW said of an object that a plan names is believed.
  std::chrono::milliseconds believe = std::chrono::seconds(10);
};

// Opens FAST; makes it with so much capacity where there is none, unless that is 0.
using OpenFast = std::function<Result<std::unique_ptr<Store>>(uint64_t create_bytes)>;

// FAST must have transactions, updates and checksums. `name` is the composition.
Result<std::unique_ptr<Store>> open_cached_store(std::string name, OpenFast fast,
                                                 std::unique_ptr<Store> slow,
                                                 const Runtime& runtime,
                                                 const CachedOptions& options);

}  // namespace stoker
