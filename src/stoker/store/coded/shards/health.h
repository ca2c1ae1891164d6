// How a coded store is, beside what StoreInfo says.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "stoker/store/coded/format/format.h"
#include "stoker/store/coded/shards/shard.h"
#include "stoker/store/coded/store.h"

namespace stoker::coded {

// The scrub that goes on by itself.
struct Patrol {
  uint64_t passes = 0;  // over everything, since the store was opened
  ScrubReport last;     // what the last of them found
  uint64_t found = 0;   // damages that all of them found
  RepairProgress doing;
  std::string stopped;  // why the last one ended early; another begins a minute later
};

// What went wrong on one disk since the store was opened, whatever came of it.
struct DiskHealth {
  std::string path;  // as the composition names it
  ShardHealth health;
};

struct Health {
  uint64_t epoch = 0;
  std::vector<std::string> live;  // the shards that count, as the composition names them
  RepairProgress doing;
  std::vector<std::string> troubles;  // of the shards that are not live
  std::vector<DiskHealth> disks;      // of all that are there
  uint64_t newer_blocks = 0;          // in the log, not folded yet
  uint64_t decoded_blocks = 0;        // read by decoding since it was opened
  uint64_t mended_blocks = 0;
  uint64_t rebuilt_bytes = 0;     // of shards that were made anew or came back
  uint64_t folds = 0;             // stripes folded
  uint64_t awaited_folds = 0;     // of these, while a commit waited for room in a log
  uint64_t lost_chunks = 0;       // of which not all could be rebuilt or mended
  uint64_t stuck_stripes = 0;     // that cannot be folded
  std::string lost_why;           // of the first of these
  std::vector<std::string> gone;  // what opening found lost in all logs, a sentence each
  LastScrub scrubbed;             // by itself or asked for; this one is on the disks
  Patrol patrol;
};

}  // namespace stoker::coded
