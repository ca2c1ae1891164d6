// Which blocks a cache keeps: S3-FIFO (Yang et al., SOSP 2023) with a ghost queue.
//
// New blocks enter a small queue, a tenth of the places. One that leaves it unused is only
// remembered, in the ghost queue; one that was used moves to the main queue. What comes back while
// it is remembered enters the main queue at once. The main queue is a clock: a used block goes
// round once more for each use, three at most. So a scan passes through the small queue and
// disturbs nothing.
//
// Pure bookkeeping, no bytes and no locks: the store and a simulator run the same code.
#pragma once

#include <list>
#include <optional>
#include <unordered_map>

#include "stoker/store/cached/block_id.h"

namespace stoker::cached {

class Policy {
 public:
  explicit Policy(size_t places);

  size_t size() const { return held_.size(); }
  bool holds(const BlockId& id) const { return held_.contains(id); }
  void hit(const BlockId& id);  // it is held, and was used
  // It is not held, and is from now on. The block that leaves for it, if one must.
  std::optional<BlockId> add(const BlockId& id);
  void remove(const BlockId& id);  // nothing if it is not held

 private:
  using Queue = std::list<BlockId>;
  struct Held {
    Queue* queue;
    Queue::iterator at;
    unsigned uses = 0;
  };
  BlockId evict();
  std::optional<BlockId> evict_small();
  BlockId evict_main();
  void remember(const BlockId& id);

  const size_t places_, small_places_;
  Queue small_, main_, ghost_;  // the newest in front
  std::unordered_map<BlockId, Held, BlockIdHash> held_;
  std::unordered_map<BlockId, Queue::iterator, BlockIdHash> ghosts_;
};

}  // namespace stoker::cached
