#include "stoker/memory/lost.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace stoker {
namespace {

std::atomic<bool> any{false};
std::mutex mutex;

std::vector<Slice>& lost() {  // guarded by mutex
  static auto* slices = new std::vector<Slice>;
  return *slices;
}

}  // namespace

void lose(const Slice& memory) {
  std::lock_guard lock(mutex);
  lost().push_back(memory);
  any = true;
}

bool is_lost(const std::byte* data, size_t bytes) {
  if (!any.load(std::memory_order_relaxed)) return false;
  std::lock_guard lock(mutex);
  return std::any_of(lost().begin(), lost().end(), [&](const Slice& slice) {
    return slice.data < data + bytes && data < slice.data + slice.size;
  });
}

}  // namespace stoker
