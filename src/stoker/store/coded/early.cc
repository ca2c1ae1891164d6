#include "stoker/store/coded/early.h"

#include <utility>

#include "stoker/store/coded/rows.h"

namespace stoker::coded {

EarlyStripe::EarlyStripe(Shards& shards, uint64_t epoch, Grant grant)
    : epoch_(epoch),
      grant_(std::move(grant)),
      parity_(AlignedBytes::faulted(parity_bytes(shards.shape()))),
      crcs_(shards.shape().n() * shards.shape().rows()),
      transfers_(std::make_unique<ShardTransfers>(shards, Priority::write_back, nullptr)) {}

std::unique_ptr<EarlyStripe> EarlyStripe::start(Shards& shards, const codec::ErasureCode& code,
                                                const Stripe& stripe, std::vector<Slice> data,
                                                uint32_t positions, uint64_t epoch, Grant grant) {
  const Shape& shape = shards.shape();
  std::unique_ptr<EarlyStripe> early(new EarlyStripe(shards, epoch, std::move(grant)));
  const auto crcs_of = [&](size_t chunk) {
    return std::span(early->crcs_).subspan(chunk * shape.rows(), shape.rows());
  };
  std::vector<codec::Source> sources;
  for (size_t c = 0; c < shape.k; ++c) sources.push_back({data[c].span(), crcs_of(c)});
  std::vector<codec::Target> targets;
  for (size_t j = 0; j < shape.m; ++j) {
    data.push_back(early->parity_.slice().sub(j * shape.chunk_bytes, shape.chunk_bytes));
    targets.push_back({data.back().span(), crcs_of(shape.k + j)});
  }
  if (!code.encode(sources, targets)) return nullptr;
  for (size_t c = 0; c < shape.n(); ++c) {
    if (!is_set(positions, c)) continue;
    early->transfers_->write(stripe.shards[c], shape.block_at(stripe.slots[c], 0), data[c]);
    ++early->left_;
  }
  early->transfers_->start();
  return early;
}

void EarlyStripe::note() {
  for (const size_t ended : transfers_->next()) {
    failed_ = failed_ || !transfers_->result(ended);
    --left_;
  }
  if (left_ > 0) return;
  transfers_.reset();
  parity_ = AlignedBytes();
  grant_ = Grant();
}

void EarlyStripe::settle() {
  if (transfers_ && transfers_->ended()) note();
}

bool EarlyStripe::written(uint64_t epoch) {
  while (transfers_) note();
  return !failed_ && epoch == epoch_;
}

}  // namespace stoker::coded
