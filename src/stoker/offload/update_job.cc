#include "stoker/offload/update_job.h"

#include <algorithm>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/offload/tile.h"

namespace stoker::offload {

UpdateJob::UpdateJob(Block& block, UpdateRequest request, Traffic& traffic)
    : block_(block),
      request_(std::move(request)),
      traffic_(traffic),
      computed_future_(computed_.future()),
      written_future_(written_.future()) {
  const bool moves_weights =
      request_.weight_out.data != nullptr && request_.weight_out.data != request_.weight_in.data;
  for (uint64_t tile = 0; tile < block.layout.tiles(); ++tile) {
    if (moves_weights || active(tile)) order_.push_back(tile);
  }
  compute_left_ = order_.size();
  write_left_ = order_.size();
  if (!request_.hashes) return;
  for (const Segment& segment : request_.segments) {
    pieces_.emplace_back(hash_pieces(segment.count * optim::grad_bytes(segment.grad_type)));
  }
}

const Segment* UpdateJob::first_segment_after(uint64_t element) const {
  const auto& segments = request_.segments;
  const auto found =
      std::partition_point(segments.begin(), segments.end(),
                           [element](const Segment& s) { return s.offset + s.count <= element; });
  return segments.data() + (found - segments.begin());
}

bool UpdateJob::active(uint64_t tile) const {
  const uint64_t first = block_.layout.tile_first(tile);
  const Segment* segment = first_segment_after(first);
  return segment != request_.segments.data() + request_.segments.size() &&
         segment->offset < first + block_.layout.tile_count(tile);
}

// A piece is hashed whole by the tile that holds its first element, also where it reaches into the
// next one.
void UpdateJob::hash_tile(uint64_t first, uint64_t count) {
  const Stopwatch watch(traffic_.hash_ns);
  const Segment* const end = request_.segments.data() + request_.segments.size();
  for (const Segment* segment = first_segment_after(first);
       segment != end && segment->offset < first + count; ++segment) {
    const uint64_t element = optim::grad_bytes(segment->grad_type);
    const uint64_t bytes = segment->count * element;
    const uint64_t from = first > segment->offset ? (first - segment->offset) * element : 0;
    const uint64_t to = std::min(bytes, (first + count - segment->offset) * element);
    auto& pieces = pieces_[static_cast<size_t>(segment - request_.segments.data())];
    for (uint64_t piece = (from + kHashPiece - 1) / kHashPiece; piece * kHashPiece < to; ++piece) {
      STOKER_CHECK(piece < pieces.size());
      const uint64_t at = piece * kHashPiece;
      pieces[piece] = hash_piece(segment->grad + at, std::min(kHashPiece, bytes - at));
    }
  }
}

void UpdateJob::combine_hashes() {
  STOKER_CHECK(hashes_.empty() && pieces_.size() <= request_.segments.size());
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const Segment& segment = request_.segments[i];
    hashes_.push_back(combine(pieces_[i], segment.count * optim::grad_bytes(segment.grad_type)));
  }
}

void UpdateJob::fail(const Error& error) {
  {
    MutexLock lock(mutex_);
    if (status_) status_ = error;
  }
  failed_ = true;
  request_.transaction->poison(error);
}

Status UpdateJob::status() const {
  MutexLock lock(mutex_);
  return status_;
}

}  // namespace stoker::offload
