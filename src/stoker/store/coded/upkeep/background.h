// Background: what a coded store does between commits, and when nobody comes: shards and chunks are
// repaired, the log is relieved, everything is looked at.
#pragma once

#include "stoker/store/coded/fold/folder.h"
#include "stoker/store/coded/shards/pace.h"
#include "stoker/store/coded/upkeep/resync.h"
#include "stoker/store/coded/upkeep/scrubber.h"
#include "stoker/store/coded/upkeep/trouble.h"

namespace stoker::coded {

// Writer thread.
class Background {
 public:
  Background(const FoldParts& parts, Folder& folder, Resync& resync, Scrubber& scrubber,
             Paces& paces)
      : map_(parts.map),
        shape_(parts.shards.shape()),
        logs_(parts.logs),
        joining_(parts.joining),
        folder_(folder),
        resync_(resync),
        scrubber_(scrubber),
        paces_(paces) {}

  // Both: false: there is nothing to do, or not yet. `logged`: bytes in each log, by the batch that
  // it follows.
  bool step(bool idle, uint64_t logged);
  bool relieve_log(uint64_t logged);

 private:
  // beside commits: what keeps it from folding is told once
  Result<size_t> fold_watched(const FoldBounds& bounds);

  CommittedMap& map_;
  const Shape& shape_;
  LogSet& logs_;
  Joining& joining_;
  Folder& folder_;
  Resync& resync_;
  Scrubber& scrubber_;
  Paces& paces_;
  Trouble repair_trouble_{"repair"}, fold_trouble_{"folding"},
      image_trouble_{"writing the object table"};
};

}  // namespace stoker::coded
