#include "stoker/store/coded/format/stripe.h"

#include <algorithm>

#include "stoker/base/check.h"

namespace stoker::coded {
namespace {

uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ULL;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBULL;
  return x ^ x >> 31;
}

}  // namespace

const Place* Val::live_place(ShardSet live, size_t nth) const {
  for (const Place& place : places) {
    if ((live & shard_bit(place.shard)) != 0 && nth-- == 0) return &place;
  }
  return nullptr;
}

std::vector<size_t> placement(const Shape& shape, uint64_t stripe) {
  std::vector<std::pair<uint64_t, size_t>> ranked;
  for (size_t shard = 0; shard < shape.shards; ++shard)
    ranked.emplace_back(mix(stripe * kShardsMax + shard), shard);
  STOKER_CHECK(shape.n() <= shape.shards && shape.shards <= kShardsMax);
  std::sort(ranked.rbegin(), ranked.rend());
  std::vector<size_t> shards;
  for (size_t i = 0; i < shape.n(); ++i) shards.push_back(ranked[i].second);
  return shards;
}

uint32_t Stripe::positions_on(ShardSet set) const {
  uint32_t positions = 0;
  for (size_t i = 0; i < shards.size(); ++i)
    positions |= (set & shard_bit(shards[i])) != 0 ? uint32_t{1} << i : 0;
  return positions;
}

Slots::Slots(const Shape& shape)
    : free_(shape.shards, std::vector<bool>(shape.slots, true)),
      free_count_(shape.shards, shape.slots),
      next_{std::vector<size_t>(shape.shards, 0),
            std::vector<size_t>(shape.shards, shape.slots / 2)} {}

std::optional<std::vector<uint32_t>> Slots::take(const std::vector<size_t>& shards,
                                                 Class expected) {
  const MutexLock lock(mutex_);
  std::vector<size_t>& next = next_[expected == Class::read_write ? 0 : 1];
  for (const size_t shard : shards) {
    if (free_count_[shard] == 0) return {};
  }
  std::vector<uint32_t> slots;
  for (const size_t shard : shards) {
    std::vector<bool>& free = free_[shard];
    size_t at = next[shard];
    while (!free[at]) at = (at + 1) % free.size();
    free[at] = false;
    next[shard] = (at + 1) % free.size();
    --free_count_[shard];
    slots.push_back(static_cast<uint32_t>(at));
  }
  return slots;
}

bool Slots::take(const std::vector<size_t>& shards, const std::vector<uint32_t>& slots) {
  STOKER_CHECK(shards.size() == slots.size());
  const MutexLock lock(mutex_);
  for (size_t i = 0; i < shards.size(); ++i) {
    if (slots[i] >= free_[shards[i]].size() || !free_[shards[i]][slots[i]]) return false;
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    STOKER_CHECK(free_count_[shards[i]] > 0);
    free_[shards[i]][slots[i]] = false;
    --free_count_[shards[i]];
  }
  return true;
}

void Slots::give(const std::vector<size_t>& shards, const std::vector<uint32_t>& slots) {
  STOKER_CHECK(shards.size() == slots.size());
  const MutexLock lock(mutex_);
  for (size_t i = 0; i < shards.size(); ++i) {
    STOKER_CHECK(!free_[shards[i]][slots[i]]);
    free_[shards[i]][slots[i]] = true;
    ++free_count_[shards[i]];
    STOKER_CHECK(free_count_[shards[i]] <= free_[shards[i]].size());
  }
}

uint64_t Slots::used() const {
  const MutexLock lock(mutex_);
  uint64_t used = 0;
  for (size_t shard = 0; shard < free_.size(); ++shard)
    used += free_[shard].size() - free_count_[shard];
  return used;
}

}  // namespace stoker::coded
