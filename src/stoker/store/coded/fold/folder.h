// Folder: what is newer in the logs goes into the bases, a step at a time, so that the logs'
// segments are free again.
#pragma once

#include <cstddef>
#include <vector>

#include "stoker/codec/erasure.h"
#include "stoker/memory/budget.h"
#include "stoker/store/coded/fold/joining.h"
#include "stoker/store/coded/logs/log_set.h"
#include "stoker/store/coded/read/reader.h"
#include "stoker/store/coded/rebuild/rebuilder.h"
#include "stoker/store/coded/shards/pace.h"

namespace stoker::coded {

// How much a step of folding takes on.
struct FoldBounds {
  size_t stripes;
  size_t rows = SIZE_MAX;
  bool spare = false;   // what is still rewritten stays in the log
  bool oldest = false;  // only rows that have waited longest: the oldest segments come free first
};
inline constexpr size_t kFoldAtOnce = 16;  // stripes in a step that makes room
inline constexpr size_t kRowsAStep = 64;   // folded in a step that a commit may find before it

// What a fold works with.
struct FoldParts {
  CommittedMap& map;
  Shards& shards;
  Reader& reader;
  LogSet& logs;
  Rebuilder& rebuilder;
  Joining& joining;
  const codec::ErasureCode& code;
  Budget& budget;
};

// Writer thread.
class Folder {
 public:
  explicit Folder(const FoldParts& parts) : parts_(parts) {}
  // How many stripes were folded.
  Result<size_t> step(const FoldBounds& bounds);
  // The same, and what it moved is spent.
  Result<size_t> paced(const FoldBounds& bounds, Pace& pace);

 private:
  const FoldParts parts_;
  std::vector<SegmentRef> stand_ins_;  // of folds that could not be finished
};

}  // namespace stoker::coded
