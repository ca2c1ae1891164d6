// Memory of batches that nobody has any more, for the next ones: fresh memory is slow to touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "stoker/base/fork.h"
#include "stoker/base/mutex.h"
#include "stoker/memory/arena.h"
#include "stoker/store/blocking_io.h"

namespace stoker::data {

// Memory of a batch: a piece of an arena, or memory of its own.
class Slot {
 public:
  Slot() = default;
  explicit Slot(AlignedBytes own) : own_(std::move(own)) {}
  explicit Slot(Buffer of_arena) : of_arena_(new Buffer(std::move(of_arena))) {}

  Slice slice() const { return of_arena_ ? of_arena_->slice() : own_.slice(); }
  std::byte* data() const { return slice().data; }
  size_t size() const { return slice().size; }
  bool of_arena() const { return of_arena_ != nullptr; }
  // A disk that was given up may still write there (memory/lost.h).
  bool lost() const { return own_.lost(); }

 private:
  AlignedBytes own_;
  Unforked<Buffer> of_arena_;  // in a forked process the arena is not there
};

// Any thread.
class Spares {
 public:
  // most: pieces that are kept. arena: where memory is taken from as long as there is some; null:
  // none.
  explicit Spares(size_t most, std::shared_ptr<Arena> arena = nullptr)
      : arena_(std::move(arena)), most_(most) {}

  // At least so many bytes.
  Slot take(uint64_t bytes);
  void give_back(Slot memory);

 private:
  const std::shared_ptr<Arena> arena_;
  const size_t most_;
  Mutex mutex_;
  std::multimap<uint64_t, Slot> kept_ GUARDED_BY(mutex_);  // by bytes
};

}  // namespace stoker::data
