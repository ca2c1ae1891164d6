// EarlyStripe: a stripe of which an open transaction has staged all, on its way to its slots before
// the commit. Nobody else reads these slots: the stripe is in no object yet. Once the blocks are
// there they need no memory: the transaction reads them from the disks. The commit then has its
// header pages to write, which tell the stamp, and the flush.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/base/pool.h"
#include "stoker/codec/erasure.h"
#include "stoker/memory/budget.h"
#include "stoker/store/coded/format/stripe.h"
#include "stoker/store/coded/read/reader.h"
#include "stoker/store/coded/shards/shard_transfers.h"
#include "stoker/store/coded/shards/spare_memory.h"

namespace stoker::coded {

// What they work with.
struct EarlyParts {
  CommittedMap& map;
  Shards& shards;
  Reader& reader;
  const codec::ErasureCode& code;
  Pool& pool;
  SpareMemory& spare;
};

// The k chunks of a stripe, and their share of the cap.
struct EarlyBlocks {
  std::vector<SparePiece> chunks;
  std::vector<Grant> grants;
};

// One thread at a time, beside the pool's, on which a large one is encoded. Its end waits for the
// transfers.
class EarlyStripe {
 public:
  // It is written to the shards that are live, and to the one that is joining. `parity` and
  // `headers` are the grants for what it needs beside the blocks.
  EarlyStripe(const EarlyParts& parts, StripePtr stripe, EarlyBlocks blocks, Grant parity,
              Grant headers);
  ~EarlyStripe();
  EarlyStripe(const EarlyStripe&) = delete;
  EarlyStripe& operator=(const EarlyStripe&) = delete;
  static uint64_t parity_bytes(const Shape& shape) { return shape.m * shape.chunk_bytes; }

  // In memory: blocks and parity.
  uint64_t held_bytes() const;
  // Whether the transfers have ended. Then the parity gives its memory back, and the blocks do if
  // they can be read from the disks.
  bool settle();
  // Waits for the transfers, and settles.
  void finish();
  // Once it is settled: the positions at which the blocks of the stripe are. A shard that was given
  // up since, and joined again, has them no more.
  uint32_t written() const;
  // What header pages say of its blocks, but for the stamp, if these positions are written.
  void tell(Headers& headers, uint32_t positions) const;

  // Blocks of one chunk.
  Status read(size_t chunk, size_t first, size_t count, std::byte* into, Priority priority);
  // Rows of all k chunks: chunk c goes to c * count * kBlock, and what is behind the last of the k
  // is overwritten. Whoever finds this memory lost() after it does it again.
  Status read_rows(size_t first, size_t count, std::span<std::byte> into, Priority priority);
  // The blocks, in memory, for a stripe that is staged again; of no use any more. `memory`: for
  // them, if they are not in memory.
  bool in_memory() const { return !blocks_.chunks.empty(); }
  Result<EarlyBlocks> take_back(Grant memory, Priority priority);

 private:
  void begin() noexcept;
  bool begun() const;
  void await_begun();
  void await_transfers();
  void write(uint32_t positions);
  void note_failed();
  Slice chunk(size_t c) const;
  const Headers& headers() const;
  Status read_wanted(RowsWanted& rows, const std::shared_ptr<const void>& memory,
                     Priority priority);

  const EarlyParts parts_;
  const Shape& shape_;
  const StripePtr stripe_;
  EarlyBlocks blocks_;
  Grant parity_grant_, headers_grant_;
  SparePiece parity_;
  Headers headers_;  // the stripe has them while the blocks are not in memory
  uint32_t to_write_ = 0, written_ = 0;
  std::vector<uint64_t> joinings_;             // of the shards, by position, when it was made
  bool settled_ = false;                       // the transfers have ended
  std::vector<size_t> position_of_;            // by transfer
  std::unique_ptr<ShardTransfers> transfers_;  // waits before the memory goes
  // Some thread encodes it, or has. Outlives us in the pool's queue.
  const std::shared_ptr<std::atomic<bool>> taken_ = std::make_shared<std::atomic<bool>>(false);
  mutable Mutex mutex_;
  CondVar changed_;
  bool begun_ GUARDED_BY(mutex_) = false;  // encoded: what stands above is the owner's again
};

}  // namespace stoker::coded
