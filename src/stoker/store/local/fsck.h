// fsck: checks everything that docs/formats/local_store.md says about a store that nobody has open.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "stoker/base/result.h"
#include "stoker/store/local/store.h"
#include "stoker/store/open.h"

namespace stoker {

struct FsckOptions {
  bool quick = false;       // leave out the data: headers, journal and map only
  bool repair_map = false;  // write damaged headers and journal copies anew from the good ones
  // of the data; may be empty
  std::function<void(uint64_t done_bytes, uint64_t total_bytes)> progress;
};

struct FsckReport {
  std::vector<std::string> problems;  // empty: clean
  std::vector<std::string> advice;    // what to do about the problems
  std::vector<std::string> notes;     // what a crash leaves and recovery takes care of
  // the headers and journal copies found damaged were written anew
  bool repaired = false;
  uint64_t generation = 0, records = 0;
  Version committed = 0;
  uint64_t objects = 0, chunks = 0, data_bytes = 0;
  std::vector<SnapshotInfo> snapshots;
  // of the training run that the store holds, if it holds one
  std::optional<uint64_t> committed_step;
  // of a coded store: when a scrub last came to its end, in seconds since 1970
  std::optional<uint64_t> scrubbed_at;
};

// Errors: the store cannot be opened at all (not found, in use, no complete map). What can be
// opened is reported on.
Result<FsckReport> fsck_local_store(const std::vector<std::string>& volumes, const Runtime& runtime,
                                    const FsckOptions& options, const LocalOptions& local = {});

}  // namespace stoker
