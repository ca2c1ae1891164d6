#include "stoker/offload/updater.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "stoker/base/check.h"

namespace stoker::offload {

Updater::Updater(Store& store, Pool& pool, Traffic& traffic, std::vector<Buffer> memory,
                 uint64_t seed)
    : store_(store), pool_(pool), traffic_(traffic), seed_(seed), memory_(std::move(memory)) {}

void Updater::close() {
  drop_prefetched();
  MutexLock lock(mutex_);
  idle_.wait(lock, [this]() REQUIRES(mutex_) { return active_ == 0; });
}

void Updater::leave() {
  MutexLock lock(mutex_);
  STOKER_CHECK(active_ > 0);
  if (--active_ == 0) idle_.notify_all();
}

// State of a committed version is told by the version of the block's objects: all of them change
// together.
Stamp Updater::stamp_of(const Block& block, const std::shared_ptr<StepTransaction>& source) {
  if (source) return {0, source->fate(), true};
  const Plane plane = block.layout.has(Plane::m) ? Plane::m : Plane::weight;
  const auto info = store_.stat(block.layout.key(plane));
  return info ? Stamp{info->version, nullptr, true} : Stamp{};
}

// ---- jobs

std::shared_ptr<UpdateJob> Updater::start(Block& block, UpdateRequest request) {
  auto job = std::make_shared<UpdateJob>(block, std::move(request), traffic_);
  bool first = false;
  {
    MutexLock lock(mutex_);
    ++active_;
    block.jobs.push_back(job);
    first = block.jobs.size() == 1;
  }
  if (first) activate(job);
  return job;
}

void Updater::activate(const JobPtr& job) {
  Block& block = job->block_;
  const Stamp wanted = stamp_of(block, job->request_.source);
  {
    MutexLock lock(mutex_);
    STOKER_CHECK(!block.jobs.empty() && block.jobs.front() == job);
    std::erase_if(wanted_, [&](const Wanted& each) { return each.block == &block; });
    if (!block.prefetched_stamp.serves(wanted)) drop_tiles(block);
    if (block.retained) {
      auto& valid = block.retained->valid;
      if (!block.retained->stamp.serves(wanted)) std::fill(valid.begin(), valid.end(), uint8_t{0});
      block.retained->stamp = {0, job->request_.transaction->fate(), true};
    }
    waiting_.push_back(job);
  }
  pump();
}

void Updater::pump() {
  for (;;) {
    Begin begin;
    {
      MutexLock lock(mutex_);
      if (!next(begin)) return;
    }
    if (begin.ended) {
      skip_rest(begin.ended);
    } else if (begin.prefetch) {
      begin_prefetch(begin);
    } else {
      advance(begin.tile);
    }
  }
}

// The job left waiting_: nobody else looks at its tiles that have not begun.
void Updater::skip_rest(const JobPtr& job) {
  STOKER_CHECK(job->next_ <= job->order_.size());
  const size_t tiles = job->order_.size() - job->next_;
  job->next_ = job->order_.size();
  if (tiles != 0)
    job->fail(fail(Code::cancelled,
                   "the update of block {} was cancelled, as its step was abandoned",
                   job->block_.layout.name()));
  tile_computed(*job, tiles);
  finish_job(job, tiles);
}

bool Updater::next(Begin& begin) {
  while (!waiting_.empty()) {
    JobPtr job = waiting_.front();
    if (job->next_ == job->order_.size() || job->cancelled()) {
      waiting_.pop_front();
      if (job->next_ == job->order_.size() && !job->order_.empty()) continue;
      begin.ended = std::move(job);
      return true;
    }
    begin.tile = tile_for(job, job->order_[job->next_]);
    if (!begin.tile) return false;
    ++job->next_;
    STOKER_CHECK(!begin.tile->job && !begin.tile->dropped);
    begin.tile->job = job;
    // Reads of a prefetched tile that are still in flight carry it on themselves.
    if (begin.tile->reading) continue;
    return true;
  }
  while (!wanted_.empty() && memory_.any_free()) {
    Wanted& wanted = wanted_.front();
    while (wanted.block->prefetched.contains(wanted.next)) ++wanted.next;
    begin.source = wanted.source.lock();
    if (wanted.next == wanted.block->layout.tiles() || !wanted.block->jobs.empty() ||
        (!begin.source && wanted.lost())) {
      wanted_.pop_front();
      continue;
    }
    if (begin.source) begin.source->jobs()->hold();
    begin.weights = wanted.weights;
    begin.tile = new_tile(*wanted.block, wanted.next++);
    begin.tile->prefetched = begin.prefetch = true;
    begin.tile->reading = true;
    STOKER_CHECK(wanted.block->prefetched.emplace(begin.tile->index, begin.tile).second);
    prefetched_.push_back(begin.tile);
    return true;
  }
  return false;
}

Updater::TilePtr Updater::tile_for(const JobPtr& job, uint64_t index) {
  Block& block = job->block_;
  if (const auto found = block.prefetched.find(index); found != block.prefetched.end()) {
    TilePtr tile = found->second;
    block.prefetched.erase(found);
    STOKER_CHECK(std::erase(prefetched_, tile) == 1);
    return tile;
  }
  if (!memory_.any_free() && !steal()) return nullptr;
  return new_tile(block, index);
}

Updater::TilePtr Updater::new_tile(Block& block, uint64_t index) {
  STOKER_CHECK(index < block.layout.tiles());
  auto tile = std::make_shared<Tile>();
  tile->block = &block;
  tile->index = index;
  tile->memory = memory_.take();
  tile->retained = block.retained != nullptr;
  ++active_;
  return tile;
}

// ---- prefetched tiles

size_t Updater::prefetch(Block& block, const std::shared_ptr<StepTransaction>& source,
                         bool weights) {
  // before the reads: a commit between makes the stamp stale, never the state
  const Stamp stamp = stamp_of(block, source);
  size_t before = 0;
  {
    MutexLock lock(mutex_);
    if (!block.jobs.empty() || block.retained) return 0;
    const bool current = block.prefetched_stamp.serves(stamp);
    const auto queued = std::find_if(wanted_.begin(), wanted_.end(),
                                     [&](const Wanted& each) { return each.block == &block; });
    if (queued != wanted_.end()) {
      if (current && queued->weights == weights) return 0;  // it keeps its turn
      wanted_.erase(queued);
    }
    if (!current) drop_tiles(block);
    block.prefetched_stamp = stamp;
    wanted_.push_back({&block, 0, source, stamp.staged, weights});
    before = prefetched_.size();
  }
  pump();
  MutexLock lock(mutex_);
  return prefetched_.size() > before ? prefetched_.size() - before : 0;
}

void Updater::begin_prefetch(Begin& begin) {
  const TilePtr& tile = begin.tile;
  tile->left = 1;
  tile->since_ns = Clock::real().now_ns();
  for (Plane plane : kStatePlanes) read(tile, plane, begin.source, Priority::prefetch);
  if (begin.weights) read(tile, Plane::weight, begin.source, Priority::prefetch);
  tile->has_state = true;
  if (begin.weights) tile->weights = place(*tile, Plane::weight).data;
  part_read(tile);
  let_go(begin.source);
}

void Updater::let_go(std::shared_ptr<StepTransaction>& source) {
  if (!source) return;
  const std::shared_ptr<JobCount> jobs = source->jobs();
  source.reset();
  jobs->end();
}

// A job has no memory although no tile of a job is in flight: prefetched tiles hold it all. The one
// used last gives way, of those in own places: a lent one would be of no use to the job.
bool Updater::steal() {
  // others are at work and will free theirs
  if (prefetched_.size() < memory_.places()) return false;
  const auto found = std::find_if(prefetched_.rbegin(), prefetched_.rend(),
                                  [this](const TilePtr& tile) REQUIRES(mutex_) {
                                    return !tile->dropped && !memory_.lent(tile->memory);
                                  });
  // dropped already: they pump when their reads are done
  if (found == prefetched_.rend()) return false;
  const TilePtr victim = *found;
  STOKER_CHECK(victim->block->prefetched.erase(victim->index) == 1);
  std::erase_if(wanted_, [&](const Wanted& each) { return each.block == victim->block; });
  drop(victim);
  return memory_.any_free();
}

// Its memory is free now, or when its reads are done.
void Updater::drop(const TilePtr& tile) {
  STOKER_CHECK(!tile->dropped && !tile->job);
  traffic_.prefetch_dropped.add(1);
  if (tile->reading) {
    tile->dropped = true;
    return;
  }
  STOKER_CHECK(std::erase(prefetched_, tile) == 1 && active_ > 0);
  give(tile);
  if (--active_ == 0) idle_.notify_all();
}

void Updater::drop_tiles(Block& block) {
  block.prefetched_stamp = {};
  for (const auto& [index, tile] : block.prefetched) drop(tile);
  block.prefetched.clear();
}

void Updater::give(const TilePtr& tile) {
  memory_.give(tile->memory);
  returned_.notify_all();
}

// ---- lent memory

size_t Updater::lend(const Slice& region) {
  size_t places = 0;
  {
    MutexLock lock(mutex_);
    places = memory_.lend(region);
  }
  if (places != 0) pump();
  return places;
}

void Updater::recall(const Slice& region) {
  {
    MutexLock lock(mutex_);
    if (!memory_.begin_recall(region)) return;
    const std::vector<TilePtr> prefetched = prefetched_;
    for (const TilePtr& tile : prefetched) {
      if (tile->dropped || !TileMemory::within(tile->memory, region)) continue;
      STOKER_CHECK(tile->block->prefetched.erase(tile->index) == 1);
      drop(tile);
    }
    returned_.wait(lock, [&]() REQUIRES(mutex_) { return memory_.end_recall(region); });
  }
  pump();  // a job that hoped for this memory may have to take a prefetched tile's now
}

void Updater::drop_prefetched() {
  {
    MutexLock lock(mutex_);
    wanted_.clear();
    std::vector<Block*> blocks;
    for (const TilePtr& tile : prefetched_) blocks.push_back(tile->block);
    for (Block* block : blocks) drop_tiles(*block);
  }
  pump();
}

// ---- retained state

bool Updater::retain(Block& block, Buffer memory) {
  {
    MutexLock lock(mutex_);
    if (!block.jobs.empty() || block.retained) return false;
    std::erase_if(wanted_, [&](const Wanted& each) { return each.block == &block; });
    drop_tiles(block);
    STOKER_CHECK(memory.size() >= block.layout.state_bytes());
    block.retained = std::make_unique<Retained>();
    block.retained->memory = std::move(memory);
    block.retained->valid.resize(block.layout.tiles());
  }
  pump();
  return true;
}

bool Updater::release(Block& block) {
  MutexLock lock(mutex_);
  if (!block.jobs.empty() || !block.retained) return false;
  block.retained.reset();
  return true;
}

void Updater::invalidate(Block& block) {
  {
    MutexLock lock(mutex_);
    if (block.jobs.empty()) drop_tiles(block);
    if (block.retained) block.retained->stamp = {};
  }
  pump();  // memory may be free now
}

}  // namespace stoker::offload
