// Rounds: all frames of one round of appends are durable before any of the next is written. So what
// a frame tells of the rounds before was durable. By that an opening knows of records that are
// damaged in all logs. docs/formats/coded_store.md, *Rounds*.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "stoker/store/coded/format/format.h"
#include "stoker/store/coded/format/log.h"
#include "stoker/store/coded/format/stripe.h"

namespace stoker::coded {

// The writer's side: what the next round is, and what its frames tell. Writer thread.
class Rounds {
 public:
  // Goes on behind the last round that any log has.
  void resume(uint64_t last, const ShardsOfRounds& shards);
  uint64_t last() const { return last_; }
  // These are in the frames of the round that was appended last, or in older ones that nobody tells
  // of.
  void add(const ValRef& val) { vals_.push_back(val); }
  void add(const std::shared_ptr<CommitRecord>& commit) { commits_.push_back(commit); }
  // Of the item that begin() would give, at most.
  size_t item_bytes(const Shape& shape) const;
  // The next round, with what it tells: all that add() brought, of which as much as a small part of
  // a segment holds.
  RoundItem begin(const Shape& shape, Stamp image);
  // Its frames are durable. They are kept as long as what they tell of is needed.
  void end(const std::map<size_t, LogFrame>& written);

 private:
  uint64_t last_ = 0;
  ShardsOfRounds shards_{};
  // to be told, the oldest first; what is not needed any more is not told
  std::deque<std::weak_ptr<Val>> vals_;
  std::deque<std::weak_ptr<CommitRecord>> commits_;
  std::vector<std::weak_ptr<Val>> told_vals_;  // by the round that is being appended
  std::vector<std::weak_ptr<CommitRecord>> told_commits_;
};

// The reader's side: which rounds have records that are damaged and that no intact frame tells of.
class FoundRounds {
 public:
  // An intact frame. Round 0: it says of none.
  struct Frame {
    uint64_t offset = 0, end = 0, sequence = 0, round = 0;
  };
  // The frames of a segment, in order.
  void take(size_t shard, std::span<const Frame> frames);
  void tell(const RoundItem& item);
  uint64_t last() const { return last_; }
  // As the next frame has to tell them.
  ShardsOfRounds shards_of_last() const;
  // Current shards with damaged frames of rounds that nothing tells of. Only of rounds of which as
  // many shards are missing or damaged as must be for a record to be gone. `from`: the first round
  // that a shard's log may have. Asked only where a record is known to be gone: gaps that a crash
  // leaves are like these.
  ShardSet hiding(const Shape& shape, ShardSet current, std::span<const uint64_t> from) const;

 private:
  struct Gap {
    uint64_t after = 0, before = 0;  // rounds between these
    uint64_t frames = 0;             // that stood there
  };
  const ShardSet* shards_of(uint64_t round) const;
  std::vector<Gap> gaps_of(size_t shard, uint64_t from) const;

  uint64_t last_ = 0;
  std::map<uint64_t, ShardSet> seen_;  // shards with an intact frame, by round
  std::map<uint64_t, ShardSet> told_;  // shards that it was written on, by round
  std::map<size_t, std::vector<Gap>> gaps_;
  std::map<size_t, uint64_t> newest_;  // round that a shard has a frame of
};

}  // namespace stoker::coded
