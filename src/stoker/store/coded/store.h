// A store over several disks of which any m may be lost: erasure-coded stripes, and a log for updates. See docs/formats/coded_store.md.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stoker/store/open.h"

namespace stoker {

// What "coded(k+m, paths)" says.
struct CodedPlan {
  size_t k = 0, m = 0;
  std::vector<std::string> paths;
};

// The plan, if the composition is one of a coded store; for tools that work on such a store itself. The grammar lives in store/open.cc.
Result<std::optional<CodedPlan>> coded_plan(const std::string& composition);

struct CodedOptions {
  bool files = true;                    // false: paths are names that the engine knows, not of the file system (simulated disks)
  uint32_t segment_bytes = 16 << 20;    // of the log, when made
  uint32_t segments = 8;                // of each shard's log, when made
  bool background = true;               // folds and resyncs by itself; false: when told to (tests that count)
};

struct FsckReport;
struct FsckOptions;

// Reads every chunk of every shard that is there, parity too, and compares it with what all headers say. Changes nothing.
Result<FsckReport> fsck_coded_store(const CodedPlan& plan, const Runtime& runtime, const FsckOptions& options, const CodedOptions& coded = {});

Result<std::unique_ptr<Store>> open_coded_store(const CodedPlan& plan, const Runtime& runtime, const StoreOptions& options, const CodedOptions& coded = {});

}  // namespace stoker
