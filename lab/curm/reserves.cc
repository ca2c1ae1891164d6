#include "curm/reserves.h"

#include <algorithm>
#include <utility>

#include "stoker/base/bytes.h"

namespace stoker::curm {
namespace {

constexpr int kHot = 2, kCalm = 4;  // windows in a row, before a reserve grows or shrinks
constexpr uint64_t kWindows = 4;    // whose updates it has room for

}  // namespace

void Reserves::take(uint64_t stripe, uint64_t bytes, bool may_have) {
  if (may_have) rooms_[stripe].taken += bytes;
  window_ += bytes;
  if (window_ >= limits_.window_bytes) close_window();
}

void Reserves::close_window() {
  window_ = 0;
  for (auto& [stripe, room] : rooms_) measure(room);
  peak_ = std::max(peak_, bytes_);
  std::erase_if(rooms_,
                [](const auto& each) { return each.second.size == 0 && each.second.hot == 0; });
}

void Reserves::measure(Room& room) {
  const uint64_t taken = std::exchange(room.taken, 0);
  room.hot = taken >= limits_.unit_bytes ? room.hot + 1 : 0;
  room.calm = taken < limits_.unit_bytes / 4 ? room.calm + 1 : 0;
  if (room.hot >= kHot) {
    resize(room, std::max(room.size, std::min(align_up(kWindows * taken, limits_.unit_bytes),
                                              limits_.stripe_bytes)));
  } else if (room.calm == kCalm) {
    room.calm = 0;
    resize(room, room.size <= limits_.unit_bytes ? 0 : align_up(room.size / 2, limits_.unit_bytes));
  }
}

void Reserves::resize(Room& room, uint64_t size) {
  bytes_ += size - room.size;
  room.size = size;
}

uint64_t Reserves::bytes(uint64_t stripe) const {
  const auto found = rooms_.find(stripe);
  return found == rooms_.end() ? 0 : found->second.size;
}

}  // namespace stoker::curm
