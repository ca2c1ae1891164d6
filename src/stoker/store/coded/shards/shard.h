// Shard: what holds the bytes of one shard of a coded store. Whoever reads or writes them does so
// through it. It moves bytes and makes them durable, and decides nothing: where they go is the
// caller's. FileShard (file_shard.h) is the one over a file or a device;
// testing/shard_conformance.h says what each has to do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "stoker/io/loop.h"
#include "stoker/store/coded/format/format.h"
#include "stoker/store/coded/format/log.h"

namespace stoker::coded {

// Both kinds of requests are owned by the caller, who leaves them and their bytes alone until they
// are done.
struct ShardRead {
  Priority priority = Priority::demand;
  uint64_t offset = 0;
  Slice into;
  // What the CRC32C of each of its blocks should be; none: nothing is compared.
  std::vector<uint32_t> crcs = {};
  Status status;  // ok: all of it came
  // By block, of what came: it is not what its CRC says. Empty: each is.
  std::vector<bool> wrong = {};
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
  Fence fence;  // of the writer
  // Each is durable before anything of the next one is written; an empty one makes durable what
  // was written before. The pieces of one wave land in any order.
  std::vector<Wave> waves;
  bool flush = false;  // the last wave is durable, too, when this is done
  // Of the first failure: nothing was begun after it. busy: the shard took no more; put it again,
  // and it goes on where it stopped. conflict: it is fenced by another writer, for good; this call
  // wrote nothing, one before it that ended with busy maybe did.
  Status status;
  size_t steps_done = 0;  // the shard's: where it goes on
  // Likewise; of a put that is refused maybe within the call.
  void (*done)(ShardPut&) noexcept = nullptr;
  void* context = nullptr;
};

// A segment of the log of one shard of a store. Generation counts below the floor do not count.
struct ShardSegment {
  const Shape& shape;
  const StoreId& store;
  size_t shard = 0, segment = 0;
  uint64_t floor = 0;
};

// What its intact frames say. The blocks in them stay where they are.
struct ShardScan {
  struct Frame {
    uint64_t at = 0;  // in the segment
    FrameContent content;
  };
  std::vector<Frame> frames;
  SegmentEnd end;
  // Blocks that cannot be read, by their offsets in the shard; they count as damaged.
  std::vector<uint64_t> unreadable;
  std::string why;        // of the first of them
  bool any_read = false;  // not all of them
};

// What went wrong with the requests of a shard, since whoever serves it began.
struct ShardHealth {
  uint64_t failed_reads = 0;
  uint64_t failed_puts = 0;   // not those that were busy, or of another fence
  uint64_t wrong_blocks = 0;  // that came, and were not what their CRC says
  std::string last;           // why the last one failed
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
  // The fence that is stored. Waits.
  virtual Result<Fence> fenced() = 0;
  // From the answer on it takes puts of this fence only, and has ended all that it took before.
  // Whoever starts it anew fences it again. Stored durably. conflict: a higher one is there, or
  // another writer's of the same number, and nothing changed. Waits.
  virtual Status fence(const Fence& fence) = 0;
  virtual void read(ShardRead& request, Plug& plug) = 0;
  // A flush covers all that this shard was done with when it began, whoever wrote it.
  virtual void put(ShardPut& request, Plug& plug) = 0;
  // Reads a segment of its log. Waits.
  virtual ShardScan scan(const ShardSegment& segment, Priority priority) = 0;
  // Asks no disk, and waits for nothing.
  virtual ShardHealth health() const = 0;
};

}  // namespace stoker::coded
