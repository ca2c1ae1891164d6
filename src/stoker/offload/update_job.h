// UpdateJob: one optimizer step of one block, on its way through the tiles.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "stoker/base/future.h"
#include "stoker/base/mutex.h"
#include "stoker/memory/slice.h"
#include "stoker/offload/gradient.h"
#include "stoker/offload/step_transaction.h"
#include "stoker/offload/traffic.h"
#include "stoker/optim/optim.h"

namespace stoker::offload {

struct Block;

// A parameter inside its block. The gradient stays untouched until the job is computed.
struct Segment {
  // the caller's index, for messages and for the draws that round lossy moments
  uint32_t parameter = 0;
  uint64_t offset = 0;  // elements from the start of the block
  uint64_t count = 0;   // all its elements: where they end counts (optim::Part)
  const std::byte* grad = nullptr;
  optim::GradType grad_type = optim::GradType::bf16;
  optim::Hyper hyper;
};

struct UpdateRequest {
  // sorted by offset, not overlapping; elements in none of them keep their values
  std::vector<Segment> segments;
  Slice weight_in = {};  // the old weight plane; empty: read from the store
  // where a copy of the new one goes (may be weight_in); empty: it is only staged
  Slice weight_out = {};
  std::shared_ptr<StepTransaction> transaction;
  // old state comes from here; null: the committed version
  std::shared_ptr<StepTransaction> source;
  bool hashes = false;
};

// Made by Session::update(). Any thread may wait; the pipeline's threads (pool, Store) advance it.
class UpdateJob {
 public:
  UpdateJob(Block& block, UpdateRequest request, Traffic& traffic);

  // Old bytes consumed, kernels run, writes handed to the store: gradients, weight_in and
  // weight_out are the caller's again.
  Future<void> computed() const { return computed_future_; }
  // All writes are done as well.
  Future<void> written() const { return written_future_; }
  // Of every segment's gradient, in the order of the request; once computed, and only if asked for.
  const std::vector<Hash128>& hashes() const { return hashes_; }
  // Whether no gradient had a NaN or an infinity; once computed.
  bool finite() const { return finite_; }

 private:
  friend class Updater;

  // The first failure; the others of the same job follow from it. Poisons the transaction.
  void fail(const Error& error);
  bool failed() const { return failed_; }
  Status status() const;
  bool cancelled() const { return failed_ || request_.transaction->abandoned(); }
  const Segment* first_segment_after(uint64_t element) const;
  bool active(uint64_t tile) const;  // does a segment reach into it?
  void hash_tile(uint64_t first, uint64_t count);
  void combine_hashes();

  Block& block_;
  UpdateRequest request_;
  Traffic& traffic_;
  std::vector<uint64_t> order_;  // the tiles there is something to do for
  size_t next_ = 0;              // of order_, not begun yet; guarded by the Updater's mutex
  std::atomic<size_t> compute_left_{0};
  std::atomic<size_t> write_left_{0};
  std::vector<std::vector<Hash128>> pieces_;  // by segment; each piece is written by one tile
  std::vector<Hash128> hashes_;
  std::atomic<bool> failed_{false}, finite_{true};
  mutable Mutex mutex_;
  Status status_ GUARDED_BY(mutex_);
  Promise<void> computed_, written_;
  Future<void> computed_future_, written_future_;
};

}  // namespace stoker::offload
