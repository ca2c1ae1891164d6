// Slots: the blocks that lie in FAST. One thread opens, commits and closes; any thread reads.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "stoker/io/loop.h"
#include "stoker/memory/arena.h"
#include "stoker/memory/budget.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/cached/format.h"
#include "stoker/store/store.h"

namespace stoker::cached {

// How many slots there are, and how many of them are kept in use.
struct Room {
  uint64_t slots = 0;
  uint64_t usable = 0;
  uint64_t staged = 0;      // that one commit may fill: FAST writes them beside what is there
  uint64_t fast_bytes = 0;  // that FAST must have for it
};

inline constexpr uint64_t kCommitBytes = 64 * kMiB;

Room room_for(uint64_t usable, uint32_t block_bytes);
// The most that FAST has room for.
Room room_in(uint64_t fast_bytes, uint32_t block_bytes);

// One block, in memory.
struct Block {
  Block(const BlockId& name, Grant reserved, Buffer memory, size_t bytes)
      : id(name), place(std::move(reserved)), buffer(std::move(memory)), size(bytes) {}
  Slice slice() const { return buffer.slice().sub(0, size); }

  const BlockId id;
  const Grant place;
  const Buffer buffer;
  const size_t size;
};
using BlockPtr = std::shared_ptr<Block>;

// One block that goes into a slot.
struct Fill {
  uint32_t slot = 0;
  BlockPtr block;
};

class Slots {
 public:
  // Takes up what FAST holds, if it is of the same shape and of the same SLOW; else begins empty.
  static Result<std::unique_ptr<Slots>> open(std::unique_ptr<Store> fast, const Header& header);

  // In use when it was opened.
  const std::vector<Record>& found() const { return found_; }
  Future<void> read(uint64_t slot, uint64_t at, Slice into, const ReadOptions& options) {
    return fast_->read(slots_key(slot), slot % kSlotsPerObject * header_.block_bytes + at, into,
                       options);
  }
  // One durable commit; waits for it. `others`: what is in use beside the fills, asked for if the
  // map is written anew.
  Status commit(const std::vector<Fill>& fills, const std::vector<uint32_t>& freed,
                const std::vector<Record>& others);
  // Whether the next commit of so many records writes the map anew.
  bool rewrites(size_t records) const { return records_ + records > 4096 + 2 * header_.slots; }

 private:
  Slots(std::unique_ptr<Store> fast, const Header& header)
      : fast_(std::move(fast)), header_(header) {}
  Result<Map> load();
  Status format();

  const std::unique_ptr<Store> fast_;
  const Header header_;
  std::vector<Record> found_;
  uint64_t records_ = 0;  // in the map
};

}  // namespace stoker::cached
