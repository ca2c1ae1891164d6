// A store over several disks of which any m may be lost: erasure-coded stripes, and a log for
// updates. See docs/formats/coded_store.md.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stoker/classes/classes.h"
#include "stoker/store/open.h"

namespace stoker {

// What "coded(k+m, paths)" says.
struct CodedPlan {
  size_t k = 0, m = 0;
  std::vector<std::string> paths;
  // As in CodedOptions, which they overrule.
  std::optional<uint64_t> scrub_rate = {}, busy_repair_rate = {}, busy_fold_rate = {};
};

// The plan, if the composition is one of a coded store; for tools that work on such a store itself.
// The grammar lives in store/open.cc.
Result<std::optional<CodedPlan>> coded_plan(const std::string& composition);

struct CodedOptions {
  // false: paths are names that the engine knows, not of the file system (simulated disks)
  bool files = true;
  // of the log, when made; 0: 16 MiB, and less in a small store (1 MiB at least)
  uint32_t segment_bytes = 0;
  uint32_t segments = 8;  // of each shard's log, when made
  // folds and resyncs by itself; false: when told to (tests that count)
  bool background = true;
  // bytes a second that resync, repair and scrub move at most; 0: as many as they can
  uint64_t repair_rate = 0;
  uint64_t busy_repair_rate = 64 << 20;  // the same while others use the store
  // bytes a second that folds move at most, but those that a commit waits for; 0: as many as they
  // can
  uint64_t fold_rate = 0;
  uint64_t busy_fold_rate = 64 << 20;  // the same while others use the store
  // bytes a second that are looked at by itself, all the time; 0: only when it is asked for
  uint64_t scrub_rate = 4 << 20;
  // that tells the classes of objects and outlives the store; null: the one that ships
  const ClassTree* tree = nullptr;
  // that rates are counted by, and that outlives the store; null: the Loop's
  const Clock* clock = nullptr;
};

// How far what goes on in the background is.
struct RepairProgress {
  std::string what;              // empty: nothing is going on
  uint64_t done = 0, total = 0;  // chunks
  uint64_t bytes = 0;            // of these chunks
};

// What a scrub looked at, what it found damaged and made right again, and what it could not.
struct ScrubReport {
  uint64_t chunks = 0, bytes = 0;
  uint64_t blocks = 0, pages = 0, records = 0, tables = 0, superblocks = 0;
  std::vector<std::string> lost;  // the first kListed of them
  uint64_t unlisted = 0;          // how many more
  static constexpr size_t kListed = 100;
  void lose(std::string what) {
    if (lost.size() < kListed) {
      lost.push_back(std::move(what));
    } else {
      ++unlisted;
    }
  }
  uint64_t found() const { return blocks + pages + records + tables + superblocks; }
};

struct FsckReport;
struct FsckOptions;

// Reads every chunk of every shard that is there, parity too, and compares it with what all headers
// say. Changes nothing.
Result<FsckReport> fsck_coded_store(const CodedPlan& plan, const Runtime& runtime,
                                    const FsckOptions& options, const CodedOptions& coded = {});

struct RepairOptions {
  // look at everything that is on the shards, not only at those that are not up to date
  bool scrub = false;
  std::vector<std::string> replace;  // as in StoreOptions
  bool same_disk = false;            // as in StoreOptions, of those that are replaced
  // bytes a second that are read and written at most; 0: as many as can be
  uint64_t rate = 0;
  // what will be done, before it is; may be empty
  std::function<void(const std::string& sentence)> plan;
  // a few times a second; may be empty
  std::function<void(const RepairProgress& progress)> progress;
};
struct RepairReport {
  std::vector<std::string> problems;  // what is not right now; empty: all of it is
  std::vector<std::string> advice;    // what to do about that
  uint64_t rebuilt_bytes = 0;         // of shards
  ScrubReport scrub;                  // if asked for
  Version committed = 0;
};
// Opens the store for writing and brings every shard that is there up to date. Replaces lost ones
// where that is asked for. Waits until that is done.
Result<RepairReport> repair_coded_store(const CodedPlan& plan, const Runtime& runtime,
                                        const RepairOptions& options,
                                        const CodedOptions& coded = {});

Result<std::unique_ptr<Store>> open_coded_store(const CodedPlan& plan, const Runtime& runtime,
                                                const StoreOptions& options,
                                                const CodedOptions& coded = {});

}  // namespace stoker
