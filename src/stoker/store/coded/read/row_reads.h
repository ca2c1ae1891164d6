// RowReads: bases of rows on their way from the shards, and what is lost of them decoded.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "stoker/codec/erasure.h"
#include "stoker/store/coded/format/rows.h"
#include "stoker/store/coded/shards/shard_transfers.h"

namespace stoker::coded {

// One thread, its owner's. Use once.
class RowReads {
 public:
  // Begins to read what is wanted of all of them, from these shards. Each gets its own answer from
  // finish(). Until then all that `all` names stays as it is. `memory`: what all their blocks lie
  // in. Where something has to be decoded one chunk more than it takes is then read, if a shard has
  // it, and what comes first counts: the last read is left behind, and keeps `memory`, which nobody
  // writes to any more but for the blocks that were wanted. None: what is needed is read, and all
  // of it waited for; for blocks that are worked on in place.
  RowReads(Shards& shards, ShardSet live, std::span<RowsWanted> all,
           std::shared_ptr<const void> memory, Priority priority);
  RowReads(const RowReads&) = delete;
  RowReads& operator=(const RowReads&) = delete;

  // How many blocks were decoded.
  uint64_t finish(const codec::ErasureCode& code);

 private:
  // The transfers of one chunk, of those of a batch.
  struct ChunkRead {
    size_t set, chunk, left;
    bool ok = true;
  };
  void begin();
  void take();
  size_t add(const RowsWanted& rows, size_t c, std::byte* into);

  Shards& shards_;
  const Shape& shape_;
  const std::span<RowsWanted> all_;
  const std::shared_ptr<const void> memory_;
  const Priority priority_;
  std::vector<RowSet> sets_;
  std::vector<ChunkRead> reads_;
  std::vector<size_t> read_of_;          // by transfer
  std::optional<ShardTransfers> batch_;  // that is under way; none: there is nothing more to read
};

}  // namespace stoker::coded
