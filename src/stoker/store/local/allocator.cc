#include "stoker/store/local/allocator.h"

#include <algorithm>

#include "stoker/base/check.h"

namespace stoker::local {
namespace {

// smaller pieces go where they break up no large range
constexpr uint64_t kShortBlocks = kChunkMin / kBlock;

}  // namespace

void FreeMap::add(uint64_t block, uint64_t blocks) {
  STOKER_CHECK(block + blocks >= block);
  end_ = std::max(end_, block + blocks);
  if (blocks == 0) return;
  free_ += blocks;
  auto next = ranges_.lower_bound(block);
  STOKER_CHECK(next == ranges_.end() || block + blocks <= next->first);
  if (next != ranges_.end() && next->first == block + blocks) {
    blocks += next->second;
    STOKER_CHECK(sizes_.erase({next->second, next->first}) == 1);
    next = ranges_.erase(next);
  }
  if (next != ranges_.begin()) {
    const auto before = std::prev(next);
    STOKER_CHECK(before->first + before->second <= block);
    if (before->first + before->second == block) {
      STOKER_CHECK(sizes_.erase({before->second, before->first}) == 1);
      block = before->first;
      blocks += before->second;
      ranges_.erase(before);
    }
  }
  ranges_.emplace(block, blocks);
  sizes_.emplace(blocks, block);
  STOKER_CHECK(ranges_.size() == sizes_.size());
}

void FreeMap::carve(Ranges::iterator range, uint64_t at, uint64_t blocks) {
  const auto [begin, size] = *range;
  STOKER_CHECK(begin <= at && at + blocks <= begin + size && blocks <= free_);
  STOKER_CHECK(blocks > 0 && sizes_.erase({size, begin}) == 1);
  ranges_.erase(range);
  const auto keep = [this](uint64_t from, uint64_t count) {
    if (count == 0) return;
    ranges_.emplace(from, count);
    sizes_.emplace(count, from);
  };
  keep(begin, at - begin);
  keep(at + blocks, begin + size - at - blocks);
  free_ -= blocks;
}

bool FreeMap::take_at(uint64_t at, uint64_t blocks) {
  auto range = ranges_.upper_bound(at);
  if (range == ranges_.begin()) return false;
  --range;
  if (at + blocks > range->first + range->second) return false;
  carve(range, at, blocks);
  return true;
}

std::optional<uint64_t> FreeMap::take(uint64_t blocks) {
  if (blocks > largest()) return std::nullopt;
  const bool is_short = blocks < kShortBlocks;
  auto choice = is_short ? sizes_.lower_bound({blocks, 0}) : std::prev(sizes_.end());
  if (at_end(*choice)) {
    const auto other = is_short                   ? std::next(choice)
                       : choice == sizes_.begin() ? sizes_.end()
                                                  : std::prev(choice);
    if (other != sizes_.end() && other->first >= blocks) choice = other;
  }
  const uint64_t at = choice->second;
  const auto range = ranges_.find(at);
  STOKER_CHECK(range != ranges_.end() && range->second == choice->first);
  carve(range, at, blocks);
  return at;
}

Allocator::Allocator(const MapLimits& limits) : limits_(limits), volumes_(limits.volumes.size()) {
  for (const auto& range : limits_.volumes) capacity_ += (range.end - range.begin) * kBlock;
}

Status Allocator::take_all(const Map& map) {
  STOKER_CHECK(free_bytes() == 0);
  for (size_t volume = 0; volume < volumes_.size(); ++volume) {
    // one volume at a time: the peak of memory while opening
    std::vector<std::pair<uint64_t, uint32_t>> used;
    map.each_extent([&](const Extent& extent) {
      if (volume_of(extent.place) == volume)
        used.emplace_back(block_of(extent.place), static_cast<uint32_t>(extent.blocks));
    });
    std::sort(used.begin(), used.end());
    uint64_t at = limits_.volumes[volume].begin;
    for (const auto& [block, blocks] : used) {
      if (block < at) {
        return fail(Code::corruption, "the map is damaged: two chunks share block {} of volume {}",
                    block, volume);
      }
      volumes_[volume].add(at, block - at);
      at = block + blocks;
    }
    volumes_[volume].add(at, limits_.volumes[volume].end - at);
  }
  return {};
}

std::optional<Extent> Allocator::take(size_t volume, uint64_t blocks, uint64_t ahead, Run& run) {
  STOKER_CHECK(volume < volumes_.size() && blocks > 0);
  FreeMap& free = volumes_[volume];
  if (run.left < blocks) {
    const uint64_t behind = run.next;
    give_back(volume, run);
    // Setting space aside must not starve others: only where it is a small part of what is free.
    const uint64_t want = std::max(blocks, std::min(ahead, free.free_blocks() / 8));
    const uint64_t get = std::max(blocks, std::min(want, free.largest()));
    if (behind != 0 && free.take_at(behind, get)) {
      run = {behind, get};
    } else if (const auto at = free.take(get)) {
      run = {*at, get};
    } else {
      return std::nullopt;
    }
  }
  STOKER_CHECK(run.left >= blocks);
  const Extent extent{make_place(volume, run.next), blocks};
  STOKER_CHECK(inside(extent));
  run.next += blocks;
  run.left -= blocks;
  return extent;
}

void Allocator::give(const Extent& extent) {
  STOKER_CHECK(inside(extent));
  volumes_[volume_of(extent.place)].add(block_of(extent.place), extent.blocks);
}

bool Allocator::inside(const Extent& extent) const {
  const size_t volume = volume_of(extent.place);
  if (volume >= limits_.volumes.size()) return false;
  const auto& range = limits_.volumes[volume];
  const uint64_t block = block_of(extent.place);
  return extent.blocks > 0 && block >= range.begin && block <= range.end &&
         extent.blocks <= range.end - block;
}

void Allocator::give_back(size_t volume, Run& run) {
  STOKER_CHECK(volume < volumes_.size());
  volumes_[volume].add(run.next, run.left);
  run = Run{};
}

uint64_t Allocator::free_bytes() const {
  uint64_t blocks = 0;
  for (const FreeMap& volume : volumes_) blocks += volume.free_blocks();
  return blocks * kBlock;
}

uint64_t Allocator::largest_bytes() const {
  uint64_t blocks = 0;
  for (const FreeMap& volume : volumes_) blocks = std::max(blocks, volume.largest());
  return blocks * kBlock;
}

}  // namespace stoker::local
