// Which blocks a cache keeps: S3-FIFO (Yang et al., SOSP 2023) with a ghost queue.
//
// New blocks enter a small queue, a tenth of the places. One that leaves it unused is only
// remembered, in the ghost queue; one that was used moves to the main queue. What comes back while
// it is remembered enters the main queue at once. The main queue is a clock: a used block goes
// round once more for each use, three at most. So a scan passes through the small queue and
// disturbs nothing.
//
// Where a plan says when a block is used next, this counts instead: the block that is used last
// leaves, and none enters in the place of one that is used as soon. What no plan names leaves
// first.
//
// Pure bookkeeping, no bytes and no locks: the store and a simulator run the same code.
#pragma once

#include <list>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stoker/store/cached/block_id.h"

namespace stoker::cached {

class Policy {
 public:
  explicit Policy(size_t places);

  size_t size() const { return held_.size(); }
  bool holds(const BlockId& id) const { return held_.contains(id); }
  std::vector<BlockId> held() const;
  void hit(const BlockId& id);  // it is held, and was used
  // Whether a block that is not held, used next at a time or in no plan, is worth a place.
  bool admits(std::optional<uint64_t> next) const;
  // It is not held, is admitted, and is held from now on. The block that leaves for it, if one
  // must.
  std::optional<BlockId> add(const BlockId& id, std::optional<uint64_t> next = {});
  // When it is used next is another now. Nothing if it is not held.
  void plan(const BlockId& id, std::optional<uint64_t> next);
  void remove(const BlockId& id);  // nothing if it is not held

 private:
  using Queue = std::list<BlockId>;
  struct Held {
    Queue* queue;  // null: it is planned
    Queue::iterator at = {};
    unsigned uses = 0;
    uint64_t next = 0;
  };
  void enter(const BlockId& id, std::optional<uint64_t> next);
  BlockId evict();
  std::optional<BlockId> evict_small();
  BlockId evict_main();
  void remember(const BlockId& id);
  bool is_consistent() const;  // each held block is in one queue, or planned

  const size_t places_, small_places_;
  Queue small_, main_, ghost_;                      // the newest in front
  std::set<std::pair<uint64_t, BlockId>> planned_;  // by their next use
  std::unordered_map<BlockId, Held, BlockIdHash> held_;
  std::unordered_map<BlockId, Queue::iterator, BlockIdHash> ghosts_;
};

}  // namespace stoker::cached
