// The way of one tile through the Updater: reads -> kernel -> writes.
#include <algorithm>
#include <cstring>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/mutex.h"
#include "stoker/offload/updater.h"

namespace stoker::offload {
namespace {

std::byte* tile_of_plane(const Slice& plane, const Tile& tile) {
  return plane.data + tile.block->layout.tile_first(tile.index) *
                          tile.block->layout.element_bytes(Plane::weight);
}

// In the trace.
std::string tile_name(const Tile& tile) {
  return tile.block->layout.name() + " [" + std::to_string(tile.index) + "]";
}

}  // namespace

void Updater::advance(const TilePtr& tile) {
  STOKER_CHECK(tile->job && tile->left == 0);
  const UpdateJob& job = *tile->job;
  const UpdateRequest& request = job.request_;
  // a prefetch that failed costs nothing: what it should have read is asked for again
  if (tile->failed && tile->prefetched) {
    tile->status = {};
    tile->failed = tile->prefetched = tile->has_state = false;
    tile->weights = nullptr;
  }
  if (tile->retained) {
    MutexLock lock(mutex_);
    tile->has_state = tile->block->retained->valid[tile->index] != 0;
  }
  const bool state = job.active(tile->index) && !tile->has_state;
  const bool weights = request.weight_in.data == nullptr && tile->weights == nullptr;
  if (job.cancelled() || (!state && !weights)) {
    pool_.run([this, tile] { compute(tile); });
    return;
  }
  tile->left = 1;
  tile->since_ns = Clock::real().now_ns();
  if (state) {
    for (Plane plane : kStatePlanes) read(tile, plane, request.source, Priority::prefetch);
    tile->has_state = true;
  }
  if (weights) {
    tile->weights = place(*tile, Plane::weight).data;
    read(tile, Plane::weight, request.source, Priority::prefetch);
  }
  part_read(tile);
}

void Updater::read(const TilePtr& tile, Plane plane, const std::shared_ptr<StepTransaction>& source,
                   Priority priority) {
  const BlockLayout& layout = tile->block->layout;
  if (!layout.has(plane)) return;
  const Slice into = place(*tile, plane);
  const uint64_t offset = layout.tile_offset(plane, tile->index);
  const ReadOptions options{.priority = priority};
  ++tile->left;
  const auto done = source ? source->raw().read(layout.key(plane), offset, into, options)
                           : store_.read(layout.key(plane), offset, into, options);
  done.on_done([this, tile, plane, bytes = into.size](const Status& status) {
    if (status) {
      traffic_.read(plane, bytes);
    } else {
      tile->status[static_cast<size_t>(plane)] = status;
      tile->failed = true;
    }
    part_read(tile);
  });
}

void Updater::part_read(const TilePtr& tile) {
  const int left = tile->left.fetch_sub(1);
  STOKER_CHECK(left > 0);
  if (left == 1) reads_done(tile);
}

void Updater::reads_done(const TilePtr& tile) {
  traffic_.read_latency_ns.add(Clock::real().now_ns() - tile->since_ns);
  bool dropped = false;
  {
    MutexLock lock(mutex_);
    tile->reading = false;
    if (!tile->job && !tile->dropped) return;  // prefetched: waits for its job
    dropped = tile->dropped;
    if (dropped) {
      STOKER_CHECK(!tile->job && std::erase(prefetched_, tile) == 1);
      give(tile);
    } else if (tile->retained && tile->has_state &&
               !tile->failed) {  // of a tile without gradients only weights are read
      tile->block->retained->valid[tile->index] = 1;
    }
  }
  if (dropped) {
    pump();
    leave();
    return;
  }
  if (tile->failed && !tile->prefetched) fail_job(*tile, "reading");
  advance(tile);
}

void Updater::compute(const TilePtr& tile) {
  STOKER_CHECK(tile->job && tile->left == 0);
  UpdateJob& job = *tile->job;
  if (job.cancelled()) {
    job.fail(fail(Code::cancelled,
                  "the update of block {} was cancelled, as its step was abandoned",
                  tile->block->layout.name()));
  } else {
    const TraceScope traced(traffic_.trace, "kernels",
                            [&] { return "update " + tile_name(*tile); });
    run_kernel(*tile);
  }
  tile->left = 1;
  tile->since_ns = Clock::real().now_ns();
  if (!job.failed() && job.active(tile->index)) write_planes(tile);
  tile_computed(job, 1);
  part_written(tile);
}

void Updater::run_kernel(const Tile& tile) {
  UpdateJob& job = *tile.job;
  const UpdateRequest& request = job.request_;
  const BlockLayout& layout = tile.block->layout;
  const uint64_t first = layout.tile_first(tile.index);
  const uint64_t count = layout.tile_count(tile.index);
  const uint32_t width = layout.element_bytes(Plane::weight);
  const std::byte* in =
      request.weight_in.data != nullptr ? tile_of_plane(request.weight_in, tile) : tile.weights;
  STOKER_CHECK(in != nullptr);
  const Slice made = place(tile, Plane::weight);
  std::byte* const out = made.data;

  if (request.hashes) job.hash_tile(first, count);
  const auto copy = [&](uint64_t from, uint64_t to) {
    if (in == out || from == to) return;
    const Stopwatch watch(traffic_.copy_ns);
    std::memcpy(out + from * width, in + from * width, (to - from) * width);
  };
  uint64_t at = 0;  // elements of the tile that are done
  const Segment* const end = request.segments.data() + request.segments.size();
  for (const Segment* segment = job.first_segment_after(first);
       segment != end && segment->offset < first + count; ++segment) {
    const uint64_t from = std::max(segment->offset, first) - first;
    const uint64_t to = std::min(segment->offset + segment->count, first + count) - first;
    copy(at, from);
    const Stopwatch watch(traffic_.kernel_ns);
    const optim::GradType type = segment->grad_type;
    const uint64_t element = first + from - segment->offset;  // of the parameter
    const std::byte* const grad = segment->grad + element * optim::grad_bytes(type);
    if (job.finite_ && !optim::all_finite(grad, type, to - from)) job.finite_ = false;
    for (at = from; at < to;) {
      const uint64_t next = kept_together(tile, at, to);
      update_elements(tile, *segment, in, out, at, next);
      at = next;
    }
  }
  copy(at, count);
  if (request.weight_out.data == nullptr) return;
  // Writes read the tile: weight_out is the caller's as soon as the job is computed, whatever
  // becomes of it then.
  const Stopwatch watch(traffic_.copy_ns);
  std::memcpy(tile_of_plane(request.weight_out, tile), made.data, made.size);
}

// Elements of the tile that lie in one segment, and their moments in one piece.
void Updater::update_elements(const Tile& tile, const Segment& segment, const std::byte* in,
                              std::byte* out, uint64_t from, uint64_t to) const {
  const BlockLayout& layout = tile.block->layout;
  const optim::Hyper& hyper = segment.hyper;
  const uint32_t width = layout.element_bytes(Plane::weight);
  STOKER_CHECK(from < to && to <= layout.tile_count(tile.index));
  STOKER_CHECK(layout.tile_first(tile.index) + from >= segment.offset);
  // of the parameter
  const uint64_t element = layout.tile_first(tile.index) + from - segment.offset;
  const optim::Planes planes{
      .weight_in = in + from * width,
      .weight_out = out + from * width,
      .remainder = layout.has(Plane::remainder)
                       ? reinterpret_cast<uint16_t*>(place(tile, Plane::remainder).data) + from
                       : nullptr,
      .grad = segment.grad + element * optim::grad_bytes(segment.grad_type),
  };
  const optim::Moments moments{
      .type = layout.moments(),
      .m = optim::uses_m(hyper) ? kept(tile, Plane::m, from) : optim::KeptMoment{},
      .v = optim::uses_v(hyper) ? kept(tile, Plane::v, from) : optim::KeptMoment{},
      .seed = seed_,
      .parameter = segment.parameter,
  };
  const optim::Part part{.first = element, .count = to - from, .elements = segment.count};
  optim::update(hyper, layout.weight_type(), segment.grad_type, planes, moments, part);
}

void Updater::write_planes(const TilePtr& tile) {
  const BlockLayout& layout = tile->block->layout;
  const UpdateRequest& request = tile->job->request_;
  traffic_.tiles.add(1);
  if (tile->prefetched) traffic_.tiles_prefetched.add(1);
  if (tile->retained) traffic_.tiles_retained.add(1);
  const Stopwatch watch(traffic_.stage_ns);
  const TraceScope traced(traffic_.trace, "kernels", [&] { return "stage " + tile_name(*tile); });
  for (Plane plane : kAllPlanes) {
    if (!layout.has(plane)) continue;
    const Slice from = place(*tile, plane);
    ++tile->left;
    request.transaction->raw()
        .write(layout.key(plane), layout.tile_offset(plane, tile->index), from)
        .on_done([this, tile, plane, bytes = from.size](const Status& status) {
          if (status) {
            traffic_.wrote(plane, bytes);
          } else {
            tile->status[static_cast<size_t>(plane)] = status;
            tile->failed = true;
          }
          part_written(tile);
        });
  }
}

void Updater::part_written(const TilePtr& tile) {
  const int left = tile->left.fetch_sub(1);
  STOKER_CHECK(left > 0);
  if (left != 1) return;
  traffic_.write_latency_ns.add(Clock::real().now_ns() - tile->since_ns);
  if (tile->failed) fail_job(*tile, "writing");
  finish_tile(tile);
}

void Updater::fail_job(const Tile& tile, const char* action) {
  for (Plane plane : kAllPlanes) {
    const Status& status = tile.status[static_cast<size_t>(plane)];
    if (status) continue;
    tile.job->fail(status.error().with("block " + tile.block->layout.name() + ", " + action + " " +
                                       std::string(name(plane)) + ", tile " +
                                       std::to_string(tile.index)));
  }
}

// ---- ends

void Updater::tile_computed(UpdateJob& job, size_t tiles) {
  const size_t left = job.compute_left_.fetch_sub(tiles);
  STOKER_CHECK(left >= tiles);
  if (left != tiles) return;
  if (!job.failed()) job.combine_hashes();
  // All writes are with the store now: a commit waits for them there, and fails with them.
  job.request_.transaction->jobs()->computed();
  job.computed_.complete(job.status());
}

void Updater::finish_tile(const TilePtr& tile) {
  {
    const JobPtr job = std::move(tile->job);
    STOKER_CHECK(job && tile->left == 0);
    {
      MutexLock lock(mutex_);
      give(tile);
    }
    finish_job(job, 1);
  }
  pump();
  leave();
}

void Updater::finish_job(const JobPtr& job, size_t tiles) {
  const size_t left = job->write_left_.fetch_sub(tiles);
  STOKER_CHECK(left >= tiles);
  if (left != tiles) return;
  Block& block = job->block_;
  const Status status = job->status();
  JobPtr next;
  {
    MutexLock lock(mutex_);
    std::erase(waiting_, job);
    STOKER_CHECK(!block.jobs.empty() && block.jobs.front() == job);
    block.jobs.pop_front();
    drop_tiles(block);  // what the job had no use for is of the past now
    if (!status && block.retained) block.retained->stamp = {};
    if (!block.jobs.empty()) next = block.jobs.front();
  }
  // Whoever waits for written() may commit at once, and close the store soon: the transaction is
  // let go of first.
  let_go(job->request_.source);
  let_go(job->request_.transaction);
  Promise<void> written = std::move(job->written_);
  written.complete(status);
  if (next) activate(next);
  leave();
}

}  // namespace stoker::offload
