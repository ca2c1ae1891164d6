// LocalStore: the versioned tensor store on local files and devices. docs/formats/local_store.md
// says what it writes and when.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "stoker/base/result.h"
#include "stoker/store/open.h"
#include "stoker/store/store.h"

namespace stoker {

struct LocalOptions {
  // false: the volumes are names of the Loop's engine and nothing else (a simulator): no folders,
  // no kernel lock.
  bool files = true;
  // Of one journal area when the store is made; 0: from capacity_bytes and objects_max. An image of
  // the map takes half of it at most.
  uint64_t area_bytes = 0;
};

// Each volume is a folder (which then holds stoker.volume; made if options.create), a file, or a
// block device. Their order does not matter when the store is opened again. Errors: not_found, busy
// (names the holder), mismatch (another store's volume, or one missing), corruption (the journal is
// damaged in both copies), out_of_space, read_only.
Result<std::unique_ptr<Store>> open_local_store(std::vector<std::string> volumes,
                                                const Runtime& runtime, const StoreOptions& options,
                                                const LocalOptions& local = {});

}  // namespace stoker
