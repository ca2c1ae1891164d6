#include "stoker/data/spares.h"

#include <algorithm>
#include <utility>

namespace stoker::data {
namespace {

constexpr uint64_t kPage = 4096;

}  // namespace

Slot Spares::take(uint64_t bytes) {
  if (arena_ != nullptr) {
    if (auto taken = arena_->take(bytes)) return Slot(std::move(*taken));
  }
  {
    MutexLock lock(mutex_);
    const auto found = kept_.lower_bound(bytes);
    // Much larger ones stay for those that need them.
    if (found != kept_.end() && found->first <= std::max(2 * bytes, 16 * kPage)) {
      Slot spare = std::move(found->second);
      kept_.erase(found);
      return spare;
    }
  }
  return Slot(AlignedBytes::faulted(std::max(bytes, kPage)));
}

void Spares::give_back(Slot memory) {
  // The arena has it again at the end of this; what was lost is kept back for good.
  if (memory.data() == nullptr || memory.of_arena() || memory.lost()) return;
  MutexLock lock(mutex_);
  const uint64_t bytes = memory.size();
  kept_.emplace(bytes, std::move(memory));
  if (kept_.size() > most_) kept_.erase(kept_.begin());
}

}  // namespace stoker::data
