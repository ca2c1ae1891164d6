// Session: offloaded training's door to a store. Blocks are declared once; then each step fetches
// weights, updates blocks and asks about gradients. Any thread except pool and Store threads.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/memory/arena.h"
#include "stoker/offload/updater.h"
#include "stoker/store/open.h"

namespace stoker::offload {

using BlockId = uint32_t;

struct SessionOptions {
  uint32_t tiles = 4;                  // tile memories: the tiles in flight at most
  uint32_t tile_elements = 512 << 10;  // a power of two from 32 Ki (8-bit moments: 128 Ki) to 2 Mi
  optim::MomentType moments = optim::MomentType::f32;  // how m and v of every block are kept
  uint64_t seed = 0;                                   // of the draws that round them
};

class Session {
 public:
  // Takes the tile memories (tile_memory_bytes each) from the arena at once: over_budget if they do
  // not fit. Store, runtime and arena must outlive the session.
  static Result<std::unique_ptr<Session>> make(Store& store, const Runtime& runtime, Arena& arena,
                                               SessionOptions options = {});
  ~Session();  // waits for everything in flight; a transaction it may still hold is abandoned then
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  Result<BlockId> add_block(BlockSpec spec);
  // invalid_argument for an id never given out
  Result<const BlockLayout*> layout(BlockId block) const;

  // The whole weight plane straight into `into` (plane_bytes), from the committed version or a
  // transaction.
  Future<void> fetch_weights(BlockId block, Slice into, Priority priority,
                             StepTransaction* source = nullptr);
  Future<void> store_weights(BlockId block, Slice from, StepTransaction& transaction);

  // Errors before anything began are returned; those on the way complete the job and poison the
  // transaction.
  Result<std::shared_ptr<UpdateJob>> update(BlockId block, UpdateRequest request);
  // Reads state ahead of update(), as far as tile memory is free; how many tiles began at once.
  Result<size_t> prefetch_state(BlockId block,
                                const std::shared_ptr<StepTransaction>& source = nullptr,
                                bool weights = false);
  void drop_prefetched() { updater_->drop_prefetched(); }
  // Lets state that is read ahead live in arena memory that is idle for now, a gradient's say; see
  // Updater.
  size_t lend(const Slice& region) { return updater_->lend(region); }
  void recall(const Slice& region) { updater_->recall(region); }

  // Keeps the block's state in the arena from its next update on; that saves reads, never writes.
  // busy while it is updated.
  Status retain(BlockId block);
  Status release(BlockId block);
  // The state held for the block is not that of the store any more. (Abandoned steps are noticed
  // without this.)
  Status invalidate(BlockId block);
  uint64_t retained_bytes() const;

  Pool& pool() const { return pool_; }
  Traffic& traffic() { return traffic_; }

 private:
  Session(Store& store, const Runtime& runtime, Arena& arena, SessionOptions options)
      : store_(store), pool_(runtime.pool), arena_(arena), options_(options) {
    traffic_.trace = runtime.trace;
  }
  Result<Block*> find(BlockId block) const;
  Status check(const BlockLayout& layout, const UpdateRequest& request) const;
  void begin_transfer();
  void end_transfer();

  Store& store_;
  Pool& pool_;
  Arena& arena_;
  const SessionOptions options_;
  Traffic traffic_;
  mutable Mutex mutex_;
  // The Blocks themselves are guarded by the Updater.
  std::vector<std::unique_ptr<Block>> blocks_ GUARDED_BY(mutex_);
  uint64_t retained_bytes_ GUARDED_BY(mutex_) = 0;
  size_t transfers_ GUARDED_BY(mutex_) = 0;  // weight transfers in flight
  CondVar idle_;                             // transfers_ became 0
  std::unique_ptr<Updater> updater_;         // its end waits: after everything it touches
};

}  // namespace stoker::offload
