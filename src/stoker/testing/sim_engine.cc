#include "stoker/testing/sim_engine.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/io/transfer.h"

namespace stoker {

Result<std::unique_ptr<Engine>> SimEngine::make(std::shared_ptr<SimDisk> disk, uint32_t depth,
                                                const SimDevice& device) {
  if (depth == 0) return fail(Code::invalid_argument, "an engine needs a depth of at least 1");
  return std::unique_ptr<Engine>(new SimEngine(std::move(disk), depth, device));
}

SimEngine::~SimEngine() { STOKER_CHECK(flights_.empty() && held_.empty()); }

Result<FileInfo> SimEngine::open(const OpenFile& file) {
  if (file.create && !file.write)
    return fail(Code::invalid_argument, "'{}' cannot be made without writing", file.path);
  std::scoped_lock lock(mutex_, disk_->mutex_);
  const auto there = disk_->disks_.find(file.path);
  if (there == disk_->disks_.end() && !file.create)
    return fail(Code::not_found, "there is no simulated disk '{}'", file.path);
  if (there == disk_->disks_.end() || (file.create && there->second.now.bytes() == 0))
    STOKER_TRY(disk_->make(file.path, file.reserve_bytes));
  size_t id = 0;
  while (id < files_.size() && files_[id].open) ++id;
  if (id == files_.size()) files_.emplace_back();
  files_[id] = {file.path, file.write, true};
  FileInfo info;
  info.id = static_cast<FileId>(id);
  info.bytes = disk_->disks_.at(file.path).now.bytes();
  return info;
}

Status SimEngine::close(FileId file) {
  MutexLock lock(mutex_);
  if (file < 0 || static_cast<size_t>(file) >= files_.size() ||
      !files_[static_cast<size_t>(file)].open) {
    return fail(Code::invalid_argument, "file {} is not open", file);
  }
  files_[static_cast<size_t>(file)].open = false;
  return {};
}

// Transfers of one direction share the device's bandwidth; latencies overlap.
// With the disk's mutex.
uint64_t SimEngine::due(const Op& op, const std::string& path) {
  uint64_t ready = clock_.now_ns();
  const bool reads = op.kind == Op::Kind::read;
  const uint64_t rate = reads ? device_.read_bytes_per_s : device_.write_bytes_per_s;
  if (rate != 0 && (reads || op.kind == Op::Kind::write)) {
    uint64_t& free_ns = reads ? read_free_ns_ : write_free_ns_;
    free_ns = std::max(free_ns, ready) + (op.bytes.size - op.moved) * 1'000'000'000 / rate;
    ready = free_ns;
  }
  const auto disk = disk_->disks_.find(path);
  if (const uint64_t throttle = disk == disk_->disks_.end() ? 0 : disk->second.bytes_per_s;
      throttle != 0) {
    uint64_t& free_ns = throttled_free_ns_[path];
    free_ns =
        std::max(free_ns, clock_.now_ns()) + (op.bytes.size - op.moved) * 1'000'000'000 / throttle;
    ready = std::max(ready, free_ns);
  }
  return ready + device_.latency_ns + (device_.jitter_ns != 0 ? random_() % device_.jitter_ns : 0);
}

// False: the op cannot be started, and its result says why.
bool SimEngine::start(Flight& flight) {
  Op& op = *flight.op;
  File file;
  {
    MutexLock lock(mutex_);
    if (op.file >= 0 && static_cast<size_t>(op.file) < files_.size())
      file = files_[static_cast<size_t>(op.file)];
  }
  if (!file.open) {
    op.result = fail(Code::invalid_argument, "file {} is not open", op.file);
    return false;
  }
  if (const Status fits = check_op(op, kIoAlign, file.path); !fits) {
    op.result = fits.error();
    return false;
  }
  if (!file.write && (op.kind == Op::Kind::write || op.kind == Op::Kind::trim)) {
    op.result = fail(Code::read_only, "'{}' was opened read-only", file.path);
    return false;
  }
  flight.path = std::move(file.path);
  return true;
}

void SimEngine::launch(Op& op) {
  auto flight = std::make_unique<Flight>();
  flight->op = &op;
  flight->order = ++orders_;
  flight->due_ns = clock_.now_ns();
  if (!start(*flight)) {
    flights_.push(std::move(flight));
    return;
  }
  std::scoped_lock lock(disk_->gate_, disk_->mutex_);
  const auto held = disk_->held_.find(flight->path);
  if (held != disk_->held_.end() && (held->second.all || op.kind == Op::Kind::read)) {
    ++held->second.waiting;
    held_.push_back(std::move(flight));
  } else {
    put_in_flight(std::move(flight));
  }
}

void SimEngine::put_in_flight(std::unique_ptr<Flight> flight) {
  const auto slow = disk_->slow_ns_.find(flight->path);
  flight->due_ns =
      due(*flight->op, flight->path) + (slow == disk_->slow_ns_.end() ? 0 : slow->second);
  flight->plan = disk_->start(*flight->op, flight->path);
  flights_.push(std::move(flight));
}

void SimEngine::start_let_go() {
  if (held_.empty()) return;
  std::scoped_lock lock(disk_->gate_, disk_->mutex_);
  const auto waits = [&](const std::unique_ptr<Flight>& flight) {
    return disk_->held_.contains(flight->path);
  };
  const auto first = std::stable_partition(held_.begin(), held_.end(), waits);
  for (auto at = first; at != held_.end(); ++at) put_in_flight(std::move(*at));
  held_.erase(first, held_.end());
}

size_t SimEngine::submit(std::span<Op* const> ops) {
  const size_t taken = std::min<size_t>(ops.size(), depth_ - flights_.size() - held_.size());
  for (Op* op : ops.first(taken)) launch(*op);
  if (taken > 0) counters_.submissions.add(1);
  return taken;
}

size_t SimEngine::poll(uint64_t wait_ns) {
  start_let_go();
  {
    MutexLock lock(mutex_);
    if (flights_.empty() && wait_ns > 0) {
      // UINT64_MAX nanoseconds would overflow the clock; an hour is forever here, and the caller
      // polls again. A disk that lets go wakes nobody.
      const auto limit = std::chrono::nanoseconds(
          std::min<uint64_t>(wait_ns, held_.empty() ? 3'600'000'000'000 : 1'000'000));
      wake_.wait_for(lock, limit, [this] { return woken_; });
    }
    woken_ = false;
  }
  if (flights_.empty()) return 0;
  // One completion a call, so that what its done() submits competes with the rest; continued
  // transfers go back into flight.
  size_t completed = 0;
  while (completed == 0 && !flights_.empty()) {
    clock_.advance_to(std::max(clock_.now_ns(), flights_.top()->due_ns));
    auto flight = std::move(const_cast<std::unique_ptr<Flight>&>(flights_.top()));
    flights_.pop();
    Op& op = *flight->op;
    if (!flight->path.empty()) {
      int64_t outcome = 0;
      {
        MutexLock lock(disk_->mutex_);
        outcome = disk_->finish(op, flight->path, flight->plan);
      }
      if (!advance(op, outcome, flight->path, counters_)) {
        MutexLock lock(disk_->mutex_);
        flight->due_ns = due(op, flight->path);
        flight->plan = disk_->start(op, flight->path);
        flights_.push(std::move(flight));
        continue;
      }
    }
    flight.reset();
    ++completed;
    op.done(op);
  }
  return completed;
}

void SimEngine::wake() {
  {
    MutexLock lock(mutex_);
    woken_ = true;
  }
  wake_.notify_one();
}

}  // namespace stoker
