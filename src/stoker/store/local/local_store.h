// LocalStore: a Store on volumes. One mutex guards the map, the allocator and all staged bytes; it
// is never held over I/O.
//
// Threads: any thread calls in. The Loop's thread completes transfers of writes, and pool threads
// verify reads. The store's worker merges partial chunks and commits, one job after the other. A
// deferred commit may run on its caller's thread.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/base/pool.h"
#include "stoker/memory/budget.h"
#include "stoker/store/local/allocator.h"
#include "stoker/store/local/committer.h"
#include "stoker/store/local/load.h"
#include "stoker/store/local/map.h"
#include "stoker/store/local/staged.h"
#include "stoker/store/local/transfer.h"
#include "stoker/store/local/volume.h"
#include "stoker/store/store.h"

namespace stoker::local {

class LocalStore final : public Store {
 public:
  static Result<std::unique_ptr<Store>> open(std::vector<std::string> paths, const Runtime& process,
                                             const StoreOptions& options,
                                             const LocalOptions& local);
  ~LocalStore() override;

  Features features() const override { return kFeatures; }
  Result<ObjectInfo> stat(std::string_view key, std::string_view snapshot) override;
  std::optional<ObjectInfo> stat_at_once(std::string_view key) override;
  Result<std::vector<ObjectInfo>> list(std::string_view prefix, std::string_view snapshot) override;
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override;
  Result<std::unique_ptr<Transaction>> begin() override;
  using Store::remove;
  Future<void> snapshot(std::string_view name) override;
  Future<void> drop(std::string_view name, Durability durability) override;
  StoreInfo info() const override;

  // What a transaction does; `state` is its own. write.cc, read.cc, commit.cc
  Status resize(TransactionState& state, std::string_view key, uint64_t bytes,
                uint32_t chunk_bytes);
  Status remove(TransactionState& state, std::string_view key);
  Status require(TransactionState& state, std::string_view key, std::string_view tag);
  Status name(TransactionState& state, std::string_view snapshot);
  Future<void> write(const StatePtr& state, std::string_view key, uint64_t offset, Slice from,
                     Priority priority);
  // `state` null: the committed version.
  Future<void> start_read(StatePtr state, std::string_view key, uint64_t offset, Slice into,
                          const ReadOptions& options);
  Future<Version> commit(const StatePtr& state, Durability durability);
  void abandon(const StatePtr& state);

 private:
  static constexpr Features kFeatures{.atomic = AtomicUnit::transaction,
                                      .update = true,
                                      .snapshots = true,
                                      .conditional = true,
                                      .verified = true,
                                      .versions = true};
  using Jobs = std::vector<std::function<void()>>;

  // What commits add to the map.
  struct Growth {
    uint64_t image_bytes = 0;
    int64_t slots = 0;
    Growth& operator+=(const Growth& more) {
      image_bytes += more.image_bytes;
      slots += more.slots;
      return *this;
    }
  };

  LocalStore(std::unique_ptr<Loop> own_loop, const Runtime& runtime, VolumeSet volumes,
             std::unique_ptr<Map> map, Allocator allocator, Journal journal,
             const StoreOptions& options);

  // read.cc
  void try_read(std::unique_ptr<Transfer> transfer, StatePtr state, std::string snapshot,
                uint64_t offset, Slice into);
  Result<std::shared_ptr<StagedChunk>> gather(Transfer& transfer, const StatePtr& state,
                                              std::string_view snapshot, uint64_t offset,
                                              Slice into) REQUIRES(mutex_);
  Status prepare_read(Transfer& transfer);
  static void verify(Transfer& transfer, const Piece& piece, void* store);
  static void read_done(Transfer& transfer, void* store);
  Status read_chunk(std::string_view key, uint32_t index, const Chunk& chunk, Slice into);
  Error corrupt(std::string_view key, uint32_t index, const Chunk& chunk) const;
  void pin(const Transfer& transfer) REQUIRES(mutex_);
  void unpin(const Transfer& transfer);

  // write.cc
  Status check_writable(const TransactionState& state) const REQUIRES(mutex_);
  Result<StagedObject*> own(TransactionState& state, std::string_view key, bool must_exist)
      REQUIRES(mutex_);
  Result<StagedObject*> writable(TransactionState& state, std::string_view key, uint64_t offset,
                                 uint64_t bytes) REQUIRES(mutex_);
  struct Part {  // of a chunk
    uint32_t index, at;
    Slice from;
  };
  Result<std::vector<Part>> cut_up(Transfer& transfer, StagedObject& object, uint64_t offset,
                                   Slice from) REQUIRES(mutex_);
  void give_up_pieces(Transfer& transfer) REQUIRES(mutex_);
  Chunk base_chunk(const StagedObject& object, std::string_view key, uint32_t index) const
      REQUIRES(mutex_);
  Chunk visible_chunk(const StagedObject& object, std::string_view key, uint32_t index) const
      REQUIRES(mutex_);
  using ByVolume = std::array<uint64_t, kVolumesMax>;
  // `given`: bytes of the same write that go to each volume and are not under way yet; grows by
  // these.
  Result<Extent> allocate(StagedObject& object, uint64_t bytes, uint64_t ahead_bytes,
                          ByVolume& given) REQUIRES(mutex_);
  std::optional<size_t> pick_volume(uint64_t bytes, const ByVolume& given) const REQUIRES(mutex_);
  bool has_room(size_t volume, uint64_t bytes) const REQUIRES(mutex_) {
    return allocator_.largest_blocks(volume) * kBlock >= bytes;
  }
  uint64_t free_blocks(size_t volume) const REQUIRES(mutex_);
  void give_back_runs(TransactionState& state) REQUIRES(mutex_);
  void install(TransactionState& state, StagedObject& object, uint32_t index,
               std::shared_ptr<StagedChunk> node) REQUIRES(mutex_);
  void drop_staged(TransactionState& state, const std::shared_ptr<StagedChunk>& node)
      REQUIRES(mutex_);
  void drop_node(const std::shared_ptr<StagedChunk>& node) REQUIRES(mutex_);
  void drop_extent(const Extent& extent) REQUIRES(mutex_);
  void settle_node(StagedChunk& node, const Status& status, Jobs& run) REQUIRES(mutex_);
  static void write_done(Transfer& transfer, void* store);
  void start_write(std::unique_ptr<Transfer> transfer);
  void let_go(TransactionState& state, TransactionState::Phase phase) REQUIRES(mutex_);
  void write_settled(const StatePtr& state, const Status& status) REQUIRES(mutex_);

  // partial.cc
  Status write_partial(const StatePtr& state, StagedObject& object, std::string_view key,
                       uint32_t index, uint32_t at, Slice from, Promise<void>& promise)
      REQUIRES(mutex_);
  void seal(const StatePtr& state, const std::shared_ptr<StagedChunk>& node) REQUIRES(mutex_);
  void seal_some(const StatePtr& state) REQUIRES(mutex_);
  void schedule(const StatePtr& state, const std::shared_ptr<StagedChunk>& node) REQUIRES(mutex_);
  void work_on(const StatePtr& state, const std::shared_ptr<StagedChunk>& node);
  bool wait_for_base(const StatePtr& state, const std::shared_ptr<StagedChunk>& node);
  Status lay_over(StagedChunk& node);
  Status load_partial(Partial& partial);
  Status write_out(StagedChunk& node);
  void end_partial(const StatePtr& state, const std::shared_ptr<StagedChunk>& node,
                   const Status& status);

  // commit.cc
  Future<void> enqueue_named(CommitEntry::Kind kind, std::string_view name, Durability durability);
  void kick() REQUIRES(mutex_);
  void process();
  // Lets go of the mutex meanwhile.
  void process_here(MutexLock& lock) noexcept REQUIRES(mutex_) NO_THREAD_SAFETY_ANALYSIS;
  void start_processing() REQUIRES(mutex_);
  void stop_processing() REQUIRES(mutex_);
  void ended() REQUIRES(mutex_);  // one of in_flight_
  void run_group(CommitGroup group);
  Status encode(CommitEntry& entry, Version version) REQUIRES(mutex_);
  Status check_requirements(const TransactionState& state) const REQUIRES(mutex_);
  static Status check_name(std::string_view snapshot);
  Status put_name(ByteWriter& out, std::string_view name) const REQUIRES(mutex_);
  void encode_object(ByteWriter& out, const std::string& key, const StagedObject& object,
                     Version version) const REQUIRES(mutex_);
  Growth growth_of(const CommitEntry& entry) const REQUIRES(mutex_);
  Status check_room(const Growth& growth, std::string_view group, std::string_view entry) const
      REQUIRES(mutex_);
  void run_deferred(CommitGroup& group);
  void flip(CommitEntry& entry) REQUIRES(mutex_);
  void finish(CommitEntry& entry, const Status& status);
  void poison(const Error& error) REQUIRES(mutex_);
  void note_given_up(const Status& status) REQUIRES(mutex_);
  // Extents that nothing names any more, durably, counted in limbo_blocks_: free once nobody reads
  // them.
  void release(std::span<const Extent> extents) REQUIRES(mutex_);
  void give(const Extent& extent) REQUIRES(mutex_);
  // Lets go of the mutex meanwhile.
  bool make_room(MutexLock& lock) REQUIRES(mutex_) NO_THREAD_SAFETY_ANALYSIS;

  Status charge_map(uint64_t bytes) REQUIRES(mutex_);
  Error full(uint64_t bytes) const REQUIRES(mutex_);
  std::string composition() const;

  const std::unique_ptr<Loop> own_loop_;  // of drives that no Loop of the process's drives; or none
  const Runtime runtime_;
  VolumeSet volumes_;
  const bool read_only_option_;
  const uint32_t chunk_bytes_;
  std::vector<VolumeLoad> loads_;
  TransferPool transfers_;

  mutable Mutex mutex_;
  CondVar idle_;
  CondVar freed_;  // given_ has grown
  std::unique_ptr<Map> map_ GUARDED_BY(mutex_);
  Allocator allocator_ GUARDED_BY(mutex_);
  std::map<std::string, TransactionState*, std::less<>> owners_ GUARDED_BY(mutex_);
  std::set<TransactionState*> open_ GUARDED_BY(mutex_);
  // reads under way, by the place of what they read
  std::unordered_map<uint64_t, uint32_t> readers_ GUARDED_BY(mutex_);
  // to be free when nobody reads them any more, by place
  std::unordered_map<uint64_t, Extent> limbo_ GUARDED_BY(mutex_);
  uint64_t given_ GUARDED_BY(mutex_) = 0;         // extents that were freed
  uint64_t limbo_blocks_ GUARDED_BY(mutex_) = 0;  // in limbo_ and undurable_
  // freed by commits that are not durable yet
  std::vector<Extent> undurable_ GUARDED_BY(mutex_);
  size_t in_flight_ GUARDED_BY(mutex_) =
      0;  // transfers, merges and jobs: the destructor waits for them
  std::vector<Grant> map_grants_ GUARDED_BY(mutex_);
  uint64_t map_granted_ GUARDED_BY(mutex_) = 0;
  uint64_t map_charged_ GUARDED_BY(mutex_) = 0;
  std::optional<Error> poisoned_ GUARDED_BY(mutex_);
  Version next_version_ GUARDED_BY(mutex_) = 0;
  Version durable_ GUARDED_BY(mutex_) = 0;
  Committer committer_;

  Pool worker_{1};  // the last member: it ends before what its jobs use
};

class LocalTransaction final : public Transaction {
 public:
  LocalTransaction(LocalStore& store, StatePtr state) : store_(store), state_(std::move(state)) {}
  ~LocalTransaction() override { store_.abandon(state_); }
  Status resize(std::string_view key, uint64_t bytes, uint32_t chunk_bytes) override {
    return store_.resize(*state_, key, bytes, chunk_bytes);
  }
  Future<void> write(std::string_view key, uint64_t offset, Slice from,
                     Priority priority) override {
    return store_.write(state_, key, offset, from, priority);
  }
  Status remove(std::string_view key) override { return store_.remove(*state_, key); }
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override {
    return store_.start_read(state_, key, offset, into, options);
  }
  Status require(std::string_view key, std::string_view tag) override {
    return store_.require(*state_, key, tag);
  }
  Status name(std::string_view snapshot) override { return store_.name(*state_, snapshot); }
  Future<Version> commit(Durability durability) override {
    return store_.commit(state_, durability);
  }

 private:
  LocalStore& store_;
  const StatePtr state_;
};

}  // namespace stoker::local
