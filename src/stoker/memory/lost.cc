#include "stoker/memory/lost.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "stoker/base/mutex.h"

namespace stoker {
namespace {

std::atomic<bool> any{false};
Mutex mutex;

std::vector<Slice>& lost() REQUIRES(mutex) {
  static auto* slices = new std::vector<Slice>;
  return *slices;
}

}  // namespace

void lose(const Slice& memory) {
  MutexLock lock(mutex);
  lost().push_back(memory);
  any = true;
}

bool is_lost(const std::byte* data, size_t bytes) {
  if (!any.load(std::memory_order_relaxed)) return false;
  MutexLock lock(mutex);
  return std::any_of(lost().begin(), lost().end(), [&](const Slice& slice) {
    return slice.data < data + bytes && data < slice.data + slice.size;
  });
}

}  // namespace stoker
