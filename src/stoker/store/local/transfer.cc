#include "stoker/store/local/transfer.h"

#include <utility>

#include "stoker/base/check.h"

namespace stoker::local {

void Transfer::add(Op::Kind kind, FileId file, size_t volume, uint64_t offset, Slice bytes,
                   size_t piece) {
  STOKER_CHECK(piece < pieces.size() && bytes.size > 0);
  STOKER_CHECK(is_aligned(offset, kBlock) && is_aligned(bytes.size, kBlock));
  const size_t join_max = kind == Op::Kind::read ? kJoinRead : kJoinWrite;
  if (!parts_.empty()) {
    Part& last = parts_.back();
    const bool goes_on =
        last.kind == kind && last.file == file && last.offset + last.bytes.size == offset &&
        last.bytes.data + last.bytes.size == bytes.data && last.bytes.arena == bytes.arena &&
        last.bytes.size + bytes.size <= join_max;
    if (goes_on) {
      last.bytes.size += bytes.size;
      STOKER_CHECK(last.last <= piece);
      if (std::exchange(last.last, piece) != piece) ++pieces[piece].to_come;
      return;
    }
  }
  Part& part = parts_.emplace_back();
  part.first = part.last = piece;
  STOKER_CHECK(++pieces[piece].to_come <= 2);
  part.volume = static_cast<uint32_t>(volume);
  part.kind = kind;
  part.file = file;
  part.offset = offset;
  part.bytes = bytes;
}

void Transfer::start(Loop& loop, std::span<VolumeLoad> loads, Pool& pool) {
  STOKER_CHECK(finish != nullptr && left_ == 0);
  loads_ = loads;
  pool_ = &pool;
  clock_ = &loop.clock();
  ops_.clear();
  for (Part& part : parts_) {
    part.priority = priority;
    part.deadline_ns = deadline_ns;
    part.done = &Transfer::op_done;
    part.context = this;
    STOKER_CHECK(part.volume < loads.size() &&
                 (part.kind == Op::Kind::write || arrived != nullptr));
    ops_.push_back(&part);
    loads[part.volume].begin(part.bytes.size);
  }
  left_ = ops_.size() + 1;  // one for whoever calls release()
  if (const Status queued = loop.submit(ops_); !queued) {
    for (Part& part : parts_) loads[part.volume].take_back(part.bytes.size);
    refused = queued.error();
    left_ = 1;
  }
}

void Transfer::op_done(Op& op) noexcept {
  auto& self = *static_cast<Transfer*>(op.context);
  const auto& part = static_cast<const Part&>(op);
  VolumeLoad& load = self.loads_[part.volume];
  if (op.result) {
    // queued_ns: when the engine got it
    load.end(op.bytes.size, op.queued_ns, self.clock_->now_ns(), op.kind == Op::Kind::read);
  } else {
    load.take_back(op.bytes.size);
  }
  if (part.kind != Op::Kind::read) return self.release();
  self.pool_->run([&self, &part] { self.came(part); });
}

// On the pool. The ops of one piece may come here at the same time; a piece of which one failed is
// never complete.
void Transfer::came(const Part& part) {
  if (part.result) {
    for (size_t i = part.first; i <= part.last; ++i) {
      if (pieces[i].chunk.sparse()) continue;  // it lies between two that are on disk
      const uint8_t came = std::atomic_ref(pieces[i].to_come).fetch_sub(1);
      STOKER_CHECK(came > 0);
      if (came == 1) arrived(*this, pieces[i], store);
    }
  }
  release();
}

void Transfer::release() {
  const size_t left = left_.fetch_sub(1);
  STOKER_CHECK(left > 0);
  if (left == 1) finish(*this, store);
}

Status Transfer::status() const {
  if (refused) return *refused;
  for (const Part& part : parts_) {
    if (!part.result) {
      const bool read = part.kind == Op::Kind::read;
      return part.result.error().with(std::string(read ? "reading" : "writing") + " chunk " +
                                      std::to_string(pieces[part.first].index) + " of '" + key +
                                      "'");
    }
  }
  return {};
}

void Transfer::bad(const Piece& piece) {
  const size_t at = static_cast<size_t>(&piece - pieces.data());
  STOKER_CHECK(at < pieces.size());
  size_t first = first_bad_;
  while (at < first && !first_bad_.compare_exchange_weak(first, at)) {
  }
}

const Piece* Transfer::first_bad() const {
  return first_bad_ == SIZE_MAX ? nullptr : &pieces[first_bad_];
}

void Transfer::clear() {
  STOKER_CHECK(left_ == 0);
  key.clear();
  deadline_ns = 0;
  refused.reset();
  first_bad_ = SIZE_MAX;
  pieces.clear();
  parts_.clear();
  if (scratch.size() > kScratchKept || is_lost(scratch.data(), scratch.size()))
    scratch = AlignedBytes();
  grant = Grant();
  transaction.reset();
}

std::unique_ptr<Transfer> TransferPool::take() {
  std::unique_ptr<Transfer> transfer;
  {
    MutexLock lock(mutex_);
    if (!free_.empty()) {
      transfer = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (!transfer) transfer = std::make_unique<Transfer>();
  transfer->promise = Promise<void>();
  return transfer;
}

void TransferPool::give(std::unique_ptr<Transfer> transfer) {
  transfer->clear();
  MutexLock lock(mutex_);
  if (free_.size() < kKept) free_.push_back(std::move(transfer));
}

}  // namespace stoker::local
