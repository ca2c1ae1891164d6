// Stragglers: reads that nobody waits for any more and that are still under way, by shard.
#pragma once

#include <array>

#include "stoker/base/mutex.h"
#include "stoker/store/coded/format/format.h"

namespace stoker::coded {

// Any thread; came() is called on the Loop's.
class Stragglers {
 public:
  // A batch has left reads of this shard behind; the last of these has come.
  void left(size_t shard);
  void came(size_t shard);
  // Shards on which two batches or more have left some behind: it is not by chance that theirs come
  // last. They are not asked where others will do, so that what they keep in memory does not grow.
  ShardSet lagging() const;
  // Waits until one of them has come. False: there are none.
  bool await();

 private:
  mutable Mutex mutex_;
  CondVar came_;
  std::array<size_t, kShardsMax> batches_ GUARDED_BY(mutex_){};
  size_t all_ GUARDED_BY(mutex_) = 0;         // of these
  uint64_t arrivals_ GUARDED_BY(mutex_) = 0;  // so far
};

}  // namespace stoker::coded
