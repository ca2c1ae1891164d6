#include "stoker/store/cached/ahead.h"

#include "stoker/base/check.h"

namespace stoker::cached {
namespace {

constexpr uint64_t kPositions = 4096;   // that one looks ahead
constexpr uint64_t kStaleAhead = 4096;  // a prefetch so far back is given up

}  // namespace

void Ahead::stalled() {
  STOKER_CHECK(depth_ <= most_);
  depth_ = std::min(most_, depth_ + 1);
}

std::optional<Ahead::Due> Ahead::due(const Followers& followers) {
  std::optional<Due> first;
  uint64_t first_apart = kPositions;
  for (const auto& [name, follower] : followers.all()) {
    if (!follower->ahead()) continue;
    Cursor& cursor = cursors_[follower.get()];
    if (cursor.stopped) continue;
    if (cursor.position < follower->position()) {
      cursor.position = follower->position();
      cursor.loaded = false;
    }
    const uint64_t apart = cursor.position - follower->position();
    if (apart >= first_apart) continue;
    if (!cursor.loaded) {
      cursor.parts = follower->parts(cursor.position);
      cursor.next = 0;
      cursor.loaded = true;
    }
    if (cursor.parts.empty()) continue;  // the plan ends here
    STOKER_CHECK(cursor.next < cursor.parts.size());
    first_apart = apart;
    first = Due{follower, cursor.position, cursor.parts[cursor.next],
                cursor.position < cursor.again_until};
  }
  return first;
}

void Ahead::advance(const Due& due) {
  Cursor& cursor = cursors_.at(due.follower.get());
  STOKER_CHECK(cursor.loaded && cursor.position == due.position);
  if (++cursor.next < cursor.parts.size()) return;
  ++cursor.position;
  cursor.loaded = false;
}

void Ahead::stop(const Follower& follower) {
  const auto at = cursors_.find(&follower);
  if (at != cursors_.end()) at->second.stopped = true;
}

void Ahead::failed(const Prefetch& prefetch) {
  const auto at = cursors_.find(prefetch.follower.get());
  if (at == cursors_.end() || prefetch.again) return;
  Cursor& cursor = at->second;
  cursor.again_until = std::max({cursor.again_until, cursor.position, prefetch.position + 1});
  if (prefetch.position > cursor.position) return;
  cursor.position = prefetch.position;
  cursor.loaded = false;
}

bool Ahead::plans(const Followers& followers, const BlockId& id) const {
  return most_ > 0 && std::ranges::any_of(followers.all(), [&](const auto& each) {
           return each.second->ahead() && each.second->names(id);
         });
}

bool Ahead::has(const Prefetch& prefetch) const {
  const auto [begin, end] = prefetches_.equal_range(prefetch.id);
  return std::any_of(begin, end, [&](const auto& each) { return each.second.get() == &prefetch; });
}

PrefetchPtr Ahead::covering(const BlockId& id, uint64_t begin, uint64_t bytes) const {
  const auto [first, end] = prefetches_.equal_range(id);
  for (auto at = first; at != end; ++at) {
    const Prefetch& each = *at->second;
    if (!each.part || (each.begin <= begin && begin + bytes <= each.begin + each.bytes))
      return at->second;
  }
  return nullptr;
}

void Ahead::read(Prefetch& prefetch, uint64_t bytes) {
  prefetch.left -= std::min(prefetch.left, bytes);
  if (prefetch.left == 0 || !prefetch.part) remove(prefetch);
}

void Ahead::remove(const Prefetch& prefetch) {
  const auto [begin, end] = prefetches_.equal_range(prefetch.id);
  for (auto at = begin; at != end; ++at) {
    if (at->second.get() != &prefetch) continue;
    prefetches_.erase(at);
    return;
  }
}

// Of a whole block nothing is lost: it stays where it is, as long as the policy keeps it.
template <typename Which>
uint64_t Ahead::drop_if(Which which) {
  uint64_t in_vain = 0;
  std::erase_if(prefetches_, [&](const auto& each) {
    const Prefetch& prefetch = *each.second;
    if (!which(prefetch)) return false;
    if (prefetch.part && prefetch.arrived) in_vain += prefetch.left;
    return true;
  });
  return in_vain;
}

uint64_t Ahead::drop(const BlockId& id) {
  return drop_if([&](const Prefetch& each) { return each.id == id; });
}

bool Ahead::drop_whole(const BlockId& id) {
  const auto [begin, end] = prefetches_.equal_range(id);
  for (auto at = begin; at != end; ++at) {
    if (at->second->part) continue;
    prefetches_.erase(at);
    return true;
  }
  return false;
}

void Ahead::drop_whole() {
  drop_if([](const Prefetch& each) { return !each.part; });
}

uint64_t Ahead::drop(const Follower& follower) {
  cursors_.erase(&follower);
  return drop_if([&](const Prefetch& each) { return each.follower.get() == &follower; });
}

// Readers keep the order by some positions only. Where the depth can grow no more, less patience
// is left for what they went by.
uint64_t Ahead::drop_passed() {
  const uint64_t patience = depth_ == most_ && !room() ? kStaleAhead / 4 : kStaleAhead;
  return drop_if(
      [&](const Prefetch& each) { return each.follower->position() > each.position + patience; });
}

uint64_t Ahead::unread_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [id, each] : prefetches_)
    if (each->arrived) bytes += each->bytes;
  return bytes;
}

uint64_t Ahead::unread_bytes(const Follower& follower) const {
  uint64_t bytes = 0;
  for (const auto& [id, each] : prefetches_)
    if (each->arrived && each->follower.get() == &follower) bytes += each->bytes;
  return bytes;
}

}  // namespace stoker::cached
