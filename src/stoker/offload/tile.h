// What the pipeline knows of a block, and of one tile of it in flight.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "stoker/memory/arena.h"
#include "stoker/offload/block.h"
#include "stoker/offload/update_job.h"

namespace stoker::offload {

// Which version some state in memory is of: a committed one, or what a transaction holds (before
// and after its commit).
struct Stamp {
  Version version = 0;
  std::shared_ptr<CommitFate> staged;
  bool known = false;

  // may state of this stamp be used where `wanted` is asked for?
  bool serves(const Stamp& wanted) const;
};

// One tile between the start of its reads and the end of its writes. `job` is null while it is only
// prefetched.
struct Tile {
  Block* block = nullptr;
  uint64_t index = 0;
  Slice memory;                    // m, v, weights, remainder; of the Updater's TileMemory
  std::shared_ptr<UpdateJob> job;  // guarded by the Updater's mutex until the tile belongs to a job
  bool reading = false;            // reads are in flight; guarded by the Updater's mutex
  // prefetched, but of no use any more; guarded by the Updater's mutex
  bool dropped = false;
  bool prefetched = false;
  bool retained = false;  // its state lies in the block's retained memory
  bool has_state = false;
  std::byte* weights = nullptr;  // the old weights in `memory`, once they are read
  // reads, later writes, in flight; + 1 while they are being issued
  std::atomic<int> left{0};
  std::atomic<bool> failed{false};
  std::array<Status, kPlanes> status;  // of each plane's read or write
  uint64_t since_ns = 0;               // when they were issued
};

// Keeps a block's state in memory for good; written through.
struct Retained {
  Buffer memory;               // r, m, v planes one after the other
  std::vector<uint8_t> valid;  // by tile
  Stamp stamp;                 // of all valid tiles
};

struct Block {
  explicit Block(BlockLayout the_layout) : layout(std::move(the_layout)) {}
  const BlockLayout layout;
  // All guarded by the Updater's mutex. The first of `jobs` is running; the others wait for it.
  std::deque<std::shared_ptr<UpdateJob>> jobs;
  std::map<uint64_t, std::shared_ptr<Tile>> prefetched;
  Stamp prefetched_stamp;
  std::unique_ptr<Retained> retained;
};

// Weights, remainder, m and v of any block: 12 bytes an element where moments are float32.
uint64_t tile_memory_bytes(uint32_t tile_elements, optim::MomentType moments);
// Where a plane's part of the tile lies: in the tile's memory, or for retained state in the
// block's.
Slice place(const Tile& tile, Plane plane);
// m or v there, from an element of the tile on: with 8-bit moments the first one of a group.
optim::KeptMoment kept(const Tile& tile, Plane plane, uint64_t element);
// The end of the elements from `from` to `to` whose moments lie in one piece from there on: 8-bit
// ones are cut into cells.
uint64_t kept_together(const Tile& tile, uint64_t from, uint64_t to);

}  // namespace stoker::offload
