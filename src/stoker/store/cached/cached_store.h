// CachedStore, as its parts see it. store.cc opens it and writes behind, read.cc reads, prefetch.cc
// fetches what plans name ahead of the readers.
//
// A block is in one of four states: on its way from SLOW (fetches_), gathered for the next commit
// (gathered_), in a slot (places_), or nowhere. The policy says which blocks are to be kept; one
// that it gave up meanwhile is dropped when its next state would begin. Beside that it may stay in
// memory (kept_), by a policy of its own.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/base/pool.h"
#include "stoker/memory/arena.h"
#include "stoker/memory/budget.h"
#include "stoker/store/cached/ahead.h"
#include "stoker/store/cached/followers.h"
#include "stoker/store/cached/policy.h"
#include "stoker/store/cached/slots.h"
#include "stoker/store/cached/store.h"
#include "stoker/store/tagged_reads.h"

namespace stoker::cached {

class CachedStore final : public Store, public TaggedReads {
 public:
  static Result<std::unique_ptr<Store>> open(std::string name, OpenFast fast,
                                             std::unique_ptr<Store> slow, const Runtime& runtime,
                                             const CachedOptions& options);
  ~CachedStore() override;  // commits what is gathered

  Features features() const override { return slow_->features(); }
  Result<ObjectInfo> stat(std::string_view key, std::string_view snapshot) override {
    return snapshot.empty() ? object_of(key) : slow_->stat(key, snapshot);
  }
  std::optional<ObjectInfo> stat_at_once(std::string_view key) override;
  Result<std::vector<ObjectInfo>> list(std::string_view prefix,
                                       std::string_view snapshot) override {
    return slow_->list(prefix, snapshot);
  }
  Result<Level> list_level(std::string_view prefix, std::string_view snapshot) override {
    return slow_->list_level(prefix, snapshot);
  }
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override;
  Future<void> read_tagged(std::string_view key, std::string_view tag, uint64_t offset,
                           Slice into) override;
  // What is written has another tag, hence other blocks: the old ones are never found again.
  Result<std::unique_ptr<Transaction>> begin() override;
  Result<Version> copy(std::string_view from, std::string_view to) override;
  Status forget(std::string_view key, uint64_t offset, uint64_t bytes) override;
  Status follow(const Plan& plan) override;
  Future<void> snapshot(std::string_view name) override { return slow_->snapshot(name); }
  Future<void> drop(std::string_view name, Durability durability) override {
    return slow_->drop(name, durability);
  }
  StoreInfo info() const override;

 private:
  struct Place {
    uint32_t slot = 0;
    uint32_t bytes = 0;
  };
  // The part of one block that a read wants.
  struct Piece {
    enum class From : uint8_t { slot, memory, other, fetch, slow, done };

    BlockId id = {};
    uint64_t offset = 0;  // in the object
    uint64_t at = 0;      // in the block
    size_t block_bytes = 0;
    Slice into;
    From from = From::slow;
    std::shared_ptr<Slots> slots = {};
    std::chrono::steady_clock::time_point begun = {};  // of the read of a slot
    uint64_t slot = 0, generation = 0, life = 0;
    BlockPtr block = {};  // of From::slot: it is read whole, and stays in memory
    uint64_t begin = 0;   // in the block, of what `block` holds
    std::shared_ptr<Fetch> fetch = {};
    Future<void> moved = {};

    void copy() const;
  };
  // A fetch ahead of the readers.
  struct AheadJob {
    Piece piece;  // its block, and no memory of a reader
    std::string key, tag;
    PrefetchPtr prefetch;
    Status status = {};
  };
  // Of a plan.
  struct Epoch {
    uint64_t item_bytes = 0;  // are read in it
    uint64_t distinct_bytes = 0;
    uint64_t kept_bytes = 0;  // the most that may have been there when it began
    uint64_t read_bytes = 0;
    uint64_t fetched_before = 0;
    std::shared_ptr<const Follower> follower = {};
    std::vector<std::string> keys = {};
  };

  // Of an object that a plan names: what SLOW said of it, and when it was asked. No time: it may be
  // another object now.
  using Asked = std::optional<std::chrono::steady_clock::time_point>;
  struct Known {
    ObjectInfo object;
    Asked asked;
    uint32_t plans = 0;
  };
  // FAST, and how much room it has.
  struct Opened {
    std::shared_ptr<Slots> slots;
    Room room;
  };
  class Change;  // store.cc

  CachedStore(std::string name, OpenFast fast, std::unique_ptr<Store> slow,
              std::unique_ptr<Arena> memory, Budget& budget, const CachedOptions& options);

  // read.cc
  Future<void> read(std::string_view key, std::string_view tag, uint64_t offset, Slice into,
                    const ReadOptions& options);
  Status read_now(const std::string& key, const std::string& tag, uint64_t offset, Slice into,
                  const ReadOptions& options);
  Result<bool> read_content(const ObjectInfo& object, uint64_t offset, Slice into,
                            const ReadOptions& options);
  std::vector<Piece> pieces_of(const ObjectInfo& object, uint64_t offset, Slice into) const;
  bool read_from_memory(std::string_view key, std::string_view tag, uint64_t offset, Slice into);
  void choose(std::string_view key, Piece& piece) REQUIRES(mutex_);
  void pick(Piece& piece) REQUIRES(mutex_);
  bool from_ahead(Piece& piece) REQUIRES(mutex_);
  bool from_memory(Piece& piece) REQUIRES(mutex_);
  std::shared_ptr<Fetch> begin_fetch(const BlockId& id) REQUIRES(mutex_);
  BlockPtr make_block(const BlockId& id, size_t bytes);
  void keep(const BlockPtr& block) REQUIRES(mutex_);
  bool came_from_slot(Piece& piece, const Status& moved);
  void count_epochs(const Piece& piece) REQUIRES(mutex_);
  void failed(const BlockId& id, const Error& error) REQUIRES(mutex_);
  void gather(Piece& piece, const Status& status) REQUIRES(mutex_);
  static void tell(const Piece& piece, const Status& status);
  void fetched(Piece& piece, const Status& status);
  Status direct(const ObjectInfo& object, std::vector<Piece>& pieces, const ReadOptions& options);

  // prefetch.cc
  void fetch_ahead();
  void wake_ahead() REQUIRES(mutex_);
  bool begin_one(const Ahead::Due& due, std::vector<AheadJob>& jobs) REQUIRES(mutex_);
  void begin_ahead() REQUIRES(mutex_);  // and lets go of it meanwhile
  void take_arrived(const std::string& key);
  void arrived(AheadJob& job);

  // store.cc
  Status start();
  std::optional<ObjectInfo> known(std::string_view key);  // as SLOW said lately
  Result<ObjectInfo> object_of(std::string_view key);     // the same, or as it says
  Result<ObjectInfo> object_now(std::string_view key);    // as SLOW says
  void doubt();                                           // an object may be another one now
  bool believed(const Known& known) const REQUIRES(mutex_);
  void name_keys(const std::vector<ObjectInfo>& objects, Asked asked) REQUIRES(mutex_);
  void forget_block(const BlockId& id) REQUIRES(mutex_);  // the policy no longer holds it
  void write_behind();
  uint64_t batch() const REQUIRES(mutex_);  // so many blocks are worth a commit
  void commit() REQUIRES(mutex_);           // and lets go of it meanwhile
  void turn_off(const Error& error) REQUIRES(mutex_);
  void let_go() REQUIRES(mutex_);   // and lets go of it meanwhile
  void turn_on() REQUIRES(mutex_);  // and lets go of it meanwhile
  Result<Opened> open_slots();
  void take_up(Opened opened) REQUIRES(mutex_);

  const std::string name_;
  const OpenFast open_fast_;
  const std::unique_ptr<Store> slow_;
  const CachedOptions options_;
  const std::unique_ptr<Arena> memory_;
  Budget& budget_;                // of plans
  const uint64_t moving_places_;  // for blocks on their way and those that wait for a commit
  Budget in_memory_;              // of blocks, not of bytes

  mutable Mutex mutex_;
  CondVar wake_, flushed_;
  bool stopping_ GUARDED_BY(mutex_) = false;
  uint64_t flush_wanted_ GUARDED_BY(mutex_) = 0, flush_done_ GUARDED_BY(mutex_) = 0;
  std::shared_ptr<Slots> slots_ GUARDED_BY(mutex_);  // null: FAST is given up for now
  // given up; the writer lets go of it, without the mutex
  std::shared_ptr<Slots> closing_ GUARDED_BY(mutex_);
  std::weak_ptr<Slots> last_slots_ GUARDED_BY(mutex_);
  uint64_t life_ GUARDED_BY(mutex_) = 0;  // how often FAST was opened or given up
  Room room_ GUARDED_BY(mutex_);
  uint32_t errors_ GUARDED_BY(mutex_) = 0;  // of reads from FAST, one after the other
  uint32_t probes_ GUARDED_BY(mutex_) = 0;  // since FAST was given up
  std::unique_ptr<Policy> policy_ GUARDED_BY(mutex_);
  // Which blocks stay in memory, or will when they were read from a slot; null: there is no room.
  std::unique_ptr<Policy> memory_policy_ GUARDED_BY(mutex_);
  std::unordered_map<BlockId, BlockPtr, BlockIdHash> kept_ GUARDED_BY(mutex_);  // stay there
  Followers followers_ GUARDED_BY(mutex_);
  Ahead ahead_ GUARDED_BY(mutex_);
  CondVar ahead_wake_;
  bool ahead_due_ GUARDED_BY(mutex_) = false, ahead_stopping_ GUARDED_BY(mutex_) = false;
  uint32_t planned_reads_ GUARDED_BY(mutex_) = 0;  // since one looked for what is due
  uint64_t moving_ahead_ GUARDED_BY(mutex_) = 0;   // jobs whose end was not taken up
  // by key; one thread is at each key
  std::map<std::string, std::vector<AheadJob>> arrived_ GUARDED_BY(mutex_);
  std::map<std::string, Epoch> epochs_ GUARDED_BY(mutex_);  // by plan
  std::map<std::string, Known, std::less<>> known_ GUARDED_BY(mutex_);
  uint64_t doubts_ GUARDED_BY(mutex_) = 0;
  uint32_t good_ GUARDED_BY(mutex_) = 0;  // reads from FAST in time, since it was opened
  std::unordered_map<BlockId, Place, BlockIdHash> places_ GUARDED_BY(mutex_);
  std::unordered_map<BlockId, std::shared_ptr<Fetch>, BlockIdHash> fetches_ GUARDED_BY(mutex_);
  struct Gathered {
    BlockPtr block;
    uint64_t number = 0;  // in next_
  };
  // until they are committed
  std::unordered_map<BlockId, Gathered, BlockIdHash> gathered_ GUARDED_BY(mutex_);
  // of the gathered ones, as they came: not being committed
  std::map<uint64_t, BlockPtr> next_ GUARDED_BY(mutex_);
  uint64_t numbers_ GUARDED_BY(mutex_) = 0;
  // slots; leaving: the committed map still names them
  std::vector<uint32_t> free_ GUARDED_BY(mutex_), leaving_ GUARDED_BY(mutex_);
  std::vector<uint64_t> generation_ GUARDED_BY(mutex_);  // by slot: how often it was filled
  CacheInfo counts_ GUARDED_BY(mutex_);

  Pool readers_{16}, askers_{8};  // askers: for tags of what came ahead
  std::thread writer_, prefetcher_;
};

}  // namespace stoker::cached
