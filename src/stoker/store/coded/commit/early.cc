#include "stoker/store/coded/commit/early.h"

#include <utility>

#include "stoker/base/check.h"
#include "stoker/store/coded/format/rows.h"

namespace stoker::coded {
namespace {

constexpr uint64_t kTaskBytes = kMiB;  // of a stripe, from which on it is a task of the pool

}  // namespace

EarlyStripe::EarlyStripe(const EarlyParts& parts, StripePtr stripe, std::vector<Slice> data,
                         uint32_t positions, uint64_t epoch, Grant grant)
    : shape_(parts.shards.shape()),
      stripe_(std::move(stripe)),
      epoch_(epoch),
      grant_(std::move(grant)),
      parity_(parts.spare.take(parity_bytes(shape_))),
      crcs_(shape_.n() * shape_.rows()),
      transfers_(std::make_unique<ShardTransfers>(parts.shards, Priority::write_back, nullptr)) {
  STOKER_CHECK(data.size() == shape_.k);
  // A task of the pool must not wait for another one, as its owner may have to.
  if (shape_.stripe_bytes() < kTaskBytes || parts.pool.here()) {
    begin(parts.code, std::move(data), positions);
  } else {
    parts.pool.run([this, &code = parts.code, data = std::move(data), positions]() mutable {
      begin(code, std::move(data), positions);
    });
  }
}

EarlyStripe::~EarlyStripe() { await_begun(); }

void EarlyStripe::begin(const codec::ErasureCode& code, std::vector<Slice> data,
                        uint32_t positions) noexcept {
  const auto crcs_of = [&](size_t chunk) {
    return std::span(crcs_).subspan(chunk * shape_.rows(), shape_.rows());
  };
  std::vector<codec::Source> sources;
  for (size_t c = 0; c < shape_.k; ++c) sources.push_back({data[c].span(), crcs_of(c)});
  std::vector<codec::Target> targets;
  for (size_t j = 0; j < shape_.m; ++j) {
    data.push_back(parity_.slice().sub(j * shape_.chunk_bytes, shape_.chunk_bytes));
    targets.push_back({data.back().span(), crcs_of(shape_.k + j)});
  }
  failed_ = !code.encode(sources, targets);
  for (size_t c = 0; c < shape_.n() && !failed_; ++c) {
    if (!is_set(positions, c)) continue;
    transfers_->write(stripe_->shards[c], shape_.block_at(stripe_->slots[c], 0), data[c]);
    ++left_;
  }
  transfers_->start();
  // held while notifying: the waiter may destroy us as soon as it has the lock
  const MutexLock lock(mutex_);
  begun_ = true;
  changed_.notify_all();
}

bool EarlyStripe::begun() const {
  const MutexLock lock(mutex_);
  return begun_;
}

void EarlyStripe::await_begun() {
  MutexLock lock(mutex_);
  changed_.wait(lock, [this]() REQUIRES(mutex_) { return begun_; });
}

void EarlyStripe::note() {
  for (const size_t ended : transfers_->next()) {
    failed_ = failed_ || !transfers_->result(ended);
    STOKER_CHECK(left_ > 0);
    --left_;
  }
  if (left_ > 0) return;
  transfers_.reset();
  parity_ = SparePiece();
  grant_ = Grant();
}

void EarlyStripe::settle() {
  if (begun() && transfers_ && transfers_->ended()) note();
}

bool EarlyStripe::written(uint64_t epoch) {
  await_begun();
  while (transfers_) note();
  return !failed_ && epoch == epoch_;
}

}  // namespace stoker::coded
