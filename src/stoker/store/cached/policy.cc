#include "stoker/store/cached/policy.h"

#include <algorithm>

#include "stoker/base/check.h"

namespace stoker::cached {

constexpr unsigned kUsesMax = 3;

Policy::Policy(size_t places) : places_(places), small_places_(std::max<size_t>(1, places / 10)) {
  STOKER_CHECK(places > 0);
}

void Policy::hit(const BlockId& id) {
  Held& held = held_.at(id);
  held.uses = std::min(held.uses + 1, kUsesMax);
}

std::optional<BlockId> Policy::add(const BlockId& id) {
  STOKER_CHECK(!holds(id));
  std::optional<BlockId> evicted;
  if (held_.size() == places_) evicted = evict();
  Queue* queue = &small_;
  if (const auto ghost = ghosts_.find(id); ghost != ghosts_.end()) {
    ghost_.erase(ghost->second);
    ghosts_.erase(ghost);
    queue = &main_;
  }
  queue->push_front(id);
  held_.emplace(id, Held{queue, queue->begin()});
  return evicted;
}

void Policy::remove(const BlockId& id) {
  const auto held = held_.find(id);
  if (held == held_.end()) return;
  held->second.queue->erase(held->second.at);
  held_.erase(held);
}

BlockId Policy::evict() {
  if (small_.size() >= small_places_ || main_.empty()) {
    if (const auto evicted = evict_small()) return *evicted;
  }
  return evict_main();
}

// None: all that were in the small queue had been used, and moved on.
std::optional<BlockId> Policy::evict_small() {
  while (!small_.empty()) {
    const BlockId id = small_.back();
    Held& held = held_.at(id);
    if (held.uses == 0) {
      remove(id);
      remember(id);
      return id;
    }
    main_.splice(main_.begin(), small_, held.at);
    held = {&main_, main_.begin()};
  }
  return {};
}

BlockId Policy::evict_main() {
  for (;;) {
    const BlockId id = main_.back();
    Held& held = held_.at(id);
    if (held.uses == 0) {
      remove(id);
      return id;
    }
    --held.uses;
    main_.splice(main_.begin(), main_, held.at);
  }
}

void Policy::remember(const BlockId& id) {
  ghost_.push_front(id);
  ghosts_[id] = ghost_.begin();
  if (ghost_.size() <= places_) return;
  ghosts_.erase(ghost_.back());
  ghost_.pop_back();
}

}  // namespace stoker::cached
