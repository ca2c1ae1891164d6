#include "stoker/store/coded/shards/file_shard.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"
#include "stoker/store/blocking_io.h"

namespace stoker::coded {

// What the Loop, and then the pool, holds of a read. It goes by itself when that is done, like a
// PutFlight.
struct FileShard::ReadFlight {
  Op op;
  FileShard& shard;
  ShardRead& request;

  static void on_done(Op& op) noexcept {
    auto* const flight = static_cast<ReadFlight*>(op.context);
    ShardRead& request = flight->request;
    request.status = op.result ? Status() : Status(op.result.error());
    if (!request.status)
      flight->shard.note(&ShardHealth::failed_reads, 1, request.status.error().message());
    if (request.status && !request.crcs.empty()) {
      flight->shard.pool_.run([flight] { flight->compare(); });
    } else {
      flight->end();
    }
  }

  void compare() noexcept {
    uint64_t wrong = 0, first = 0;
    for (size_t i = 0; i < request.crcs.size(); ++i) {
      if (crc32c(request.into.data + i * kBlock, kBlock) == request.crcs[i]) continue;
      if (wrong++ == 0) {
        request.wrong.assign(request.crcs.size(), false);
        first = request.offset + i * kBlock;
      }
      request.wrong[i] = true;
    }
    if (wrong > 0)
      shard.note(&ShardHealth::wrong_blocks, wrong,
                 "a block of 4 KiB at offset " + std::to_string(first) +
                     " of it is not what was written there");
    end();
  }

  void end() noexcept {
    const std::unique_ptr<ReadFlight> self(this);
    request.done(request);
  }
};

// Steps: the first wave, its flush, the second wave, and so on.
class FileShard::PutFlight {
 public:
  PutFlight(FileShard& shard, ShardPut& request)
      : shard_(shard), request_(request), step_(request.steps_done) {}

  // The ops of the next step that has any; empty: that was the last.
  std::vector<Op*> next() {
    ops_.clear();
    request_.steps_done = step_;  // should these not be taken
    const size_t waves = std::max<size_t>(1, request_.waves.size());
    for (; ops_.empty() && step_ < 2 * waves; ++step_) {
      const size_t wave = step_ / 2;
      if (step_ % 2 != 0) {
        if (wave + 1 < waves || request_.flush) add(Op::Kind::sync, 0, {});
      } else if (wave < request_.waves.size()) {
        for (const auto& [offset, from] : request_.waves[wave]) add(Op::Kind::write, offset, from);
      }
    }
    STOKER_CHECK(left_ == 0);
    left_ = ops_.size();
    std::vector<Op*> ops;
    ops.reserve(ops_.size());
    for (Op& op : ops_) ops.push_back(&op);
    return ops;
  }

  static void on_done(Op& op) noexcept {
    auto* const flight = static_cast<PutFlight*>(op.context);
    if (!op.result && flight->request_.status) flight->request_.status = op.result.error();
    STOKER_CHECK(flight->left_ > 0);
    if (--flight->left_ == 0) flight->stepped();
  }

 private:
  void add(Op::Kind kind, uint64_t offset, Slice bytes) {
    Op& op = ops_.emplace_back();
    op.kind = kind;
    // whoever waits for a put has nothing else to wait for once its bytes are there
    op.priority = kind == Op::Kind::sync ? Priority::demand : request_.priority;
    op.file = shard_.file_;
    op.offset = offset;
    op.bytes = bytes;
    op.done = &PutFlight::on_done;
    op.context = this;
  }

  // On the Loop's thread, like all that ends here: only one at a time.
  void stepped() {
    bool refused = false;
    if (request_.status) {
      const std::vector<Op*> ops = next();
      if (!ops.empty()) request_.status = shard_.loop_.submit(ops);
      if (!ops.empty() && request_.status) return;
      refused = !request_.status;
    }
    if (!refused) request_.steps_done = 0;
    if (!refused && !request_.status)
      shard_.note(&ShardHealth::failed_puts, 1, request_.status.error().message());
    const std::unique_ptr<PutFlight> self(this);
    shard_.ended();
    request_.done(request_);
  }

  FileShard& shard_;
  ShardPut& request_;
  std::deque<Op> ops_;  // of the step that is under way; do not move
  size_t step_, left_ = 0;
};

void Plug::release() {
  const std::vector<Op*> ops = std::exchange(ops_, {});
  if (ops.empty()) return;
  // Busy, the only error there is: the queue is full of others' work, which ends.
  while (!loop_.submit(ops)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void FileShard::read(ShardRead& request, Plug& plug) {
  STOKER_CHECK(request.done != nullptr &&
               (request.crcs.empty() || request.crcs.size() * kBlock == request.into.size));
  request.wrong.clear();
  auto* const flight = new ReadFlight{{}, *this, request};
  flight->op.kind = Op::Kind::read;
  flight->op.priority = request.priority;
  flight->op.file = file_;
  flight->op.offset = request.offset;
  flight->op.bytes = request.into;
  flight->op.done = &ReadFlight::on_done;
  flight->op.context = flight;
  plug.hold(flight->op);
}

void FileShard::put(ShardPut& request, Plug& plug) {
  STOKER_CHECK(request.done != nullptr);
  request.status = {};
  {
    const MutexLock lock(mutex_);
    if (fence_.number == 0 || request.fence != fence_) {
      request.status =
          fail(Code::conflict,
               "another writer has opened the store since, and the shard takes only its writes");
    } else {
      ++under_way_;
    }
  }
  if (!request.status) return request.done(request);
  auto flight = std::make_unique<PutFlight>(*this, request);
  const std::vector<Op*> ops = flight->next();
  // what writes nothing and makes nothing durable would never be done
  STOKER_CHECK(!ops.empty());
  for (Op* op : ops) plug.hold(*op);
  static_cast<void>(flight.release());  // until it is done
}

ShardHealth FileShard::health() const {
  const MutexLock lock(health_mutex_);
  return health_;
}

void FileShard::note(uint64_t ShardHealth::*count, uint64_t more, std::string why) {
  const MutexLock lock(health_mutex_);
  health_.*count += more;
  health_.last = std::move(why);
}

void FileShard::ended() {
  const MutexLock lock(mutex_);
  STOKER_CHECK(under_way_ > 0);
  if (--under_way_ == 0) none_under_way_.notify_all();
}

Result<Fence> FileShard::fenced() {
  const MutexLock lock(fencing_);
  return stored();
}

Status FileShard::fence(const Fence& fence) {
  STOKER_CHECK(fence.number != 0);
  const MutexLock fencing(fencing_);
  const Fence before = stored();
  if (before.number > fence.number ||
      (before.number == fence.number && before.writer != fence.writer))
    return fail(Code::conflict, "another writer has opened the store since");
  STOKER_TRY(store(fence));
  MutexLock lock(mutex_);
  fence_ = fence;
  none_under_way_.wait(lock, [this]() REQUIRES(mutex_) { return under_way_ == 0; });
  return {};
}

// A copy that cannot be read counts as damaged: it is written anew. Where both are the shard says
// that nobody fenced it. In a file that is safe: its lock keeps other writers out, and whoever
// opens the store takes more than the highest fence of all shards.
Fence FileShard::stored() {
  Fence highest;
  for (const uint64_t at : kFenceAt) {
    AlignedBytes block(kBlock);
    IoBatch read(loop_, Priority::demand);
    read.read(file_, at, block.slice());
    if (const Status done = read.run(); !done) {
      note(&ShardHealth::failed_reads, 1, done.error().message());
      continue;
    }
    const auto fence = decode_fence(block.span());
    if (fence && fence->number > highest.number) highest = *fence;
  }
  return highest;
}

Status FileShard::store(const Fence& fence) {
  AlignedBytes block(kBlock);
  encode_fence(fence, block.span());
  IoBatch writes(loop_, Priority::demand), flush(loop_, Priority::demand);
  for (const uint64_t at : kFenceAt) writes.write(file_, at, block.slice());
  flush.sync(file_);
  STOKER_TRY(writes.run());
  return flush.run();
}

// Block by block, whatever the error: one that says nothing of a block says nothing of the others
// either, and what is read nowhere may be written anew. As read_what_can_be().
std::vector<uint64_t> FileShard::read_each(Priority priority, uint64_t offset, Slice into) {
  IoBatch reads(loop_, priority);
  for (uint64_t at = 0; at < into.size; at += kBlock)
    reads.read(file_, offset + at, into.sub(at, kBlock));
  std::vector<uint64_t> unreadable;
  if (reads.run()) return unreadable;
  for (size_t i = 0; i < reads.size(); ++i) {
    if (reads.result(i)) continue;
    std::memset(into.data + i * kBlock, 0, kBlock);
    unreadable.push_back(offset + i * kBlock);
  }
  return unreadable;
}

ShardScan FileShard::scan(const ShardSegment& segment, Priority priority) {
  const Shape& shape = segment.shape;
  const uint64_t offset = shape.segment_at(segment.segment);
  ShardScan scan;
  for (;;) {
    const AlignedBytes bytes(shape.segment_bytes);
    auto unreadable = read_what_can_be(loop_, priority, file_, offset, bytes.slice());
    if (bytes.lost()) continue;  // the disk was given up, and refuses from then on
    if (!unreadable) unreadable = read_each(priority, offset, bytes.slice());
    if (bytes.lost()) continue;
    scan.unreadable = std::move(*unreadable);
    scan.any_read = scan.unreadable.size() * kBlock < shape.segment_bytes;
    if (!scan.unreadable.empty())
      scan.why = "a block of 4 KiB at offset " + std::to_string(scan.unreadable.front()) +
                 " of it cannot be read";
    scan.end = read_segment(shape, segment.store, segment.shard, segment.segment, segment.floor,
                            bytes.span(), [&scan](uint64_t at, FrameContent content) {
                              scan.frames.push_back({at, std::move(content)});
                            });
    return scan;
  }
}

}  // namespace stoker::coded
