// MemoryStore: a Store in memory. The reference for what the others must do, and scratch space for
// those who want no disk.
//
// Nothing of it survives the process: deferred and durable commits are the same. Chunks are
// immutable and shared by the versions, snapshots and open transactions that see them; their bytes
// are drawn on the Budget.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "stoker/base/mutex.h"
#include "stoker/memory/budget.h"
#include "stoker/store/store.h"

namespace stoker {

struct MemoryStoreOptions {
  uint32_t chunk_bytes = 1 << 20;  // default of new objects
  uint64_t capacity_bytes = 0;     // out_of_space beyond it; 0 = only the budget bounds it
};

class MemoryStore final : public Store {
 public:
  // The budget must outlive the store.
  static Result<std::unique_ptr<MemoryStore>> make(Budget& budget, MemoryStoreOptions options = {});

  Features features() const override { return kFeatures; }
  bool wants_aligned() const override { return false; }
  Result<ObjectInfo> stat(std::string_view key, std::string_view snapshot = {}) override;
  std::optional<ObjectInfo> stat_at_once(std::string_view key) override;
  Result<std::vector<ObjectInfo>> list(std::string_view prefix,
                                       std::string_view snapshot = {}) override;
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options = {}) override;
  Result<std::unique_ptr<Transaction>> begin() override;
  Result<Version> copy(std::string_view from, std::string_view to) override;
  Future<void> snapshot(std::string_view name) override;
  Future<void> drop(std::string_view name, Durability durability) override;
  StoreInfo info() const override;

 private:
  static constexpr Features kFeatures{.atomic = AtomicUnit::transaction,
                                      .update = true,
                                      .snapshots = true,
                                      .conditional = true,
                                      .verified = true,
                                      .versions = true};
  class Chunk;
  class Staged;                                   // the Transaction
  using ChunkPtr = std::shared_ptr<const Chunk>;  // null reads as zeros

  struct Object {
    uint64_t bytes = 0;
    uint32_t chunk_bytes = 0;
    Version version = 0;
    std::vector<ChunkPtr> chunks;
  };
  using ObjectPtr = std::shared_ptr<const Object>;
  using Map = std::map<std::string, ObjectPtr, std::less<>>;
  struct Named {
    Version version = 0;
    Map map;
  };

  MemoryStore(Budget& budget, MemoryStoreOptions options) : budget_(budget), options_(options) {}
  Result<ObjectPtr> find(std::string_view key, std::string_view snapshot) const;
  // null if there is no such snapshot
  const Map* map_of(std::string_view snapshot) const REQUIRES(mutex_);
  static ObjectInfo describe(std::string_view key, const Object& object);
  static Status read_object(std::string_view key, const Object& object, uint64_t offset,
                            Slice into);

  Budget& budget_;
  const MemoryStoreOptions options_;
  std::atomic<uint64_t> used_bytes_{0};  // of all live chunks, whoever sees them
  mutable Mutex mutex_;
  Map current_ GUARDED_BY(mutex_);
  Version version_ GUARDED_BY(mutex_) = 0;
  std::map<std::string, Named, std::less<>> snapshots_ GUARDED_BY(mutex_);
  std::set<std::string, std::less<>> owned_ GUARDED_BY(mutex_);  // by open transactions
};

}  // namespace stoker
