// Transfer: the Ops of one read or write of a store. It also holds what to do with each chunk that
// a read has brought, and what to do when the last of them is done. Pooled: in the steady state a
// transfer allocates nothing.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "stoker/base/future.h"
#include "stoker/base/mutex.h"
#include "stoker/base/pool.h"
#include "stoker/io/loop.h"
#include "stoker/memory/budget.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/local/load.h"
#include "stoker/store/local/staged.h"

namespace stoker::local {

// One chunk of a transfer.
struct Piece {
  Chunk chunk;
  uint32_t index = 0;
  uint32_t from = 0, to = 0;  // what is wanted of the chunk
  Slice memory;               // the caller's
  // where in the transfer's scratch the chunk (or its last block) goes; SIZE_MAX: nowhere
  size_t scratch = SIZE_MAX;
  // the stored bytes go straight to `memory`, but for a last block that is not full
  bool direct = false;
  // ops that carry a part of it and have not succeeded yet: one, or two; counted down by several
  // threads
  uint8_t to_come = 0;
  std::shared_ptr<StagedChunk> node;  // of a write
};

struct Transfer {
  // shorter than of writes: what has come is verified while the rest is on its way
  static constexpr size_t kJoinRead = 1 * kMiB;
  static constexpr size_t kJoinWrite = 4 * kMiB;
  static constexpr size_t kScratchKept = 64 * kKiB;

  // Adds an op for (a part of) pieces[piece], or lengthens the last one where this one goes on on
  // disk and in memory.
  void add(Op::Kind kind, FileId file, size_t volume, uint64_t offset, Slice bytes, size_t piece);
  // Starts all ops. A read's go to `pool` one by one as they end: `arrived` runs there for each
  // piece whose bytes have all come, for several pieces at a time. `finish` runs once, when all
  // that is over and release() was called: for a read on the pool (if anything had to be moved),
  // for a write on whichever thread was last.
  void start(Loop& loop, std::span<VolumeLoad> loads, Pool& pool);
  void release();
  // `refused`, or the first op's error, naming the chunk.
  Status status() const;
  // From `arrived`: the piece is not what was written. first_bad(): the first such one, nullptr if
  // there is none.
  void bad(const Piece& piece);
  const Piece* first_bad() const;
  void clear();

  std::string key;
  Priority priority = Priority::demand;
  uint64_t deadline_ns = 0;
  std::vector<Piece> pieces;
  AlignedBytes scratch;
  Grant grant;  // for scratch
  Promise<void> promise;
  std::shared_ptr<TransactionState> transaction;  // of a write
  std::optional<Error> refused;                   // the Loop did not take it
  void (*arrived)(Transfer&, const Piece& piece, void* store) = nullptr;  // of a read
  void (*finish)(Transfer&, void* store) = nullptr;
  void* store = nullptr;

 private:
  static void op_done(Op& op) noexcept;
  struct Part : Op {
    size_t first = 0, last = 0;  // pieces, both included
    uint32_t volume = 0;
  };
  void came(const Part& part);
  std::vector<Part> parts_;
  std::vector<Op*> ops_;
  std::span<VolumeLoad> loads_;
  const Clock* clock_ = nullptr;
  Pool* pool_ = nullptr;
  std::atomic<size_t> left_{0};
  std::atomic<size_t> first_bad_{SIZE_MAX};
};

class TransferPool {
 public:
  std::unique_ptr<Transfer> take();
  void give(std::unique_ptr<Transfer> transfer);

 private:
  static constexpr size_t kKept = 64;
  Mutex mutex_;
  std::vector<std::unique_ptr<Transfer>> free_ GUARDED_BY(mutex_);
};

}  // namespace stoker::local
