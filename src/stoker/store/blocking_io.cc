#include "stoker/store/blocking_io.h"

#include <chrono>
#include <thread>
#include <vector>

namespace stoker {

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
  std::lock_guard lock(self.mutex_);  // held while notifying: the waiter may destroy us as soon as it has the lock
  if (--self.left_ == 0) self.done_.notify_all();
}

Status IoBatch::run() {
  if (ops_.empty()) return {};
  std::vector<Op*> ops;
  for (Op& op : ops_) ops.push_back(&op);
  left_ = ops.size();
  for (;;) {
    Status queued = loop_.submit(ops);
    if (queued) break;
    if (queued.error().code != Code::busy) return queued;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the queue is full of others' work, which ends
  }
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return left_ == 0; });
  for (const Op& op : ops_) {
    if (!op.result) return op.result.error();
  }
  return {};
}

}  // namespace stoker
