// Blocks: what the server lends to its clients. Whole blocks of objects, under their tags, in one
// piece of shared memory that only the server can write to.
//
// A slot is free, or being filled by one thread, or full. A full one that nobody has pinned is
// filled anew when another block needs it, the one used longest ago (about: a clock) first.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/memory/budget.h"
#include "stoker/store/remote/socket.h"

namespace stoker::remote {

std::string block_name(std::string_view key, std::string_view tag, uint64_t index);

// Any thread.
class Blocks {
 public:
  // `bytes` is rounded down to blocks; none at all is allowed.
  static Result<std::unique_ptr<Blocks>> make(uint64_t bytes, uint32_t block_bytes, Budget& budget);

  enum class Found : uint8_t {
    full,     // pinned
    filling,  // pinned; wait() says how it ended
    empty,    // pinned; the caller fills it and calls filled()
    none,     // nothing was pinned: read it in another way
  };
  struct Place {
    Found found = Found::none;
    uint32_t slot = kNoSlot;
  };
  // `eager`: it is worth a slot although nobody wanted it before.
  Place find(const std::string& name, bool eager);
  // The slots of all of them, pinned; none, and nothing was pinned, unless all are full.
  std::vector<uint32_t> find_full(const std::vector<std::string>& names);
  void filled(uint32_t slot, bool whole);  // the pin stays
  bool wait(uint32_t slot);                // whether it is whole
  void unpin(uint32_t slot);
  void forget(const std::string& name);

  uint64_t offset(uint32_t slot) const { return uint64_t{slot} * block_bytes_; }
  Slice memory(uint32_t slot) const { return {mapping_.data() + offset(slot), block_bytes_}; }
  uint32_t block_bytes() const { return block_bytes_; }
  uint64_t bytes() const { return mapping_.size(); }
  size_t slots() const { return slots_.size(); }
  int fd() const { return fd_.get(); }
  struct Counts {
    uint64_t hits = 0, fills = 0, pins = 0;
  };
  Counts counts() const;

 private:
  struct Slot {
    std::string name;  // empty: free, or nobody shall find it
    uint32_t pins = 0;
    bool filling = false, whole = false, used = false;
  };
  Blocks(Fd fd, Mapping mapping, Grant grant, uint32_t block_bytes);
  void drop(uint32_t slot) REQUIRES(mutex_);

  const Fd fd_;
  const Mapping mapping_;
  const Grant grant_;
  const uint32_t block_bytes_;
  mutable Mutex mutex_;  // guards what follows
  CondVar filled_;
  std::vector<Slot> slots_;
  size_t hand_ = 0;
  std::unordered_map<std::string, uint32_t> by_name_;
  std::unordered_set<std::string> wanted_once_;
  std::deque<std::string> wanted_order_;  // of wanted_once_
  Counts counts_;
};

}  // namespace stoker::remote
