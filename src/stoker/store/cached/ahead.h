// What is fetched ahead of the readers, and how far ahead. Pure bookkeeping: it moves no bytes and
// takes no locks.
//
// A part of a block counts from the moment its fetch begins until it was read. At most depth() of
// them count at a time. The depth grows by one with each read that waited for the slow store. It
// halves when memory is short, or a block was evicted before it was read (AIMD).
//
// A block that the policy admits is fetched whole, and lies where blocks of reads lie. Of any other
// one only what will be read is fetched. It waits here, so that no byte is fetched that a reader
// would not have fetched.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "stoker/base/future.h"
#include "stoker/store/cached/followers.h"
#include "stoker/store/cached/slots.h"

namespace stoker::cached {

// On its way from SLOW.
struct Fetch {
  Promise<BlockPtr> done;
  Future<BlockPtr> future;
  uint64_t life = 0;  // of FAST, when it began
};

struct Prefetch {
  BlockId id = {};
  uint64_t begin = 0, bytes = 0;  // in the block
  uint64_t left = 0;              // that nobody read so far
  std::shared_ptr<const Follower> follower = {};
  uint64_t position = 0;              // of the follower
  BlockPtr part = {};                 // its memory; null: a whole block, which lies elsewhere
  std::shared_ptr<Fetch> fetch = {};  // of a part
  bool arrived = false;
  bool again = false;  // it failed before
};
using PrefetchPtr = std::shared_ptr<Prefetch>;

class Ahead {
 public:
  // most: the depth never exceeds it. 0: nothing is fetched ahead.
  explicit Ahead(uint64_t most) : most_(most), depth_(std::min<uint64_t>(most, 2)) {}

  uint64_t depth() const { return depth_; }
  bool room() const { return prefetches_.size() < depth_; }
  void stalled();  // a read of a plan waited for the slow store
  void pressed() { depth_ = std::min(depth_, std::max<uint64_t>(1, depth_ / 2)); }

  // What is due first of all plans: the least positions ahead of its reader. None: all of it was
  // looked at, as far as one looks ahead.
  struct Due {
    std::shared_ptr<const Follower> follower;
    uint64_t position = 0;
    Part part;
    bool again = false;
  };
  std::optional<Due> due(const Followers& followers);
  void advance(const Due& due);         // it was looked at
  void stop(const Follower& follower);  // its objects are others now
  // The slow store failed. What is due begins there once more.
  void failed(const Prefetch& prefetch);
  bool plans(const Followers& followers, const BlockId& id) const;

  void add(PrefetchPtr prefetch) { prefetches_.emplace(prefetch->id, std::move(prefetch)); }
  bool has(const Prefetch& prefetch) const;
  // That holds, or will hold, this part of the block.
  PrefetchPtr covering(const BlockId& id, uint64_t begin, uint64_t bytes) const;
  void read(Prefetch& prefetch, uint64_t bytes);
  // What was not read is dropped: so many bytes were fetched in vain.
  uint64_t drop(const BlockId& id);
  bool drop_whole(const BlockId& id);  // whether there was one
  void drop_whole();                   // all of them
  uint64_t drop(const Follower& follower);
  void remove(const Prefetch& prefetch);
  uint64_t drop_passed();  // by readers that went on without them

  uint64_t unread_bytes() const;  // that arrived
  uint64_t unread_bytes(const Follower& follower) const;

 private:
  struct Cursor {
    uint64_t position = 0;
    uint64_t again_until = 0;  // what is due before it is due for the second time
    size_t next = 0;           // of the parts
    std::vector<Part> parts = {};
    bool loaded = false, stopped = false;
  };
  template <typename Which>
  uint64_t drop_if(Which which);

  const uint64_t most_;
  uint64_t depth_;
  std::map<const Follower*, Cursor> cursors_;
  std::unordered_multimap<BlockId, PrefetchPtr, BlockIdHash> prefetches_;
};

}  // namespace stoker::cached
