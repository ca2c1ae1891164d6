// CommittedMap: what a coded store has in memory of all that is committed, and the mutex that
// guards it. docs/formats/coded_store.md is the protocol.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/classes/classes.h"
#include "stoker/memory/budget.h"
#include "stoker/store/coded/format/stripe.h"
#include "stoker/store/coded/format/table.h"
#include "stoker/store/coded/map/header_cache.h"
#include "stoker/store/coded/shards/health.h"

namespace stoker::coded {

// A chunk of a stripe: the stripe's id, and the position of the chunk in it.
using ChunkAt = std::pair<uint64_t, size_t>;

// A chunk with rows that could not be rebuilt.
struct Loss {
  std::weak_ptr<Stripe> stripe;
  std::string why;
};

// Reached through CommittedMap::lock() only.
struct MapState {
  MapState(const Shape& shape, const ClassTree& tree, Budget& budget)
      : headers(shape, budget), classes(tree) {}

  HeaderCache headers;
  Table table;
  ClassTable classes;                               // by class_id
  std::set<std::string, std::less<>> owned;         // by open transactions
  std::map<uint64_t, std::weak_ptr<Stripe>> dirty;  // stripes with blocks in the log
  Version version = 0;
  uint64_t epoch = 0;
  uint64_t next_id = 1;  // of stripes and folds, within the epoch
  ShardSet live = 0;
  ShardSet joining = 0;  // the shard that is being brought up to date, or none
  std::array<uint64_t, kShardsMax> joinings{};  // how often each of them began to be
  std::optional<Error> refused;                 // why nothing is written any more
  size_t abandoned = 0;                         // transactions with blocks on their way
  Health counts;
  // chunks of live shards with bad blocks, or pages that could not be read
  std::map<ChunkAt, std::weak_ptr<Stripe>> bad;
  std::map<ChunkAt, Loss> lost;           // tried again when a shard came back
  std::map<uint64_t, std::string> stuck;  // why stripes cannot be folded; tried again likewise

  bool is_live(size_t shard) const { return (live & shard_bit(shard)) != 0; }
  Stamp take_id() { return make_stamp(epoch, next_id++); }
  ObjectInfo info_of(std::string_view key, const Object& object) const;
  // Where what is new goes: to shards that are live, and to the one that is joining.
  ShardSet to_write() const { return live | joining; }
  // live chunks with a header page of which no copy could be read
  uint32_t unread_positions(const Shape& shape, const Stripe& stripe) const;
  // What is repaired first, the highest.
  using Urgency = std::tuple<size_t, size_t, uint64_t>;
  Urgency urgency(const Stripe& stripe) const;
};

// Any thread. Nobody holds the mutex during I/O. The mutable fields of a Stripe and the number of
// an Object are guarded by it, too.
class CommittedMap {
 public:
  // Holds the mutex as long as it lives, or until unlock().
  template <typename State>
  class Locked {
   public:
    Locked(Mutex& mutex, CondVar& changed, State& state) NO_THREAD_SAFETY_ANALYSIS
        : lock_(mutex),
          changed_(changed),
          state_(state) {}
    State* operator->() const { return &state_; }
    State& operator*() const { return state_; }
    void unlock() NO_THREAD_SAFETY_ANALYSIS { lock_.unlock(); }
    // Until somebody says changed().
    void wait() { changed_.wait(lock_); }
    template <typename Until>
    void wait(Until until) {
      changed_.wait(lock_, until);
    }

   private:
    MutexLock lock_;
    CondVar& changed_;
    State& state_;
  };

  // `name` of the store is for errors. The slots of the stripes are of this shape.
  CommittedMap(const Shape& shape, const ClassTree& tree, Budget& budget, std::string name);

  Locked<MapState> lock() { return {mutex_, changed_, state_}; }
  Locked<const MapState> lock() const { return {mutex_, changed_, state_}; }
  // A stripe has no readers any more, or is folded, or a transaction that was abandoned has ended.
  void changed() { changed_.notify_all(); }
  const Shape& shape() const { return shape_; }
  const std::string& name() const { return name_; }
  Slots& slots() { return slots_; }
  const Slots& slots() const { return slots_; }

  // All that follow take the mutex.
  ShardSet live() const;
  uint32_t live_positions(const Stripe& stripe) const;
  std::optional<Error> refused() const;
  // A stripe with slots of its own, in no object yet. Errors: out_of_space.
  Result<StripePtr> make_stripe(Class expected);
  // The VALs that count and have their place on this shard, each once; the oldest first.
  std::vector<std::pair<StripePtr, ValRef>> vals_of(size_t shard) const;
  // Nothing is in the log of up to this stamp, but for stripes that cannot be folded.
  bool folded_up_to(Stamp stamp) const;
  // The objects of which something is on no live shard, and cannot be decoded.
  std::vector<std::string> affected() const;
  // Waits for the transactions that were abandoned with blocks on their way. False: there are none.
  bool await_abandoned();

 private:
  const Shape shape_;
  const std::string name_;
  Slots slots_;  // has a lock of its own; outlives the stripes
  mutable Mutex mutex_;
  mutable CondVar changed_;
  MapState state_;  // reached through Locked alone
};

// The headers of these stripes stay in memory, once they are there, as long as it lives.
class HeaderPins {
 public:
  explicit HeaderPins(CommittedMap& map) : map_(map) {}
  HeaderPins(CommittedMap& map, const StripePtr& stripe);
  ~HeaderPins();
  HeaderPins(const HeaderPins&) = delete;
  HeaderPins& operator=(const HeaderPins&) = delete;

  void add(const MapState& locked, const StripePtr& stripe);

 private:
  CommittedMap& map_;
  std::vector<StripePtr> stripes_;
};

}  // namespace stoker::coded
