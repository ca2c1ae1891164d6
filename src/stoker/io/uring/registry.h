// UringRegistry: which files and which arenas the ring knows by number. So the kernel need not look
// up the file, nor pin the pages, at each transfer. Both tables start empty and change at any time,
// also while transfers are on their way.
#pragma once

#include <liburing.h>

#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/io/op.h"
#include "stoker/memory/arena.h"

namespace stoker {

// Any thread. Memory that cannot be registered is used unregistered; that is logged once and never
// an error.
class UringRegistry {
 public:
  explicit UringRegistry(io_uring* ring) : ring_(ring) {}

  void start();  // once the ring exists
  bool has_memory() const { return has_memory_; }

  // files beyond the table go by their descriptor: has_file() tells
  Status add_file(FileId id, int fd);
  void remove_file(FileId id);
  bool has_file(FileId id) const { return static_cast<uint32_t>(id) < files_; }

  void add(const Arena& arena);
  void remove(const Arena& arena);
  // The slot of the table in which [bytes.data, bytes.data + bytes.size) lies, or -1. Of the
  // polling thread; it takes the lock after a change only.
  int find(const Slice& bytes);

 private:
  struct Region {
    std::byte* data;
    uint64_t size;
    uint32_t first_slot;
  };
  int take_slots(uint32_t count) REQUIRES(mutex_);  // adjacent free ones, marked as taken, or -1
  void free_slots(uint32_t first, uint32_t count) REQUIRES(mutex_);

  io_uring* const ring_;
  uint32_t files_ = 0;       // size of the file table; 0: none
  bool has_memory_ = false;  // there is a table of memory
  Mutex mutex_;
  // taken; empty: no table. Its size is fixed by start().
  std::vector<bool> slots_ GUARDED_BY(mutex_);
  std::unordered_map<int32_t, Region> regions_ GUARDED_BY(mutex_);  // by Arena::id()
  bool refusal_logged_ GUARDED_BY(mutex_) = false;
  std::atomic<bool> changed_{false};           // regions_ did
  std::unordered_map<int32_t, Region> known_;  // of the polling thread: as of the last change
};

}  // namespace stoker
