// One string opens any composition of stores. The grammar lives in open.cc and nowhere else.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "stoker/base/pool.h"
#include "stoker/io/loop.h"
#include "stoker/memory/budget.h"
#include "stoker/store/store.h"

namespace stoker {

// The threads and the memory that stores of one process share. The owner keeps it alive longer than
// every store.
struct Runtime {
  Loop& loop;
  Pool& pool;
  Budget& budget;
  Trace* trace = nullptr;  // of what Loop and pool do, if anyone may ask for it
};

struct StoreOptions {
  bool create = false;     // make it where there is none
  bool read_only = false;  // takes no writer's lock; writes nothing, not even on open
  // for data, over all volumes, when made: reserved at once (out_of_space if the disk has not got
  // it)
  uint64_t capacity_bytes = 0;
  uint32_t chunk_bytes = 1 << 20;  // default of new objects
  uint64_t objects_max = 1 << 16;  // sizes the journal when made
  // When a local store is made: how capacity_bytes is shared out over its volumes, as they are
  // named; empty: equally.
  std::vector<double> volume_weights = {};
  // when made: shards of a coded store may share a disk, although they are then lost together
  bool same_disk = false;
  // Shards of a coded store, as the composition names them: where there is nothing or what is
  // blank, a new one is made and rebuilt.
  std::vector<std::string> replace = {};
  std::string holder = {};  // who we are, for the lock's message ("stoker train, pid 7")
};

// The volumes of "local:/nvme0,/nvme1" or "/nvme0,/nvme1", for tools that work on a local store
// itself.
Result<std::vector<std::string>> local_volumes(const std::string& composition);

// Opens the store that the composition names:
// - "memory:"
// - "local:/nvme0,/nvme1", or just "/nvme0,/nvme1": each a directory (which then holds
//   stoker.volume), a file, or a block device
// - "coded(6+3, /disk{0..8})": tolerates the loss of any three of nine disks
// - "dir:/path": each object is a plain file
// - "s3://bucket/prefix"
// - "unix:/run/stoker.sock": what `stoker serve` serves there
// - "cached(local:/nvme/cache, s3://bucket/data, disk=100GiB)": reads of the second are kept in the
//   first.
Result<std::unique_ptr<Store>> open_store(const std::string& composition, const Runtime& runtime,
                                          const StoreOptions& options);

}  // namespace stoker
