#include "stoker/store/coded/read/row_reads.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "stoker/base/check.h"

namespace stoker::coded {
RowReads::RowReads(Shards& shards, ShardSet live, std::span<RowsWanted> all,
                   std::shared_ptr<const void> memory, Priority priority)
    : shards_(shards),
      shape_(shards.shape()),
      all_(all),
      memory_(std::move(memory)),
      priority_(priority) {
  const ShardSet lagging = shards.stragglers().lagging();
  sets_.reserve(all.size());
  for (const RowsWanted& rows : all)
    sets_.emplace_back(shape_, rows, rows.stripe->positions_on(live) & ~rows.avoid,
                       rows.stripe->positions_on(lagging), memory_ != nullptr);
  begin();
}

// What each of them asks for next, in one batch.
void RowReads::begin() {
  reads_.clear();
  read_of_.clear();
  batch_.emplace(shards_, priority_, memory_);
  for (size_t i = 0; i < all_.size(); ++i) {
    const uint32_t chosen = sets_[i].next();
    all_[i].blocks_read += static_cast<size_t>(std::popcount(chosen)) * all_[i].count;
    for (size_t c = 0; c < shape_.n(); ++c) {
      if (!is_set(chosen, c)) continue;
      const size_t transfers = add(all_[i], c, sets_[i].at(c, 0));
      read_of_.insert(read_of_.end(), transfers, reads_.size());
      reads_.push_back({i, c, transfers});
    }
  }
  if (batch_->empty()) {
    batch_.reset();
  } else {
    batch_->start();
  }
}

// As they come, so that what came first is compared with its checksums while the rest is on its
// way; until all have come, or there is enough without them. Where one is wrong the spare one is
// waited for, however slow it is: what else there is follows in a batch of its own.
void RowReads::take() {
  const auto enough = [](const RowSet& set) { return set.enough(); };
  for (;;) {
    const std::vector<size_t> ended = batch_->next();
    if (ended.empty()) return;
    for (const size_t transfer : ended) {
      STOKER_CHECK(transfer < read_of_.size());
      ChunkRead& read = reads_[read_of_[transfer]];
      STOKER_CHECK(read.left > 0);
      read.ok = read.ok && batch_->result(transfer).has_value();
      if (--read.left == 0) sets_[read.set].took(read.chunk, read.ok);
    }
    if (memory_ && std::all_of(sets_.begin(), sets_.end(), enough)) return;
  }
}

// A batch for what is wanted of all of them, and two more at most for what has to be decoded.
uint64_t RowReads::finish(const codec::ErasureCode& code) {
  for (; batch_; begin()) take();
  uint64_t decoded = 0;
  for (size_t i = 0; i < all_.size(); ++i) {
    all_[i].wrong = sets_[i].wrong();
    const RowSet::Decoded done = sets_[i].complete(code);
    if (!done.lost) {
      decoded += done.blocks;
      continue;
    }
    all_[i].status =
        fail(Code::corruption,
             "row {} of stripe {} cannot be decoded: {} of its blocks are intact, and it takes {}. "
             "Bring "
             "missing disks back, or restore the object from a copy",
             all_[i].first + *done.lost, all_[i].stripe->id, sets_[i].there(*done.lost), shape_.k);
  }
  return decoded;
}

// Adds the reads of these rows of chunk c; how many. Blocks of which some lie in the log are read
// one by one.
size_t RowReads::add(const RowsWanted& rows, size_t c, std::byte* into) {
  const Stripe& stripe = *rows.stripe;
  const bool moved = stripe.overrides.lower_bound(rows.first * shape_.n()) !=
                     stripe.overrides.lower_bound((rows.first + rows.count) * shape_.n());
  const size_t step = moved ? 1 : rows.count;
  for (size_t r = 0; r < rows.count; r += step) {
    const auto over = stripe.overrides.find((rows.first + r) * shape_.n() + c);
    const Slice block{into + r * kBlock, step * kBlock, kLosableHeap};
    if (over != stripe.overrides.end()) {
      batch_->read(over->second.place.shard, over->second.place.offset, block);
    } else {
      batch_->read(stripe.shards[c], shape_.block_at(stripe.slots[c], rows.first + r), block);
    }
  }
  return rows.count / step;
}

}  // namespace stoker::coded
