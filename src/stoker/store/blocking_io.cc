#include "stoker/store/blocking_io.h"

#include <sys/mman.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

namespace stoker {
namespace {

constexpr size_t kLargePage = 2 * kMiB;

}  // namespace

AlignedBytes::AlignedBytes(size_t bytes, size_t alignment)
    : data_(static_cast<std::byte*>(std::aligned_alloc(alignment, align_up(bytes, alignment))),
            Free{align_up(bytes, alignment)}) {
  STOKER_CHECK(data_ != nullptr || bytes == 0);
}

AlignedBytes AlignedBytes::faulted(size_t bytes) {
  // What is much smaller than large pages would waste most of one.
  AlignedBytes memory(bytes, bytes >= kLargePage ? kLargePage : kIoAlign);
  if (memory.size() == 0) return memory;
  // Advice: where it is not taken, pages come one by one as they are touched. What the heap has
  // used before is there in small pages: these go first.
  if (bytes >= kLargePage) {
    (void)madvise(memory.data(), memory.size(), MADV_DONTNEED);
    (void)madvise(memory.data(), memory.size(), MADV_HUGEPAGE);
  }
#ifdef MADV_POPULATE_WRITE
  (void)madvise(memory.data(), memory.size(), MADV_POPULATE_WRITE);
#endif
  return memory;
}

void IoBatch::add(Op::Kind kind, FileId file, uint64_t offset, Slice bytes) {
  Op& op = ops_.emplace_back();
  op.kind = kind;
  op.priority = priority_;
  op.file = file;
  op.offset = offset;
  op.bytes = bytes;
  op.done = &IoBatch::op_done;
  op.context = this;
}

void IoBatch::op_done(Op& op) noexcept {
  auto& self = *static_cast<IoBatch*>(op.context);
  // held while notifying: the waiter may destroy us as soon as it has the lock
  MutexLock lock(self.mutex_);
  if (--self.left_ == 0) self.done_.notify_all();
}

Status IoBatch::run() {
  if (ops_.empty()) return {};
  std::vector<Op*> ops;
  for (Op& op : ops_) ops.push_back(&op);
  {
    MutexLock lock(mutex_);
    left_ = ops.size();
  }
  for (;;) {
    Status queued = loop_.submit(ops);
    if (queued) break;
    if (queued.error().code != Code::busy) return queued;
    // the queue is full of others' work, which ends
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  MutexLock lock(mutex_);
  done_.wait(lock, [this]() REQUIRES(mutex_) { return left_ == 0; });
  for (const Op& op : ops_) {
    if (!op.result) return op.result.error();
  }
  return {};
}

Result<std::vector<uint64_t>> read_what_can_be(Loop& loop, Priority priority, FileId file,
                                               uint64_t offset, Slice into) {
  const auto is_of_the_block = [](const Error& error) {
    return error.code == Code::io && error.sys_errno != ETIMEDOUT;
  };
  std::vector<uint64_t> unreadable;
  {
    IoBatch whole(loop, priority);
    whole.read(file, offset, into);
    const Status status = whole.run();
    if (status) return unreadable;
    if (!is_of_the_block(status.error())) return status.error();
  }
  IoBatch blocks(loop, priority);
  for (size_t at = 0; at < into.size; at += kIoAlign) {
    blocks.read(file, offset + at, into.sub(at, kIoAlign));
  }
  if (const Status status = blocks.run(); !status && !is_of_the_block(status.error()))
    return status.error();
  for (size_t block = 0; block < blocks.size(); ++block) {
    const Result<size_t>& result = blocks.result(block);
    if (result) continue;
    if (!is_of_the_block(result.error())) return result.error();
    std::memset(into.data + block * kIoAlign, 0, kIoAlign);
    unreadable.push_back(offset + block * kIoAlign);
  }
  return unreadable;
}

}  // namespace stoker
