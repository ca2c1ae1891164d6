// What stores that read many ranges by one call have in common.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "stoker/base/mutex.h"
#include "stoker/store/store.h"

namespace stoker {

// invalid_argument names the first piece that is of no key, or outside the memory.
Status check_pieces(size_t keys, std::span<const Piece> pieces, size_t memory);

// Counts reads down, and keeps the error of the first piece that failed. Any thread.
class Countdown {
 public:
  explicit Countdown(size_t reads) : left_(reads), first_failed_(SIZE_MAX) {}

  // Done with the last read.
  Future<void> future() const { return promise_.future(); }
  void done(size_t piece, const Status& status);

 private:
  Mutex mutex_;
  size_t left_ GUARDED_BY(mutex_);
  size_t first_failed_ GUARDED_BY(mutex_);
  std::optional<Error> error_ GUARDED_BY(mutex_);
  Promise<void> promise_;
};

}  // namespace stoker
