#include "stoker/store/coded/recovery/found.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "stoker/store/coded/mutation.h"

namespace stoker::coded {
namespace {

class Reading {
 public:
  explicit Reading(Shards& shards) : shards_(shards), shape_(shards.shape()) {}
  Found read(ShardSet current);

 private:
  void read_images(size_t shard);
  void read_log(size_t shard);
  AlignedBytes read_area(size_t shard, uint64_t offset, size_t bytes);
  void take(size_t shard, const SegmentRef& segment, uint64_t frame_at, FrameContent content);
  void take_round(const SegmentRef& segment, const RoundItem& round);
  FoundVal& found_val(const ValItem& item);

  Shards& shards_;
  const Shape& shape_;
  ShardSet readable_ = 0;  // shards with a block that is
  Found found_;
};

Found Reading::read(ShardSet current) {
  for (size_t shard = 0; shard < shape_.shards; ++shard) {
    if ((current & shard_bit(shard)) == 0) continue;
    read_images(shard);
    read_log(shard);
  }
  found_.dark = current & ~readable_;
  for (size_t shard = 0; shard < shape_.shards; ++shard) {
    if ((found_.dark & shard_bit(shard)) != 0) found_.unreadable.erase(shard);
  }
  return std::move(found_);
}

AlignedBytes Reading::read_area(size_t shard, uint64_t offset, size_t bytes) {
  for (;;) {
    AlignedBytes memory(bytes);
    Area area{shard, offset, memory.slice()};
    const std::string why = read_areas(shards_, Priority::demand, {&area, 1});
    if (memory.lost()) continue;  // the disk was given up, and refuses from then on
    if (!why.empty()) shards_[shard].trouble = why;
    if (area.any()) readable_ |= shard_bit(shard);
    for (size_t block = 0; block < area.readable.size(); ++block) {
      if (!area.readable[block]) found_.unreadable[shard].push_back(offset + block * kBlock);
    }
    return memory;
  }
}

void Reading::read_images(size_t shard) {
  std::optional<TableImage> newest;
  for (size_t area = 0; area < 2; ++area) {
    const AlignedBytes bytes = read_area(shard, shape_.area_at(area), shape_.area_bytes);
    auto image = read_table_image(shards_.store(), bytes.span());
    if (!image || (newest && image->stamp < newest->stamp)) continue;
    newest = std::move(image);
    shards_[shard].image_area = area;
  }
  if (!newest || (found_.has_image && newest->stamp <= found_.image_stamp)) return;
  found_.has_image = true;
  found_.image_stamp = newest->stamp;
  found_.image = std::move(newest->pieces);
}

void Reading::read_log(size_t shard) {
  Member& each = shards_[shard];
  SegmentEnd newest;
  size_t newest_at = 0;
  for (size_t segment = 0; segment < shape_.segments; ++segment) {
    ShardScan scan = each.shard->scan(
        {shape_, shards_.store(), shard, segment, each.super.log_floor}, Priority::demand);
    if (!scan.why.empty() && each.trouble.empty())
      each.trouble = "'" + each.path + "': " + scan.why;
    if (scan.any_read) readable_ |= shard_bit(shard);
    for (const uint64_t offset : scan.unreadable) found_.unreadable[shard].push_back(offset);
    const SegmentEnd end = scan.end;
    SegmentRef ref;
    std::vector<FoundRounds::Frame> frames;
    for (auto& [at, content] : scan.frames) {
      if (!ref) ref = each.log->hold(segment);
      frames.push_back({at, content.end, content.sequence, 0});
      for (const Item& item : content.items) {
        if (const auto* round = std::get_if<RoundItem>(&item)) frames.back().round = round->round;
      }
      take(shard, ref, shape_.segment_at(segment) + at, std::move(content));
    }
    found_.rounds.take(shard, frames);
    each.log->seen(std::max(end.count(), each.super.log_floor));
    if (end.generation <= newest.generation) continue;
    newest = end;
    newest_at = segment;
  }
  if (newest.generation != 0) each.log->resume(newest_at, newest);
}

FoundVal& Reading::found_val(const ValItem& item) {
  FoundVal& found = found_.vals[{item.stamp, item.stripe, item.chunk, item.first}];
  if (!found.val) {
    found.item = item;
    found.val = std::make_shared<Val>(
        Val{item.stamp, item.stripe, item.chunk, item.first, item.crcs, {}, {}, nullptr});
  }
  // settled once, and appended again since
  if (!item.needs_commit) found.item.needs_commit = false;
  return found;
}

// What was durable on all shards concerned: where no log has it intact it is known all the same.
void Reading::take_round(const SegmentRef& segment, const RoundItem& round) {
  if (mutated(Mutation::ignore_told)) return;
  found_.rounds.tell(round);
  found_.image_told = std::max(found_.image_told, round.image);
  found_.commits_told.insert(round.commits.begin(), round.commits.end());
  for (const ValItem& item : round.vals) {
    FoundVal& found = found_val(item);
    if (!found.told) found.val->told = found.told = std::make_shared<Told>();
    found.told->held.push_back(segment);
  }
}

void Reading::take(size_t shard, const SegmentRef& segment, uint64_t frame_at,
                   FrameContent content) {
  const auto place = [&](size_t block) {
    return Place{shard, frame_at + content.blocks_at + block * kBlock};
  };
  for (Item& item : content.items) {
    if (auto* val = std::get_if<ValItem>(&item)) {
      FoundVal& found = found_val(*val);
      if ((found.seen & shard_bit(shard)) != 0 || found.val->crcs != val->crcs) continue;
      found.seen |= shard_bit(shard);
      found.val->places.push_back(place(val->at));
      found.val->held.push_back(segment);
    } else if (auto* commit = std::get_if<CommitItem>(&item)) {
      FoundCommit& found = found_.commits[commit->stamp];
      if (!found.record)
        found.record = std::make_shared<CommitRecord>(CommitRecord{commit->stamp, {}});
      found.items = std::move(commit->items);
      found.seen |= shard_bit(shard);
      found.record->held.push_back(segment);
    } else if (auto* stage = std::get_if<StageItem>(&item)) {
      for (size_t i = 0; i < stage->rows.size(); ++i)
        found_.stages[{stage->fold, stage->stripe, stage->chunk, stage->rows[i].row}] = {
            std::move(stage->rows[i].entry), place(stage->at + i), segment};
    } else if (auto* fold = std::get_if<FoldItem>(&item)) {
      FoundFold& found = found_.folds[{fold->fold, fold->stripe}];
      found.item = std::move(*fold);
      found.seen |= shard_bit(shard);
      found.held.push_back(segment);
    } else if (const auto* round = std::get_if<RoundItem>(&item)) {
      take_round(segment, *round);
    }
  }
}

}  // namespace

Found read_shards(Shards& shards, ShardSet current) { return Reading(shards).read(current); }

}  // namespace stoker::coded
