// Stragglers: reads that nobody waits for any more and that are still under way, by shard.
#pragma once

#include <array>
#include <condition_variable>
#include <mutex>

#include "stoker/store/coded/format.h"

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
  mutable std::mutex mutex_;
  std::condition_variable came_;
  std::array<size_t, kShardsMax> batches_{};  // guarded by mutex_
  size_t all_ = 0;                            // of these; guarded by mutex_
  uint64_t arrivals_ = 0;                     // so far; guarded by mutex_
};

}  // namespace stoker::coded
