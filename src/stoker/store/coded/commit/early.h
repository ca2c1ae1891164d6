// EarlyStripe: a stripe of which an open transaction has staged all, on its way to its slots before
// the commit. Nobody reads these slots: the stripe is in no object yet. The commit then has its
// header pages to write, which tell the stamp, and the flush.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/base/pool.h"
#include "stoker/codec/erasure.h"
#include "stoker/memory/budget.h"
#include "stoker/store/coded/format/stripe.h"
#include "stoker/store/coded/shards/shard_transfers.h"
#include "stoker/store/coded/shards/spare_memory.h"

namespace stoker::coded {

// What they work with.
struct EarlyParts {
  Shards& shards;
  const codec::ErasureCode& code;
  Pool& pool;
  SpareMemory& spare;
};

// One thread at a time, beside the pool's, on which a large one is encoded. Its end waits for the
// transfers: the staged blocks outlive it.
class EarlyStripe {
 public:
  // `data`: the k chunks, as they are staged. `positions`: those that are written, of shards that
  // count in `epoch`. `grant` is for the parity.
  EarlyStripe(const EarlyParts& parts, StripePtr stripe, std::vector<Slice> data,
              uint32_t positions, uint64_t epoch, Grant grant);
  ~EarlyStripe();
  EarlyStripe(const EarlyStripe&) = delete;
  EarlyStripe& operator=(const EarlyStripe&) = delete;
  static uint64_t parity_bytes(const Shape& shape) { return shape.m * shape.chunk_bytes; }

  uint64_t held_bytes() const { return grant_.bytes(); }
  // Gives the parity's memory back if the transfers have ended.
  void settle();
  // Waits for the transfers. Whether it was encoded, all of them succeeded, and all positions are
  // right in `epoch`.
  bool written(uint64_t epoch);
  // chunk * rows + row: of the blocks that were written
  const std::vector<uint32_t>& crcs() const { return crcs_; }

 private:
  void begin(const codec::ErasureCode& code, std::vector<Slice> data, uint32_t positions) noexcept;
  bool begun() const;
  void await_begun();
  void note();

  const Shape& shape_;
  const StripePtr stripe_;
  const uint64_t epoch_;
  Grant grant_;
  SparePiece parity_;
  std::vector<uint32_t> crcs_;
  size_t left_ = 0;  // transfers that were not told
  bool failed_ = false;
  std::unique_ptr<ShardTransfers> transfers_;  // waits before the memory goes
  mutable Mutex mutex_;
  CondVar changed_;
  bool begun_ GUARDED_BY(mutex_) = false;  // encoded: what stands above is the owner's again
};

}  // namespace stoker::coded
