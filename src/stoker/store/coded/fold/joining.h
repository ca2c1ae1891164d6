// Joining: the shard that is being brought up to date, and which of its chunks are. It counts for
// nothing yet, but gets all that is written meanwhile.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "stoker/base/pool.h"
#include "stoker/store/coded/logs/log_set.h"
#include "stoker/store/coded/rebuild/rebuilder.h"

namespace stoker::coded {

// Writer thread.
class Joining {
 public:
  Joining(CommittedMap& map, Shards& shards, LogSet& logs, Rebuilder& rebuilder)
      : map_(map), shards_(shards), shape_(shards.shape()), logs_(logs), rebuilder_(rebuilder) {}

  const std::optional<size_t>& shard() const { return shard_; }
  ShardSet set() const { return shard_ ? shard_bit(*shard_) : 0; }  // of this one, or none
  // The shard without which most of what has the fewest survivors is at risk; its stripes in that
  // order. False: there is none.
  bool choose();
  // Of a stripe all that it lacks: a piece at begin(), and one at each step().
  bool has_begun() const { return chunk_.has_value(); }
  StripePtr next();  // null: the shard has all
  Status begin(const StripePtr& stripe);
  Status step();
  // This one; where nothing holds that back all of it, beside the next ones of the same urgency.
  Status begin_some(const StripePtr& first);
  // What a fold has changed of a stripe that the shard has, or is about to have: it gets that again
  // at once, or folds beside it would keep it away for ever.
  Status again(const StripePtr& stripe);
  // It has this stripe: it was written there, too.
  void wrote(uint64_t stripe) { joined_.insert(stripe); }
  // How far it is, for Health.
  void tell();
  void end();
  void give_up(const std::string& why);  // until retry() or the next opening
  void retry() { given_up_.clear(); }
  // LogSet::checkpoint(), on this shard too; without which it is given up.
  Status checkpoint();

 private:
  StripePtr next_listed();
  std::optional<size_t> position_on_it(const Stripe& stripe) const;
  void count(const Rebuilt& done, size_t blocks_before);
  Status forget_chunk(const StripePtr& stripe, size_t position);

  CommittedMap& map_;
  Shards& shards_;
  const Shape& shape_;
  LogSet& logs_;
  Rebuilder& rebuilder_;
  std::optional<size_t> shard_;
  std::optional<Rebuilding> chunk_;             // of it, that has not all of its rows yet
  std::vector<std::weak_ptr<Stripe>> to_join_;  // stripes to look at, the last one first
  std::set<uint64_t> joined_;                   // stripes that it has by now
  std::unique_ptr<Pool> helpers_;               // while there is a shard
  std::set<size_t> given_up_;                   // shards that failed while they were resynced
};

}  // namespace stoker::coded
