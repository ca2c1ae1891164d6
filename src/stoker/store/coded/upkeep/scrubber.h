// Scrubber: everything on the live shards is looked at, when somebody asks for it, and by itself at
// a low rate, pass after pass.
#pragma once

#include <chrono>
#include <memory>

#include "stoker/store/coded/fold/folder.h"
#include "stoker/store/coded/upkeep/resync.h"

namespace stoker::coded {

class Scrubbing;

// Writer thread.
class Scrubber {
 public:
  // What a pass moves is spent of `pace`, and of `patrol_pace` too if nobody asked for it; without
  // `patrols` there is no such pass.
  Scrubber(const FoldParts& parts, Folder& folder, Resync& resync, Pace& pace, Pace& patrol_pace,
           bool patrols)
      : parts_(parts),
        folder_(folder),
        resync_(resync),
        pace_(pace),
        patrol_pace_(patrol_pace),
        patrols_(patrols) {}

  // A pass that somebody asked for. `report` is the writer thread's until it is done.
  std::shared_ptr<Scrubbing> begin(std::shared_ptr<ScrubReport> report);
  // A piece of it. False: all was looked at.
  Result<bool> step(Scrubbing& pass);
  // A piece of the pass that nobody asked for. False: there is nothing to do, or not yet.
  bool patrol_step();

 private:
  const FoldParts parts_;
  Folder& folder_;
  Resync& resync_;
  Pace& pace_;
  Pace& patrol_pace_;
  const bool patrols_;
  std::shared_ptr<Scrubbing> patrol_;                   // the pass that goes on
  std::chrono::steady_clock::time_point patrol_after_;  // none before
  // left out and brought back by a scrub, to have log and table readable
  ShardSet renewed_ = 0;
};

}  // namespace stoker::coded
