// What the plans say: when a block is used next. Pure bookkeeping, no bytes and no locks.
//
// A plan is unrolled a part at a time, into the positions at which each block is used. A read takes
// the first of them away; nobody says which plan a read belongs to. A position that was passed by
// is dropped some thousands of positions later: readers do not keep the order exactly.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "stoker/base/order.h"
#include "stoker/memory/budget.h"
#include "stoker/store/cached/block_id.h"
#include "stoker/store/cached/policy.h"
#include "stoker/store/plan.h"
#include "stoker/store/store.h"

namespace stoker::cached {

// Planned, but nobody can say when, or no more.
inline constexpr uint64_t kSomeDay = ~uint64_t{1};
inline constexpr uint64_t kNever = ~uint64_t{0};

// Positions at which one block is used, in order. Most blocks of most plans have few or none.
class Uses {
 public:
  bool empty() const { return first_ == positions_.size(); }
  size_t size() const { return positions_.size() - first_; }
  uint64_t front() const { return positions_[first_]; }
  std::optional<uint64_t> after(uint64_t position) const {
    const auto at = std::upper_bound(positions_.begin() + static_cast<ptrdiff_t>(first_),
                                     positions_.end(), position);
    return at == positions_.end() ? std::nullopt : std::optional(*at);
  }
  void push_back(uint64_t position) { positions_.push_back(position); }
  void pop_front() {
    if (2 * ++first_ < positions_.size()) return;
    positions_.erase(positions_.begin(), positions_.begin() + static_cast<ptrdiff_t>(first_));
    first_ = 0;
    if (positions_.empty()) positions_ = {};
  }

 private:
  std::vector<uint64_t> positions_;
  size_t first_ = 0;
};

// What one item has of one block.
struct Part {
  BlockId id = {};
  const std::string* key = nullptr;  // of the follower
  const std::string* tag = nullptr;
  uint64_t offset = 0;  // in the object
  uint64_t bytes = 0;
  uint64_t object_bytes = 0;  // of all of it
};

class Follower {
 public:
  // objects: one for each key of the plan. Its tables draw on the budget, before they are made.
  // invalid_argument: the plan is none; over_budget.
  static Result<std::unique_ptr<Follower>> make(Plan plan, const std::vector<ObjectInfo>& objects,
                                                uint32_t block_bytes, Budget& budget);

  bool names(const BlockId& id) const { return blocks_.contains(id); }
  // Positions until the block is used, kSomeDay or kNever. It is named.
  uint64_t next(const BlockId& id) const;
  // As next(), of the first use behind a position.
  uint64_t after(const BlockId& id, uint64_t position) const;
  // It was read. How many positions were passed; `changed` gets blocks whose next use is another.
  uint64_t read(const BlockId& id, std::vector<BlockId>& changed);
  // Bytes from `offset` on were read. A shuffled plan whose reads are fetched ahead goes by the
  // items that begin there.
  void pass(std::string_view key, uint64_t offset, uint64_t bytes);
  // What is read next. Of a shuffled plan it stands still unless it is fetched ahead.
  uint64_t position() const { return position_; }
  bool ahead() const { return plan_.ahead; }
  // The parts of blocks that the item at a position has, in order. Nothing behind the end.
  std::vector<Part> parts(uint64_t position) const;
  // The least of bytes that all its items have, and of those that their blocks have.
  uint64_t distinct_bytes() const { return std::min(item_bytes_, block_bytes_sum_); }
  // Of all items together: so much is read in an epoch.
  uint64_t item_bytes() const { return item_bytes_; }

 private:
  explicit Follower(Plan plan) : plan_(std::move(plan)) {}
  uint64_t item(uint64_t position) const;
  uint64_t epoch_item(uint64_t position) const;
  Status reserve(const std::vector<ObjectInfo>& objects, Budget& budget);
  Status name_blocks(const std::vector<ObjectInfo>& objects);
  void find_runs();
  void passed(uint64_t item);
  template <typename Do>
  void each_block(uint64_t item, Do use) const;
  void unroll(std::vector<BlockId>& changed);

  Grant memory_;
  Plan plan_;
  std::vector<std::string> tags_;
  std::vector<uint64_t> object_bytes_;
  // Of a shuffled plan that is fetched ahead: the runs of each key, by their offsets.
  std::map<std::string, std::vector<uint32_t>, std::less<>> runs_of_;
  std::set<uint64_t> missed_;           // positions before position_ that nobody read so far
  std::vector<uint64_t> ends_;          // items of each run and those before it
  std::vector<uint64_t> source_begin_;  // of a mixture: the first item
  std::optional<Mixture> mixture_;
  uint32_t block_bytes_ = 0;
  uint64_t items_ = 0, item_bytes_ = 0, block_bytes_sum_ = 0;
  uint64_t last_ = 0;  // the position where the plan ends
  uint64_t position_ = 0, dropped_ = 0, unrolled_ = 0;
  uint64_t known_uses_ = 0;  // in blocks_
  std::unordered_map<BlockId, Uses, BlockIdHash> blocks_;
};

class Followers {
 public:
  // Takes the place of the one of this name; null ends it.
  void follow(const std::string& name, std::shared_ptr<Follower> follower);
  size_t size() const { return followers_.size(); }
  // On a clock of its own, which read() moves on: when the block is used next; none: no plan names
  // it.
  std::optional<uint64_t> next(const BlockId& id) const;
  // The same when `first` has gone by this position of its own.
  std::optional<uint64_t> after(const BlockId& id, const Follower& first, uint64_t position) const;
  // It was read. The policies, which may be null, hear of each block whose next use is another now.
  void read(const BlockId& id, std::initializer_list<Policy*> policies);
  // Bytes from `offset` on were read.
  void pass(std::string_view key, uint64_t offset, uint64_t bytes);
  const std::map<std::string, std::shared_ptr<Follower>>& all() const { return followers_; }

 private:
  template <typename Next>
  std::optional<uint64_t> soonest(const BlockId& id, Next next) const;
  std::map<std::string, std::shared_ptr<Follower>> followers_;
  uint64_t clock_ = 0;
};

}  // namespace stoker::cached
