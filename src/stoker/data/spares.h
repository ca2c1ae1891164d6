// Memory of batches that nobody has any more, for the next ones: fresh memory is slow to touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "stoker/base/mutex.h"
#include "stoker/store/blocking_io.h"

namespace stoker::data {

// Any thread.
class Spares {
 public:
  // most: pieces that are kept.
  explicit Spares(size_t most) : most_(most) {}

  // At least so many bytes.
  AlignedBytes take(uint64_t bytes);
  void give_back(AlignedBytes memory);

 private:
  const size_t most_;
  Mutex mutex_;
  std::multimap<uint64_t, AlignedBytes> kept_ GUARDED_BY(mutex_);  // by bytes
};

}  // namespace stoker::data
