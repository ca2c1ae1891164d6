// Folding: the new parity is staged, the fold decided, and then blocks and header pages are written
// in place.
#include <algorithm>
#include <set>

#include "stoker/base/check.h"
#include "stoker/store/coded/fold/folding.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {

// The new parity, durable in the logs of the live parities.
Status Folding::stage() {
  std::map<size_t, FrameBuilder> frames;
  for (const Group& group : groups_) {
    const uint32_t live = parts_.map.live_positions(*group.stripe);
    const Headers& next = next_headers(group.stripe);
    for (size_t j = 0; j < shape_.m; ++j) {
      if (!is_set(live, shape_.k + j)) continue;
      StageItem item;
      item.fold = ids_.at(group.stripe->id);
      item.stripe = group.stripe->id;
      item.chunk = shape_.k + j;
      for (size_t row = group.first; row < group.first + group.count; ++row) {
        const Stamp* versions = &next.versions[row * shape_.k];
        const uint32_t* crcs = &next.crcs[row * shape_.n()];
        item.rows.push_back(
            {row, {crcs[shape_.k + j], {versions, versions + shape_.k}, {crcs, crcs + shape_.k}}});
      }
      const size_t shard = group.stripe->shards[shape_.k + j];
      FrameBuilder& frame = frames[shard];
      for (size_t r = 0; r < group.count; ++r)
        staged_[group.stripe->id].push_back(
            {group.first + r, shape_.k + j, {shard, 0}, frame.block_count() + r});
      frame.add(shape_, item, group.chunk(shape_.k + j));
    }
  }
  std::map<size_t, LogFrame> written;
  STOKER_TRY(append(frames, written));
  for (auto& [id, blocks] : staged_) {
    for (Staged& block : blocks) {
      if (const auto frame = written.find(block.place.shard); frame != written.end())
        block.place.offset = frame->second.blocks_at + block.at * kBlock;
    }
  }
  return {};
}

// From here on a crash rolls the folds forward.
Status Folding::decide() {
  std::map<uint64_t, FoldItem> items;
  std::map<uint64_t, uint32_t> concerned;
  for (const Group& group : groups_) {
    FoldItem& item = items[group.stripe->id];
    item.fold = ids_.at(group.stripe->id);
    item.stripe = group.stripe->id;
    concerned[group.stripe->id] |= group.dirty;
    for (size_t i = 0; i < group.newer.size(); ++i) {
      const Stripe::Newer& newer = group.newer[i];
      item.rows.push_back(
          {group.first + i / group.dirty_count(), newer.val->chunk, newer.val->stamp});
    }
  }
  std::map<size_t, FrameBuilder> frames;
  for (const StripePtr& stripe : stripes_) {
    const auto item = items.find(stripe->id);
    if (item == items.end()) continue;
    const uint32_t live = parts_.map.live_positions(*stripe);
    for (size_t c = 0; c < shape_.n(); ++c) {
      if (is_set(live, c) && (c >= shape_.k || is_set(concerned[stripe->id], c)))
        frames[stripe->shards[c]].add(item->second);
    }
  }
  std::map<size_t, LogFrame> written;
  return append(frames, written);
}

Status Folding::append(std::map<size_t, FrameBuilder>& frames,
                       std::map<size_t, LogFrame>& written) {
  for (const auto& [shard, frame] : frames) parts_.logs.count_moved(frame.bytes());
  STOKER_TRY(parts_.logs.append(frames, 0, written));
  for (const auto& [shard, frame] : written) held_.push_back(frame.segment);
  return {};
}

void Folding::set_folding(bool folding) {
  auto map = parts_.map.lock();
  for (const StripePtr& stripe : stripes_) {
    STOKER_CHECK(stripe->folding != folding);
    stripe->folding = folding;
  }
  parts_.map.changed();
  if (!folding) return;
  map.wait([&] {
    return std::all_of(stripes_.begin(), stripes_.end(),
                       [](const StripePtr& stripe) { return stripe->readers == 0; });
  });
}

// Blocks in place, durable; then the headers, durable.
Status Folding::apply() {
  ShardBatch blocks(parts_.shards, Priority::scrub);
  ShardSet touched = 0;
  std::map<uint64_t, std::set<std::pair<size_t, size_t>>> pages;  // by stripe: position, page
  for (const Group& group : groups_) {
    STOKER_CHECK(group.count > 0 && group.first + group.count <= shape_.rows());
    STOKER_CHECK(group.blocks.size() == shape_.n() * group.count * kBlock);
    const uint32_t live = parts_.map.live_positions(*group.stripe);
    for (size_t c = 0; c < shape_.n(); ++c) {
      if (!is_set(live, c) || (c < shape_.k && !is_set(group.dirty, c))) continue;
      blocks.write(group.stripe->shards[c], shape_.block_at(group.stripe->slots[c], group.first),
                   group.blocks.slice().sub(c * group.count * kBlock, group.count * kBlock));
      parts_.logs.count_moved(group.count * kBlock);
      touched |= shard_bit(group.stripe->shards[c]);
      for (size_t page = group.first / shape_.rows_per_page();
           page <= (group.first + group.count - 1) / shape_.rows_per_page(); ++page)
        pages[group.stripe->id].emplace(c, page);
    }
  }
  if (!mutated(Mutation::header_before_blocks)) blocks.flush(touched);
  ShardSet failed = blocks.run();
  if (failed != 0) STOKER_TRY(parts_.logs.drop_shards(failed, blocks.why()));
  std::vector<AlignedBytes> memory;
  ShardBatch headers(parts_.shards, Priority::scrub);
  for (const StripePtr& stripe : stripes_) {
    Headers& next = next_headers(stripe);
    const uint32_t live = parts_.map.live_positions(*stripe);
    for (const auto& [position, page] : pages[stripe->id]) {
      if (!is_set(live, position)) continue;
      const HeaderPage header = page_of(shape_, stripe->id, next, position, page);
      next.counters[position * shape_.pages() + page] = header.counter;
      encode_page(shape_, parts_.shards.store(), header, memory.emplace_back(kBlock).span());
      headers.write(stripe->shards[position],
                    shape_.page_at(stripe->slots[position], page, header.counter),
                    memory.back().slice());
    }
  }
  parts_.logs.count_moved(memory.size() * kBlock);
  headers.flush(touched & parts_.map.live());
  failed = headers.run();
  return failed == 0 ? Status() : parts_.logs.drop_shards(failed, headers.why());
}

// Too few shards are left to write to. What the bases hold of these rows is unknown; VALs and
// staged blocks stand for them, as they would after opening again.
void Folding::stand_in() {
  const auto map = parts_.map.lock();
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.newer.size(); ++i) {
      const Stripe::Newer& newer = group.newer[i];
      const Place* copy = newer.val->live_place(map->live, 0);
      Place place = copy != nullptr ? *copy : newer.val->places.front();
      place.offset += newer.index * kBlock;
      group.stripe
          ->overrides[(group.first + i / group.dirty_count()) * shape_.n() + newer.val->chunk] = {
          place, newer.val, newer.index};
    }
  }
  for (const StripePtr& stripe : stripes_) {
    for (const Staged& block : staged_[stripe->id]) {
      if (block.place.offset != 0)
        stripe->overrides[block.row * shape_.n() + block.position] = {block.place, nullptr, 0};
    }
    STOKER_CHECK(stripe->folding && stripe->readers == 0);
    stripe->headers = std::make_shared<Headers>(std::move(next_headers(stripe)));
  }
  stand_ins_.insert(stand_ins_.end(), held_.begin(), held_.end());
}

void Folding::finish() {
  const auto map = parts_.map.lock();
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.newer.size(); ++i) {
      const size_t block =
          (group.first + i / group.dirty_count()) * shape_.k + group.newer[i].val->chunk;
      const auto at = group.stripe->overlay.find(block);
      if (at != group.stripe->overlay.end() && at->second.val == group.newer[i].val)
        group.stripe->overlay.erase(at);
    }
  }
  for (const StripePtr& stripe : stripes_) {
    STOKER_CHECK(stripe->folding && stripe->readers == 0);
    stripe->headers = std::make_shared<Headers>(std::move(next_headers(stripe)));
    map->headers.admit(stripe);
    ++map->counts.folds;
  }
}

// Without memory for it now, it is what comes next in the joining shard.
void Folding::rejoin() {
  for (const StripePtr& stripe : stripes_) {
    const Status joined = parts_.joining.again(stripe);
    if (!joined && joined.error().code != Code::over_budget)
      parts_.joining.give_up(joined.error().message());
  }
}

}  // namespace stoker::coded
