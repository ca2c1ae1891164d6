// Arena: one reserved, pre-faulted region in large pages, out of which Buffers are cut.
//
// Large pages matter more than anything else here: with O_DIRECT into registered buffers a read
// runs about three times as fast from 2 MiB pages as from 4 KiB pages. So an arena takes hugetlbfs
// pages where enough are reserved, else asks for transparent huge pages. It says what it got
// (`pages()`), and never falls back silently.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "stoker/base/mutex.h"
#include "stoker/base/result.h"
#include "stoker/memory/budget.h"
#include "stoker/memory/slice.h"

namespace stoker {

class Arena;

// Owns a piece of an Arena; move-only; gives it back when destroyed (from any thread). Must not
// outlive the Arena.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  std::byte* data() const { return slice_.data; }
  size_t size() const { return slice_.size; }
  Slice slice() const { return slice_; }
  explicit operator bool() const { return arena_ != nullptr; }

 private:
  friend class Arena;
  Buffer(Arena* arena, Slice slice) : arena_(arena), slice_(slice) {}
  Arena* arena_ = nullptr;
  Slice slice_;
};

struct PageReport {
  enum class Kind { hugetlb, transparent, small } kind = Kind::small;
  uint64_t large_bytes = 0;  // of the arena's bytes, how many lie in 2 MiB pages
  uint64_t total_bytes = 0;
};

// Any thread.
class Arena {
 public:
  // Reserves and pre-faults `bytes` (rounded up to 2 MiB), drawn on `budget`. over_budget where the
  // machine has not the memory.
  static Result<std::unique_ptr<Arena>> make(uint64_t bytes, Budget& budget);
  // Over memory that this processor cannot touch (a GPU's), aligned to 4 KiB; `release` is called
  // at the end.
  static std::unique_ptr<Arena> over(std::byte* data, uint64_t bytes, Grant grant,
                                     std::function<void()> release);
  // every Buffer must be back; with lost memory (lost.h) it stays mapped until the process ends
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // First fit at 4 KiB alignment, of `bytes` rounded up to 4 KiB; over_budget if no free range is
  // large enough (asks nobody to wait).
  Result<Buffer> take(size_t bytes);

  int32_t id() const { return id_; }  // process-wide, never reused
  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  uint64_t used() const;
  uint64_t peak() const;
  uint64_t largest_free() const;
  PageReport pages() const { return pages_; }
  bool foreign() const { return release_ != nullptr; }  // made by over()

 private:
  friend class Buffer;
  Arena(std::byte* data, uint64_t size, PageReport pages, Grant grant,
        std::function<void()> release = nullptr);
  void give_back(const Slice& slice);

  std::byte* const data_;
  const uint64_t size_;
  const PageReport pages_;
  const int32_t id_;
  Grant grant_;
  const std::function<void()> release_;
  mutable Mutex mutex_;
  std::map<uint64_t, uint64_t> free_ GUARDED_BY(mutex_);  // offset -> bytes, coalesced
  // of used_: in Buffers that are gone and never come back (lost.h)
  uint64_t lost_ GUARDED_BY(mutex_) = 0;
  uint64_t used_ GUARDED_BY(mutex_) = 0;
  uint64_t peak_ GUARDED_BY(mutex_) = 0;
};

}  // namespace stoker
