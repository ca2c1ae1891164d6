// What an open transaction of a coded store has written and not committed: blocks in memory, and
// the stripes reserved for them.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/memory/budget.h"
#include "stoker/store/coded/commit/early.h"
#include "stoker/store/coded/format/table.h"
#include "stoker/store/coded/shards/spare_memory.h"
#include "stoker/store/condition.h"

namespace stoker::coded {

struct StagedChunk {
  SparePiece bytes;        // of the whole chunk; only what is staged is touched
  std::vector<bool> rows;  // staged
};

struct StagedStripe {
  StripePtr base;   // that it changes; null: none, all else is zeros
  StripePtr fresh;  // that takes its place; null: the changes go to the log
  std::map<size_t, StagedChunk> chunks;
  std::vector<Grant> grants = {};  // for the blocks
  size_t blocks = 0;               // staged
  // Of a fresh one of which all is staged: it has the chunks.
  std::shared_ptr<EarlyStripe> early = {};
  bool early_begun = false;
  bool stands = false;  // the commit has written it all: it is read like what is committed

  bool has(size_t position, size_t row) const {
    if (early) return true;
    const auto chunk = chunks.find(position);
    return chunk != chunks.end() && chunk->second.rows[row];
  }
};

struct StagedObject {
  ObjectPtr base;       // as committed; null: there is none
  bool exists = false;  // in the transaction
  bool made = false;    // anew, whatever there was
  uint64_t bytes = 0;
  uint64_t announced = 0;  // where it was made here: its first size
  uint64_t kept = 0;       // of the base's bytes: it was cut to this and perhaps grew again
  uint32_t chunk_bytes = 0;
  Class expected = Class::read_write;
  bool stated = false;  // in this transaction
  // offset and size, as they came: the first kWritesMax, one behind the other as one
  std::vector<std::pair<uint64_t, size_t>> writes;
  static constexpr size_t kWritesMax = 4096;  // classes are told by fewer
  std::map<size_t, StagedStripe> stripes;     // by index

  void wrote(uint64_t offset, size_t size) {
    if (size == 0 || (!writes.empty() && writes.back() == std::pair(offset, size))) return;
    if (!writes.empty() && writes.back().first + writes.back().second == offset) {
      writes.back().second += size;
    } else if (writes.size() < kWritesMax) {
      writes.emplace_back(offset, size);
    }
  }
  StripePtr base_stripe(size_t index, size_t stripe_bytes) const {
    return base && !made && index * stripe_bytes < kept && index < base->stripes.size()
               ? base->stripes[index]
               : nullptr;
  }
};

// Outlives its transaction while the commit is under way.
struct TransactionState {
  // Guards what follows until `done`; then it is the commit's. Taken before the store's.
  Mutex mutex;
  std::map<std::string, StagedObject, std::less<>> objects;
  std::optional<Error> failed;  // of the first write that failed
  Requirements required;        // looked at when it commits
  bool done = false;            // committed or refused
  uint64_t log_bytes = 0;       // staged for the log
  // On their way, the oldest first: they have memory to give back.
  std::deque<std::shared_ptr<EarlyStripe>> under_way;
};

}  // namespace stoker::coded
