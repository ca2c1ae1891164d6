// Replay: the writes of a trace as updates of a modelled cluster, by one scheme.
//
// A volume (or file) of the trace is cut into stripes; a write becomes one update, of whole 4 KiB
// blocks, for each data chunk that it touches. Reads change nothing and are not played; classes see
// them. When the logs hold log_bytes, stripes are folded, and everything at the end: counts include
// that. A second replay loses a node after the first log_bytes of updates (or at the end), and
// rebuilds its chunks.
#pragma once

#include <string_view>

#include "curm/model.h"
#include "curm/scheme.h"
#include "curm/trace.h"
#include "stoker/classes/classes.h"

namespace stoker::curm {

struct ReplayOptions {
  int k = 6, m = 3, nodes = 25, clients = 64;
  uint64_t chunk_bytes = 1 << 20;
  uint64_t log_bytes = 64 << 20;  // of updates, one copy, over the cluster
  // behind each parity chunk (plr); in a log, for a hot stripe, at most (curm-reserve)
  uint64_t reserved_bytes = 256 << 10;
  Device device = kSsd;
};

struct ReplayResult {
  uint64_t updates = 0, update_bytes = 0;
  Counts counts;
  // until the last acknowledgement, with the folds that the full logs asked for
  double updates_per_second = 0;
  double drained_updates_per_second = 0;  // until everything was folded as well
  double p50_us = 0, p99_us = 0;          // of a write of the trace
  double recovery_seconds = 0;
  uint64_t space_peak_bytes = 0;  // base chunks, reserves, and logs at their fullest
  uint64_t space_base_bytes = 0;  // of that, base chunks
  // set aside for stripes at its most: behind parity chunks (plr), in logs (curm-reserve)
  uint64_t reserved_peak_bytes = 0;
};

Result<ReplayResult> replay(const Trace& trace, std::string_view scheme, Form form,
                            const ReplayOptions& options, const ClassTree* tree = nullptr);

}  // namespace stoker::curm
