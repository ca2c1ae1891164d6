#include "stoker/curm/reserves.h"

#include "stoker/base/bytes.h"

namespace stoker::curm {

bool Reserves::take(uint64_t stripe, uint64_t bytes) {
  Segment& segment = segments_[stripe];
  segment.taken += bytes;
  window_ += bytes;
  const bool fits = segment.used + bytes <= segment.size;
  if (fits) segment.used += bytes;
  if (window_ >= limits_.window_bytes) close_window();
  return fits;
}

void Reserves::folded(uint64_t stripe) {
  if (const auto found = segments_.find(stripe); found != segments_.end()) found->second.used = 0;
}

void Reserves::close_window() {
  window_ = 0;
  for (auto next = segments_.begin(); next != segments_.end();) {
    Segment& segment = next->second;
    segment.hot = segment.taken >= limits_.unit_bytes ? segment.hot + 1 : 0;
    segment.calm = segment.taken < limits_.unit_bytes / 4 ? segment.calm + 1 : 0;
    if (segment.hot >= 2) {
      const uint64_t wanted = std::min(align_up(4 * segment.taken, limits_.unit_bytes), limits_.stripe_bytes);
      if (wanted > segment.size) resize(segment, wanted);
    } else if (segment.calm >= 4) {
      const uint64_t half = segment.size <= limits_.unit_bytes ? 0 : align_up(segment.size / 2, limits_.unit_bytes);
      resize(segment, std::max(half, align_up(segment.used, limits_.unit_bytes)));
      segment.calm = 0;
    }
    segment.taken = 0;
    next = segment.size == 0 && segment.hot == 0 ? segments_.erase(next) : std::next(next);
  }
}

void Reserves::resize(Segment& segment, uint64_t size) {
  bytes_ += size - segment.size;
  segment.size = size;
  peak_ = std::max(peak_, bytes_);
}

uint64_t Reserves::bytes(uint64_t stripe) const {
  const auto found = segments_.find(stripe);
  return found == segments_.end() ? 0 : found->second.size;
}

}  // namespace stoker::curm
