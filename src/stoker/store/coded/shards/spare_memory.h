// SpareMemory: large pieces of memory that nobody needs any more, for whoever needs as much next.
// The kernel zeroes each page of fresh memory, which takes longer than what is done with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "stoker/base/mutex.h"
#include "stoker/memory/budget.h"
#include "stoker/store/blocking_io.h"

namespace stoker::coded {

class SpareMemory;

// Some bytes, and the memory that they are a part of, or all of.
struct SpareBytes {
  std::shared_ptr<const AlignedBytes> memory;
  std::span<std::byte> bytes;
};

// Memory like AlignedBytes, which at the end of this stays with the SpareMemory it came from.
class SparePiece {
 public:
  SparePiece() = default;
  SparePiece(SpareMemory& home, SpareBytes bytes) : home_(&home), bytes_(std::move(bytes)) {}
  SparePiece(SparePiece&& other) noexcept;
  SparePiece& operator=(SparePiece&& other) noexcept;
  ~SparePiece();

  std::byte* data() const { return bytes_.bytes.data(); }
  size_t size() const { return bytes_.bytes.size(); }
  Slice slice() const { return {data(), size(), kLosableHeap}; }
  std::span<std::byte> span() const { return bytes_.bytes; }
  bool lost() const { return is_lost(data(), size()); }

 private:
  void give_back() noexcept;

  SpareMemory* home_ = nullptr;
  SpareBytes bytes_;
};

// Any thread. What is in use is its user's to draw on the Budget. What is kept is within a share
// that is drawn as this is made; where that is refused nothing is kept.
class SpareMemory {
 public:
  static constexpr size_t kLeast = 256 * kKiB;  // smaller pieces are not kept
  static constexpr uint64_t kMost = 96 * kMiB;  // kept, or a sixteenth of the cap if that is less

  explicit SpareMemory(Budget& budget);
  SpareMemory(const SpareMemory&) = delete;
  SpareMemory& operator=(const SpareMemory&) = delete;

  // At least so many bytes, and no more than their large pages have. Pieces that fill a large page
  // share one: a transfer into small pages is cut into many. What is in them may be anything.
  SparePiece take(size_t bytes);
  // Fresh pages come as they are touched: for what may be touched in part only.
  SparePiece take_sparse(size_t bytes);
  // As the end of a SparePiece does it. What was kept longest goes for it.
  void give_back(SpareBytes piece);
  uint64_t kept_bytes() const;

 private:
  std::optional<SpareBytes> kept(size_t bytes);
  SpareBytes cut(size_t bytes);

  const Grant share_;
  mutable Mutex mutex_;
  uint64_t kept_bytes_ GUARDED_BY(mutex_) = 0;
  std::list<SpareBytes> kept_ GUARDED_BY(mutex_);  // the newest last
};

}  // namespace stoker::coded
