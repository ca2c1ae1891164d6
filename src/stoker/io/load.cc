#include "stoker/io/load.h"
#include "stoker/base/mutex.h"

#include <optional>
#include <vector>

namespace stoker {
namespace {

// One run. After start() everything but the waiting happens on the Loop's thread, in done(): each
// completion starts the next.
class Run {
 public:
  Run(Loop& loop, FileId file, const Slice& memory, const Load& load)
      : loop_(loop), file_(file), memory_(memory), load_(load), ops_(load.depth) {}

  Result<LoadResult> go() {
    std::vector<Op*> first;
    MutexLock lock(mutex_);
    started_ns_ = loop_.clock().now_ns();
    for (size_t i = 0; i < ops_.size() && more(); ++i) {
      ops_[i].bytes = memory_.sub(i * load_.block_bytes, load_.block_bytes);
      prepare(ops_[i]);
      first.push_back(&ops_[i]);
    }
    active_ = first.size();
    lock.unlock();
    STOKER_TRY(loop_.submit(first));
    lock.lock();
    finished_.wait(lock, [this]() REQUIRES(mutex_) { return active_ == 0; });
    if (error_) return *error_;
    return result_;
  }

 private:
  uint64_t blocks() const { return load_.file_bytes / load_.block_bytes; }
  bool more() const REQUIRES(mutex_) {
    if (error_) return false;
    return load_.limit_ns == 0 ? started_ < blocks()
                               : loop_.clock().now_ns() - started_ns_ < load_.limit_ns;
  }

  void prepare(Op& op) REQUIRES(mutex_) {
    const bool writes =
        load_.kind == Load::Kind::write || (load_.kind == Load::Kind::mixed && started_ % 2 == 1);
    op.kind = writes ? Op::Kind::write : Op::Kind::read;
    op.priority = Priority::prefetch;
    op.file = file_;
    op.offset = load_.offset + started_ % blocks() * load_.block_bytes;
    op.context = this;
    op.done = [](Op& done) noexcept { static_cast<Run*>(done.context)->completed(done); };
    ++started_;
  }

  void completed(Op& op) {
    MutexLock lock(mutex_);
    if (!op.result) {
      if (!error_) error_ = op.result.error();
    } else {
      (op.kind == Op::Kind::write ? result_.written_bytes : result_.read_bytes) += *op.result;
      ++result_.operations;
    }
    if (more()) {
      prepare(op);
      Status next = loop_.submit(op);
      if (next) return;
      if (!error_) error_ = next.error();
    }
    if (--active_ > 0) return;
    result_.ns = loop_.clock().now_ns() - started_ns_;
    finished_.notify_all();  // under the lock: this object may be gone right after
  }

  Loop& loop_;
  const FileId file_;
  const Slice memory_;
  const Load load_;
  std::vector<Op> ops_;
  Mutex mutex_;
  CondVar finished_;
  uint64_t started_ns_ GUARDED_BY(mutex_) = 0;
  uint64_t started_ GUARDED_BY(mutex_) = 0;
  size_t active_ GUARDED_BY(mutex_) = 0;
  std::optional<Error> error_ GUARDED_BY(mutex_);
  LoadResult result_ GUARDED_BY(mutex_);
};

}  // namespace

std::string_view name(Load::Kind kind) {
  switch (kind) {
    case Load::Kind::read:
      return "read";
    case Load::Kind::write:
      return "write";
    case Load::Kind::mixed:
      return "mixed";
  }
  return "";
}

Result<LoadResult> run_load(Loop& loop, FileId file, const Slice& memory, const Load& load) {
  if (load.depth == 0 || load.block_bytes == 0 || load.file_bytes < load.block_bytes)
    return fail(Code::invalid_argument,
                "a load needs a depth, a block size and a file of at least one block");
  if (memory.size / load.block_bytes < load.depth)
    return fail(Code::invalid_argument, "{} bytes of memory hold fewer than {} blocks of {} bytes",
                memory.size, load.depth, load.block_bytes);
  return Run(loop, file, memory, load).go();
}

}  // namespace stoker
