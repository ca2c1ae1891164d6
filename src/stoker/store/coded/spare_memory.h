// SpareMemory: large pieces of memory that nobody needs any more, for whoever needs as much next.
// The kernel zeroes each page of fresh memory, which takes longer than what is done with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <utility>

#include "stoker/base/mutex.h"
#include "stoker/memory/budget.h"
#include "stoker/store/blocking_io.h"

namespace stoker::coded {

class SpareMemory;

// Memory like AlignedBytes, which at the end of this stays with the SpareMemory it came from.
class SparePiece {
 public:
  SparePiece() = default;
  SparePiece(SpareMemory& home, AlignedBytes bytes) : home_(&home), bytes_(std::move(bytes)) {}
  SparePiece(SparePiece&& other) noexcept = default;
  SparePiece& operator=(SparePiece&& other) noexcept;
  ~SparePiece();

  std::byte* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }
  Slice slice() const { return bytes_.slice(); }
  std::span<std::byte> span() const { return bytes_.span(); }
  bool lost() const { return bytes_.lost(); }

 private:
  void give_back() noexcept;

  SpareMemory* home_ = nullptr;
  AlignedBytes bytes_;
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

  // At least so many bytes, and no more than their large pages have. What is in them may be
  // anything.
  SparePiece take(size_t bytes);
  // Fresh pages come as they are touched: for what may be touched in part only.
  SparePiece take_sparse(size_t bytes);
  // As the end of a SparePiece does it. What was kept longest goes for it.
  void give_back(AlignedBytes bytes);
  uint64_t kept_bytes() const;

 private:
  std::optional<AlignedBytes> kept(size_t bytes);

  const Grant share_;
  mutable Mutex mutex_;
  uint64_t kept_bytes_ GUARDED_BY(mutex_) = 0;
  std::list<AlignedBytes> kept_ GUARDED_BY(mutex_);  // the newest last
};

}  // namespace stoker::coded
