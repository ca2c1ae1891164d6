// Updater: the pipeline disk -> tile memory -> kernel -> the same memory -> disk.
//
// Each tile goes through: memory free -> reads in flight (Store) -> compute (one pool task: hash,
// kernel, checksums and queueing of the writes) -> writes in flight (Store) -> memory free. Tiles
// of a job begin in order; how many are in flight is bounded by the tile memories: own ones, taken
// once from the arena, and lent ones. Jobs come before prefetches; jobs on one block run one after
// the other. Nothing here waits, except close() and recall().
//
// Threads: callers, pool threads and Store threads all enter; mutex_ is never held across a call of
// the Store or a completion. A job or tile that has ended touches nothing of the Updater after
// leave().
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/base/pool.h"
#include "stoker/offload/tile.h"
#include "stoker/offload/tile_memory.h"

namespace stoker::offload {

class Updater {
 public:
  // `seed`: of the draws that round lossy moments.
  Updater(Store& store, Pool& pool, Traffic& traffic, std::vector<Buffer> memory, uint64_t seed);
  ~Updater() { close(); }

  // The request is valid (Session checks it) and its transaction counts the job already.
  std::shared_ptr<UpdateJob> start(Block& block, UpdateRequest request);
  // Starts reading state for a later update as tile memory is, and becomes, free. Returns how many
  // tiles began at once.
  size_t prefetch(Block& block, const std::shared_ptr<StepTransaction>& source, bool weights);
  void drop_prefetched();

  // Arena memory that the caller has no use for now: each tile that fits may live there once. How
  // many fit.
  size_t lend(const Slice& region);
  // Waits until no tile lives there (what was only prefetched into it is dropped). Nothing happens
  // if it is not lent.
  void recall(const Slice& region);

  // Both between updates of that block only: false (and nothing done) while one runs.
  bool retain(Block& block, Buffer memory);
  bool release(Block& block);
  void invalidate(Block& block);

  void close();  // waits until nothing is in flight

 private:
  using JobPtr = std::shared_ptr<UpdateJob>;
  using TilePtr = std::shared_ptr<Tile>;
  struct Wanted {
    Block* block;
    uint64_t next;  // tile
    // A prefetch keeps no transaction alive. One that has gone left its bytes in the store, if it
    // was committed.
    std::weak_ptr<StepTransaction> source;
    std::shared_ptr<CommitFate> fate;  // of the source; null: the committed version
    bool weights;

    bool lost() const { return fate && fate->version == 0 && source.expired(); }
  };
  struct Begin {  // what pump() does next: begin this tile, or end this job that has no tile left
    TilePtr tile;
    JobPtr ended;
    std::shared_ptr<StepTransaction> source;
    bool weights = false;
    bool prefetch = false;  // said under mutex_: a job may take the tile a moment later
  };

  Stamp stamp_of(const Block& block, const std::shared_ptr<StepTransaction>& source);
  void activate(const JobPtr& job);  // its block is free: it may begin
  void pump();                       // begins all that can begin
  bool next(Begin& begin) REQUIRES(mutex_);
  // null: no memory
  TilePtr tile_for(const JobPtr& job, uint64_t index) REQUIRES(mutex_);
  void skip_rest(const JobPtr& job);
  // memory is free
  TilePtr new_tile(Block& block, uint64_t index) REQUIRES(mutex_);
  bool steal() REQUIRES(mutex_);
  // its block forgets it apart from this
  void drop(const TilePtr& tile) REQUIRES(mutex_);
  void drop_tiles(Block& block) REQUIRES(mutex_);
  void give(const TilePtr& tile) REQUIRES(mutex_);
  void begin_prefetch(Begin& begin);
  // drops the share, then counts it out
  static void let_go(std::shared_ptr<StepTransaction>& source);

  void advance(const TilePtr& tile);  // reads what is missing, then computes
  void read(const TilePtr& tile, Plane plane, const std::shared_ptr<StepTransaction>& source,
            Priority priority);
  void part_read(const TilePtr& tile);  // one read less in flight
  void reads_done(const TilePtr& tile);
  void compute(const TilePtr& tile);
  void run_kernel(const Tile& tile);
  void update_elements(const Tile& tile, const Segment& segment, const std::byte* in,
                       std::byte* out, uint64_t from, uint64_t to) const;
  void write_planes(const TilePtr& tile);
  void part_written(const TilePtr& tile);               // one write less in flight
  void fail_job(const Tile& tile, const char* action);  // with the first plane that failed
  void tile_computed(UpdateJob& job, size_t tiles);
  void finish_tile(const TilePtr& tile);
  void finish_job(const JobPtr& job, size_t tiles);
  void leave();

  Store& store_;
  Pool& pool_;
  Traffic& traffic_;
  const uint64_t seed_;
  Mutex mutex_;
  CondVar idle_;      // active_ became 0
  CondVar returned_;  // a tile gave its memory back
  TileMemory memory_ GUARDED_BY(mutex_);
  // with tiles that have not begun, oldest first
  std::deque<JobPtr> waiting_ GUARDED_BY(mutex_);
  std::deque<Wanted> wanted_ GUARDED_BY(mutex_);  // prefetches with tiles that have not begun
  // all that no job took yet, oldest first (those dropped while reading included)
  std::vector<TilePtr> prefetched_ GUARDED_BY(mutex_);
  size_t active_ GUARDED_BY(mutex_) = 0;  // jobs + tiles alive
};

}  // namespace stoker::offload
