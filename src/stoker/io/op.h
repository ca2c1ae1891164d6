// Op: one transfer, owned by the caller, who must not move or touch it (or its bytes) between
// submit and done.
#pragma once

#include <cstdint>

#include "stoker/base/result.h"
#include "stoker/memory/slice.h"

namespace stoker {

using FileId = int32_t;  // of one Engine; -1 is none

// Classes in order of urgency. Each has a floor: none starves.
enum class Priority : uint8_t { demand, prefetch, write_back, checkpoint, scrub };
inline constexpr size_t kPriorities = 5;
// Nobody waits for it yet.
inline bool may_wait(Priority priority) {
  return priority == Priority::prefetch || priority == Priority::scrub;
}

struct Op {
  enum class Kind : uint8_t { read, write, sync, trim };

  Kind kind = Kind::read;
  Priority priority = Priority::demand;
  FileId file = -1;
  uint64_t offset = 0;  // bytes; a multiple of the file's alignment
  // size a multiple of the alignment; sync: empty; trim: only the size counts (its space may go
  // back
  Slice bytes;
  // to the file system: what must stay reserved is not trimmed)
  // on the Loop's clock; within a class earlier deadlines go first; 0 = none
  uint64_t deadline_ns = 0;

  // All bytes or an error: short transfers, EINTR and EAGAIN are continued below this line.
  Result<size_t> result{size_t{0}};
  // Called once, on the thread that polls the engine (the Loop's thread), never from within
  // submit(). Must not block, and may destroy or resubmit the Op.
  void (*done)(Op&) noexcept = nullptr;
  void* context = nullptr;  // the caller's

  // Scratch of the layer that holds the Op at the moment (Loop queue, then Engine).
  Op* next = nullptr;
  size_t moved = 0;
  uint64_t queued_ns = 0;
  // the Loop keeps the caller's done here while the Op is in its hands
  void (*hook)(Op&) noexcept = nullptr;
  void* holder = nullptr;
};

}  // namespace stoker
