// Transfers that the calling thread waits for: opening, the journal, merges. Never on a Loop's
// thread.
#pragma once

#include <cstdlib>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/base/mutex.h"
#include "stoker/io/loop.h"
#include "stoker/memory/lost.h"

namespace stoker {

// Memory that direct I/O takes as it is. Not drawn on a Budget: for what is small or lives shortly.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  explicit AlignedBytes(size_t bytes) : AlignedBytes(bytes, kIoAlign) {}
  // Large pieces lie in large pages, if the kernel has such, and all pages are there: a transfer
  // into others stops at each for the kernel to find it.
  static AlignedBytes faulted(size_t bytes);
  std::byte* data() const { return data_.get(); }
  // 0 once it was moved from.
  size_t size() const { return data_ ? data_.get_deleter().size : 0; }
  Slice slice() const { return {data_.get(), size(), kLosableHeap}; }
  std::span<std::byte> span() const { return {data_.get(), size()}; }
  // A transfer of some of it was given up (memory/lost.h): what it holds may change at any later
  // time.
  bool lost() const { return is_lost(data_.get(), size()); }

 private:
  struct Free {
    size_t size;
    Free() : size(0) {}
    explicit Free(size_t bytes) : size(bytes) {}
    void operator()(std::byte* data) const {
      if (!is_lost(data, size)) std::free(data);
    }
  };
  AlignedBytes(size_t bytes, size_t alignment);
  std::unique_ptr<std::byte, Free> data_;
};

// Ops that start together; run() returns when all are done, with the first error in order of
// addition. Use once.
class IoBatch {
 public:
  IoBatch(Loop& loop, Priority priority) : loop_(loop), priority_(priority) {}
  void read(FileId file, uint64_t offset, Slice into) { add(Op::Kind::read, file, offset, into); }
  void write(FileId file, uint64_t offset, Slice from) { add(Op::Kind::write, file, offset, from); }
  void sync(FileId file) { add(Op::Kind::sync, file, 0, {}); }
  void trim(FileId file, uint64_t offset, uint64_t bytes) {
    add(Op::Kind::trim, file, offset, Slice{nullptr, bytes});
  }
  bool empty() const { return ops_.empty(); }
  size_t size() const { return ops_.size(); }
  Status run();
  // What came of the op that was added as the index-th, after run().
  const Result<size_t>& result(size_t index) const { return ops_[index].result; }

 private:
  void add(Op::Kind kind, FileId file, uint64_t offset, Slice bytes);
  static void op_done(Op& op) noexcept;

  Loop& loop_;
  const Priority priority_;
  std::deque<Op> ops_;  // do not move
  Mutex mutex_;
  CondVar done_;
  size_t left_ GUARDED_BY(mutex_) = 0;
};

// Reads what can be read. A block of 4 KiB that cannot (an unreadable sector, or the file ends
// before it) becomes zeros. No checksum takes these for what was there. The offsets of such blocks
// are returned, in order. Errors: those that say nothing of a block, such as a disk that does not
// answer.
Result<std::vector<uint64_t>> read_what_can_be(Loop& loop, Priority priority, FileId file,
                                               uint64_t offset, Slice into);

}  // namespace stoker
