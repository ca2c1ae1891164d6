// Replay on real files: the writes of a trace as updates of a ShardCluster, by the safe form of one
// scheme. Counts are exact, times are those of this machine: all nodes share its disks, its
// processors, and no network.
//
// The files are filled first. Then clients (threads) work in a closed loop as on the modelled
// cluster, with folds beside them; one client alone folds by itself, and then all counts are those
// of the model. In the end, after log_bytes of updates more, the folder of a node is deleted and
// rebuilt, and every block of every chunk is compared with what it must be.
//
// Scheme `switch`: all schemes, changed in use. Before every eighth write its client gives the
// stripe the next one in turn, while the others write; in the end every stripe goes on by what it
// was given last, or that is an error as well.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "curm/replay.h"

namespace stoker::curm {

struct FileReplayOptions {
  std::string folder;
  bool keep = false;
  std::function<void(const std::string&)> tell;  // progress, a line at a time; may be empty
};

struct FileReplayResult {
  ReplayResult result;
  // during the updates and folds, framing and headers too
  uint64_t disk_bytes_read = 0, disk_bytes_written = 0;
  // likewise: one serves all that wait for it
  uint64_t disk_flushes = 0;
  uint64_t verified_bytes = 0;
  uint64_t changes = 0;  // of schemes, in both passes
  // of stripes, likewise; of scheme `switch` alone
  std::map<std::string, uint64_t> writes_by_scheme;
  std::string engine;
  bool direct = false;  // I/O went around the page cache
};

// What the files take at most, about.
uint64_t space_needed(const Trace& trace, std::string_view scheme, const ReplayOptions& options);
Result<FileReplayResult> replay_on_files(const Trace& trace, std::string_view scheme,
                                         const ReplayOptions& options,
                                         const FileReplayOptions& files,
                                         const ClassTree* tree = nullptr);

}  // namespace stoker::curm
