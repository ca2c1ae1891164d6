#include "stoker/io/posix/engine.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <system_error>

#include "stoker/io/thread.h"
#include "stoker/io/transfer.h"

namespace stoker {
namespace {

// One system call for what is left of the op: bytes moved, or -errno.
int64_t call(const Op& op, int fd) {
  std::byte* data = op.bytes.data + op.moved;
  const size_t bytes = op.bytes.size - op.moved;
  const auto at = static_cast<off_t>(op.offset + op.moved);
  int64_t result = 0;
  switch (op.kind) {
    case Op::Kind::read:
      result = pread(fd, data, bytes, at);
      break;
    case Op::Kind::write:
      result = pwrite(fd, data, bytes, at);
      break;
    case Op::Kind::sync:
      result = fdatasync(fd);
      break;
    case Op::Kind::trim:
      result =
          fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, static_cast<off_t>(bytes));
      break;
  }
  return result < 0 ? -errno : result;
}

}  // namespace

Result<std::unique_ptr<PosixEngine>> PosixEngine::make(uint32_t depth,
                                                       std::unique_ptr<Carrier> carrier) {
  if (depth == 0) return fail(Code::invalid_argument, "an engine needs a depth of at least 1");
  auto engine = std::unique_ptr<PosixEngine>(new PosixEngine(depth, std::move(carrier)));
  STOKER_TRY(engine->add_thread());
  return engine;
}

Status PosixEngine::add_thread() {
  try {
    threads_.push_back(start_io_thread("stoker-posix", [this] { work(); }));
  } catch (const std::system_error& error) {
    return fail(error.code().value(),
                "cannot start a thread for disk I/O; raise the limit of processes (ulimit -u)");
  }
  return {};
}

PosixEngine::~PosixEngine() {
  STOKER_CHECK(in_flight_ == 0);
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

Status PosixEngine::close(FileId file) {
  if (carrier_) carrier_->closing(file);
  return files_.close(file);
}

size_t PosixEngine::submit(std::span<Op* const> ops) {
  const size_t taken = std::min<size_t>(ops.size(), depth_ - in_flight_);
  if (taken == 0) return 0;
  size_t started = 0;
  {
    MutexLock lock(mutex_);
    for (Op* op : ops.first(taken)) {
      const bool good = startable(*op, files_.find(op->file));
      (good ? queued_ : done_).push(*op);
      started += good ? 1 : 0;
    }
    working_ += static_cast<uint32_t>(started);
    while (threads_.size() < working_) {
      if (!add_thread()) break;  // the machine has no more: those that are there do it
    }
  }
  in_flight_ += static_cast<uint32_t>(taken);
  counters_.submissions.add(1);
  if (started == 1) {
    work_.notify_one();
  } else if (started > 1) {
    work_.notify_all();
  }
  return taken;
}

size_t PosixEngine::poll(uint64_t wait_ns) {
  OpList done;
  {
    MutexLock lock(mutex_);
    const auto ready = [this]() REQUIRES(mutex_) { return !done_.empty() || woken_; };
    if (wait_ns == UINT64_MAX) {
      progress_.wait(lock, ready);
    } else if (wait_ns != 0) {
      progress_.wait_for(
          lock, std::chrono::nanoseconds(std::min<uint64_t>(wait_ns, 3'600'000'000'000)), ready);
    }
    woken_ = false;
    done = std::exchange(done_, {});
  }
  size_t completed = 0;
  while (Op* op = done.pop()) {
    --in_flight_;
    ++completed;
    op->done(*op);
  }
  return completed;
}

void PosixEngine::wake() {
  {
    MutexLock lock(mutex_);
    woken_ = true;
  }
  progress_.notify_one();
}

void PosixEngine::work() {
  MutexLock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this]() REQUIRES(mutex_) { return stopping_ || !queued_.empty(); });
    Op* op = queued_.pop();
    if (op == nullptr) return;
    lock.unlock();
    carry(*op);
    lock.lock();
    --working_;
    const bool first = done_.empty();
    done_.push(*op);
    if (first) progress_.notify_one();
  }
}

// Runs on one of the threads; nobody else touches the op meanwhile.
void PosixEngine::carry(Op& op) {
  const FileTable::File& file = *files_.find(op.file);
  const bool carries =
      carrier_ != nullptr && (op.kind == Op::Kind::read || op.kind == Op::Kind::write);
  for (;;) {
    std::optional<int64_t> outcome;
    if (carries) outcome = carrier_->carry(op, file);
    if (!outcome) outcome = call(op, file.fd);
    if (advance(op, *outcome, file.path, counters_)) return;
  }
}

}  // namespace stoker
