// Shard: what holds the bytes of one shard of a coded store. Whoever reads or writes them does so
// through it. It moves bytes and makes them durable, and decides nothing: where they go is the
// caller's. FileShard (file_shard.h) is the one over a file or a device;
// testing/shard_conformance.h says what each has to do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "stoker/io/loop.h"

namespace stoker::coded {

// Both kinds of requests are owned by the caller, who leaves them and their bytes alone until they
// are done.
struct ShardRead {
  Priority priority = Priority::demand;
  uint64_t offset = 0;
  Slice into;
  Status status;  // ok: all of it came
  // Once, on a thread of the shard's: it must not block, and may destroy the request.
  void (*done)(ShardRead&) noexcept = nullptr;
  void* context = nullptr;  // the caller's
};

struct ShardPut {
  struct Piece {
    uint64_t offset = 0;
    Slice from;
  };
  using Wave = std::vector<Piece>;

  Priority priority = Priority::demand;
  // Each is durable before anything of the next one is written; an empty one makes durable what
  // was written before. The pieces of one wave land in any order.
  std::vector<Wave> waves;
  bool flush = false;  // the last wave is durable, too, when this is done
  // Of the first failure: nothing was begun after it. busy: the shard took no more; put it again.
  Status status;
  void (*done)(ShardPut&) noexcept = nullptr;
  void* context = nullptr;
};

// Holds back what requests have ready, so that those to several shards begin at once.
class Plug {
 public:
  explicit Plug(Loop& loop) : loop_(loop) {}
  ~Plug() { release(); }
  Plug(const Plug&) = delete;
  Plug& operator=(const Plug&) = delete;

  void hold(Op& op) { ops_.push_back(&op); }
  // Waits while the Loop's queue is full. Never on the Loop's thread.
  void release();

 private:
  Loop& loop_;
  std::vector<Op*> ops_;
};

// Any thread. It outlives its requests.
class Shard {
 public:
  virtual ~Shard() = default;
  virtual void read(ShardRead& request, Plug& plug) = 0;
  // A flush covers all that this shard was done with when it began, whoever wrote it.
  virtual void put(ShardPut& request, Plug& plug) = 0;
};

}  // namespace stoker::coded
