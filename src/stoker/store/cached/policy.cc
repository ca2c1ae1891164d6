#include "stoker/store/cached/policy.h"

#include <algorithm>

#include "stoker/base/check.h"
#include "stoker/store/cached/followers.h"

namespace stoker::cached {

constexpr unsigned kUsesMax = 3;

Policy::Policy(size_t places) : places_(places), small_places_(std::max<size_t>(1, places / 10)) {
  STOKER_CHECK(places > 0);
}

std::vector<BlockId> Policy::held() const {
  std::vector<BlockId> ids;
  ids.reserve(held_.size());
  for (const auto& [id, held] : held_) ids.push_back(id);
  return ids;
}

void Policy::hit(const BlockId& id) {
  Held& held = held_.at(id);
  held.uses = std::min(held.uses + 1, kUsesMax);
}

bool Policy::admits(std::optional<uint64_t> next) const {
  if (held_.size() < places_ || planned_.size() < held_.size()) return true;
  const uint64_t last = planned_.rbegin()->first;
  return next ? *next < last : last == kNever;
}

std::optional<BlockId> Policy::add(const BlockId& id, std::optional<uint64_t> next) {
  STOKER_CHECK(!holds(id) && admits(next));
  std::optional<BlockId> evicted;
  if (held_.size() == places_) evicted = evict();
  enter(id, next);
  STOKER_CHECK(held_.size() <= places_ && is_consistent());
  return evicted;
}

bool Policy::is_consistent() const {
  return planned_.size() + small_.size() + main_.size() == held_.size() &&
         ghost_.size() == ghosts_.size() && ghost_.size() <= places_;
}

void Policy::enter(const BlockId& id, std::optional<uint64_t> next) {
  if (next) {
    STOKER_CHECK(planned_.emplace(*next, id).second);
    STOKER_CHECK(held_.emplace(id, Held{.queue = nullptr, .next = *next}).second);
    return;
  }
  Queue* queue = &small_;
  if (const auto ghost = ghosts_.find(id); ghost != ghosts_.end()) {
    ghost_.erase(ghost->second);
    ghosts_.erase(ghost);
    queue = &main_;
  }
  queue->push_front(id);
  STOKER_CHECK(held_.emplace(id, Held{.queue = queue, .at = queue->begin()}).second);
}

void Policy::plan(const BlockId& id, std::optional<uint64_t> next) {
  const auto held = held_.find(id);
  if (held == held_.end() || (!next && held->second.queue != nullptr)) return;
  remove(id);
  enter(id, next);
}

void Policy::remove(const BlockId& id) {
  const auto held = held_.find(id);
  if (held == held_.end()) return;
  if (held->second.queue == nullptr) {
    STOKER_CHECK(planned_.erase({held->second.next, id}) == 1);
  } else {
    held->second.queue->erase(held->second.at);
  }
  held_.erase(held);
  STOKER_CHECK(is_consistent());
}

BlockId Policy::evict() {
  STOKER_CHECK(!held_.empty());
  if (planned_.size() == held_.size() ||
      (!planned_.empty() && planned_.rbegin()->first == kNever)) {
    const BlockId last = planned_.rbegin()->second;
    remove(last);
    return last;
  }
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
    STOKER_CHECK(held.queue == &small_);
    if (held.uses == 0) {
      remove(id);
      remember(id);
      return id;
    }
    main_.splice(main_.begin(), small_, held.at);
    held = {.queue = &main_, .at = main_.begin()};
  }
  return {};
}

BlockId Policy::evict_main() {
  for (;;) {
    STOKER_CHECK(!main_.empty());
    const BlockId id = main_.back();
    Held& held = held_.at(id);
    STOKER_CHECK(held.queue == &main_);
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
  STOKER_CHECK(ghosts_.emplace(id, ghost_.begin()).second);
  if (ghost_.size() <= places_) return;
  ghosts_.erase(ghost_.back());
  ghost_.pop_back();
}

}  // namespace stoker::cached
