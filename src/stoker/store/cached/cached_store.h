// CachedStore, as its parts see it. store.cc opens it and writes behind, read.cc reads.
//
// A block is in one of four states: on its way from SLOW (fetches_), gathered for the next commit
// (gathered_), in a slot (places_), or nowhere. The policy says which blocks are to be kept; one
// that it gave up meanwhile is dropped when its next state would begin.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "stoker/base/pool.h"
#include "stoker/store/cached/followers.h"
#include "stoker/store/cached/policy.h"
#include "stoker/store/cached/slots.h"
#include "stoker/store/cached/store.h"

namespace stoker::cached {

class CachedStore final : public Store {
 public:
  static Result<std::unique_ptr<Store>> open(std::string name, OpenFast fast,
                                             std::unique_ptr<Store> slow, const Runtime& runtime,
                                             const CachedOptions& options);
  ~CachedStore() override;  // commits what is gathered

  Features features() const override { return slow_->features(); }
  Result<ObjectInfo> stat(std::string_view key, std::string_view snapshot) override {
    return slow_->stat(key, snapshot);
  }
  Result<std::vector<ObjectInfo>> list(std::string_view prefix,
                                       std::string_view snapshot) override {
    return slow_->list(prefix, snapshot);
  }
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override;
  // What is written has another tag, hence other blocks: the old ones are never found again.
  Result<std::unique_ptr<Transaction>> begin() override { return slow_->begin(); }
  Result<Version> copy(std::string_view from, std::string_view to) override {
    return slow_->copy(from, to);
  }
  Status forget(std::string_view key, uint64_t offset, uint64_t bytes) override;
  Status follow(const Plan& plan) override;
  Future<void> snapshot(std::string_view name) override { return slow_->snapshot(name); }
  Future<void> drop(std::string_view name) override { return slow_->drop(name); }
  StoreInfo info() const override;

 private:
  struct Place {
    uint32_t slot = 0;
    uint32_t bytes = 0;
  };
  struct Fetch {
    Promise<BlockPtr> done;
    Future<BlockPtr> future;
    uint64_t life = 0;  // of FAST, when it began
  };
  struct Piece;  // read.cc
  // Of a plan.
  struct Epoch {
    uint64_t item_bytes = 0;  // are read in it
    uint64_t distinct_bytes = 0;
    uint64_t kept_bytes = 0;  // the most that may have been there when it began
    uint64_t read_bytes = 0;
    uint64_t fetched_before = 0;
    std::shared_ptr<const Follower> follower = {};
  };

  CachedStore(std::string name, OpenFast fast, std::unique_ptr<Store> slow, Grant dram,
              const CachedOptions& options);

  // read.cc
  Status read_now(const std::string& key, uint64_t offset, Slice into, const ReadOptions& options);
  Result<bool> read_content(const ObjectInfo& object, uint64_t offset, Slice into,
                            const ReadOptions& options);
  void choose(Piece& piece);              // with the mutex
  void count_epochs(const Piece& piece);  // with the mutex
  void failed(const BlockId& id, const Error& error);
  void fetched(Piece& piece, const Status& status);
  Status direct(const ObjectInfo& object, std::vector<Piece>& pieces, const ReadOptions& options);

  // store.cc
  Status start();
  void forget_block(const BlockId& id);  // with the mutex: the policy no longer holds it
  void write_behind();
  uint64_t batch() const;  // with the mutex: so many blocks are worth a commit
  void commit(std::unique_lock<std::mutex>& lock);
  void turn_off(const Error& error);  // with the mutex
  void let_go(std::unique_lock<std::mutex>& lock);
  void turn_on(std::unique_lock<std::mutex>& lock);
  Result<std::shared_ptr<Slots>> open_slots();
  void take_up(std::shared_ptr<Slots> slots);  // with the mutex

  const std::string name_;
  const OpenFast open_fast_;
  const std::unique_ptr<Store> slow_;
  const CachedOptions options_;
  const Grant dram_grant_;
  Budget dram_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_, flushed_;
  bool stopping_ = false;
  uint64_t flush_wanted_ = 0, flush_done_ = 0;
  std::shared_ptr<Slots> slots_;    // null: FAST is given up for now
  std::shared_ptr<Slots> closing_;  // given up; the writer lets go of it, without the mutex
  std::weak_ptr<Slots> last_slots_;
  uint64_t life_ = 0;  // how often FAST was opened or given up
  Room room_;
  uint32_t errors_ = 0;  // of reads from FAST, one after the other
  uint32_t probes_ = 0;  // since FAST was given up
  std::unique_ptr<Policy> policy_;
  Followers followers_;
  std::map<std::string, Epoch> epochs_;  // by plan
  std::unordered_map<BlockId, Place, BlockIdHash> places_;
  std::unordered_map<BlockId, std::shared_ptr<Fetch>, BlockIdHash> fetches_;
  std::unordered_map<BlockId, BlockPtr, BlockIdHash> gathered_;  // until they are committed
  std::vector<BlockPtr> next_;            // of the gathered ones: for the next commit
  std::vector<uint32_t> free_, leaving_;  // slots; leaving: the committed map still names them
  std::vector<uint64_t> generation_;      // by slot: how often it was filled
  uint64_t uncommitted_ = 0;              // admitted, and not in a slot
  uint64_t committing_ = 0;               // of these: being committed, each into its slot
  CacheInfo counts_;

  Pool readers_{16};
  std::thread writer_;
};

}  // namespace stoker::cached
