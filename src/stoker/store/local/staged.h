// What an open transaction has staged. Everything here is guarded by the store's mutex unless it
// says otherwise.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stoker/base/future.h"
#include "stoker/memory/budget.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/condition.h"
#include "stoker/store/local/allocator.h"
#include "stoker/store/local/map.h"

namespace stoker::local {

struct StagedChunk;
struct TransactionState;

// A chunk of which only a part was written. Its old bytes are read and verified once, and the parts
// are laid over them in memory. It goes to disk when the transaction commits, is read there, or has
// too many of these open.
struct Partial {
  struct Patch {
    uint32_t at = 0;  // in the chunk
    Slice from;
    Promise<void> promise;
  };
  std::string key;
  uint32_t index = 0;
  std::vector<Patch> patches;  // not laid over yet
  bool sealed = false;         // takes no more patches: is being written
  bool scheduled = false;      // the worker has a job for it
  bool loaded = false;
  uint32_t bytes = 0;                      // of the chunk, from its start
  Chunk base;                              // the committed bytes under it, or
  std::shared_ptr<StagedChunk> base_node;  // the staged ones
  // Of the worker's thread alone.
  AlignedBytes buffer;
  Grant grant;
};

struct StagedChunk {
  enum class State : uint8_t { pending, done, failed };
  Chunk chunk;  // its CRC is known once done
  State state = State::pending;
  uint32_t limit = UINT32_MAX;  // bytes of it that still count after the object was cut
  // replaced or abandoned: its extent is free once nothing is in flight on it
  bool dropped = false;
  std::unique_ptr<Partial> partial;
  std::vector<std::function<void()>> waiters;  // run without the mutex when it is no longer pending
};

struct StagedObject {
  bool based = false;    // on the committed object of this key
  bool removed = false;  // will not exist
  uint64_t bytes = 0;
  uint32_t chunk_bytes = 0;
  uint64_t base_limit = 0;  // bytes of the committed object that still count
  std::map<uint32_t, std::shared_ptr<StagedChunk>> chunks;
  std::vector<Run> runs;  // by volume

  uint64_t chunk_at(uint32_t index) const { return static_cast<uint64_t>(index) * chunk_bytes; }
  uint32_t length_of(uint32_t index) const {
    return static_cast<uint32_t>(std::min<uint64_t>(chunk_bytes, bytes - chunk_at(index)));
  }
};

struct TransactionState : std::enable_shared_from_this<TransactionState> {
  enum class Phase : uint8_t { open, committing, committed, failed, abandoned };
  Phase phase = Phase::open;
  bool orphaned = false;  // its Transaction was destroyed while it committed
  std::map<std::string, StagedObject, std::less<>> objects;
  std::deque<std::shared_ptr<StagedChunk>> partials;  // open ones, oldest first
  size_t pending = 0;                                 // writes in flight
  uint64_t touched = 0;                               // volumes written to, one bit each
  std::optional<Error> error;                         // the first write that failed
  Requirements required;                              // looked at when it commits
  std::string name;  // of the version that it makes; empty: it gets none
};

}  // namespace stoker::local
