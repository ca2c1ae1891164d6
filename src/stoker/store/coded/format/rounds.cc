#include "stoker/store/coded/format/rounds.h"

#include <algorithm>
#include <bit>

#include "stoker/base/check.h"

namespace stoker::coded {
namespace {

constexpr size_t kShareOfASegment = 8;  // an eighth of it, at most, for what a frame tells
constexpr size_t kFixedBytes = 1 + 8 + 8 + 8 * kRoundsTold + 4 + 4;
constexpr size_t kValBytes = 26;  // and its checksums

size_t told_bytes(const Val& val) { return kValBytes + 4 * val.crcs.size(); }

}  // namespace

void Rounds::resume(uint64_t last, const ShardsOfRounds& shards) {
  last_ = last;
  shards_ = shards;
}

size_t Rounds::item_bytes(const Shape& shape) const {
  size_t bytes = kFixedBytes + 8 * commits_.size();
  for (const auto& weak : vals_) {
    if (const ValRef val = weak.lock()) bytes += told_bytes(*val);
  }
  return std::min<size_t>(bytes, shape.segment_bytes / kShareOfASegment);
}

RoundItem Rounds::begin(const Shape& shape, Stamp image) {
  STOKER_CHECK(shape.segment_bytes / kShareOfASegment > kFixedBytes);
  RoundItem item;
  item.round = ++last_;
  item.image = image;
  item.shards = shards_;
  std::copy_backward(shards_.begin(), shards_.end() - 1, shards_.end());
  shards_[0] = 0;
  size_t left = shape.segment_bytes / kShareOfASegment - kFixedBytes;
  for (; !commits_.empty() && left >= 8; commits_.pop_front()) {
    const auto commit = commits_.front().lock();
    if (!commit) continue;
    item.commits.push_back(commit->stamp);
    told_commits_.push_back(commit);
    left -= 8;
  }
  for (; !vals_.empty(); vals_.pop_front()) {
    const ValRef val = vals_.front().lock();
    if (!val) continue;
    if (told_bytes(*val) > left) break;
    item.vals.push_back(
        {val->stamp, val->commit != nullptr, val->stripe, val->chunk, val->first, val->crcs, 0});
    told_vals_.push_back(val);
    left -= told_bytes(*val);
  }
  return item;
}

void Rounds::end(const std::map<size_t, LogFrame>& written) {
  STOKER_CHECK(last_ > 0 && shards_[0] == 0);
  const auto told = std::make_shared<Told>();
  for (const auto& [shard, frame] : written) {
    shards_[0] |= shard_bit(shard);
    told->held.push_back(frame.segment);
  }
  for (const auto& weak : told_vals_) {
    if (const ValRef val = weak.lock()) val->told = told;
  }
  for (const auto& weak : told_commits_) {
    if (const auto commit = weak.lock()) commit->told = told;
  }
  told_vals_.clear();
  told_commits_.clear();
}

void FoundRounds::take(size_t shard, std::span<const Frame> frames) {
  Gap gap;
  uint64_t end = 0, sequence = 0, damaged = 0;
  for (const Frame& frame : frames) {
    if (frame.offset != end) damaged += frame.sequence - sequence;
    end = frame.end;
    sequence = frame.sequence + 1;
    if (frame.round == 0) continue;
    if (damaged > 0) gaps_[shard].push_back({gap.after, frame.round, damaged});
    damaged = 0;
    gap.after = frame.round;
    seen_[frame.round] |= shard_bit(shard);
    last_ = std::max(last_, frame.round);
    uint64_t& newest = newest_[shard];
    newest = std::max(newest, frame.round);
  }
}

void FoundRounds::tell(const RoundItem& item) {
  for (size_t i = 0; i < item.shards.size() && i + 1 < item.round; ++i) {
    if (item.shards[i] != 0) told_[item.round - 1 - i] = item.shards[i];
  }
}

const ShardSet* FoundRounds::shards_of(uint64_t round) const {
  const auto at = told_.find(round);
  return at == told_.end() ? nullptr : &at->second;
}

ShardsOfRounds FoundRounds::shards_of_last() const {
  ShardsOfRounds shards{};
  for (size_t i = 0; i < shards.size() && i < last_; ++i) {
    const uint64_t round = last_ - i;
    const auto seen = seen_.find(round);
    if (seen != seen_.end()) shards[i] = seen->second;
    if (const ShardSet* told = shards_of(round)) shards[i] |= *told;
  }
  return shards;
}

// Those between intact frames, and that behind the last one: rounds that are told to be on this
// shard, and newer than all that it has.
std::vector<FoundRounds::Gap> FoundRounds::gaps_of(size_t shard, uint64_t from) const {
  std::vector<Gap> gaps;
  if (const auto at = gaps_.find(shard); at != gaps_.end()) gaps = at->second;
  const auto newest = newest_.find(shard);
  Gap tail{std::max(newest == newest_.end() ? 0 : newest->second, std::max<uint64_t>(from, 1) - 1),
           0, 0};
  for (auto told = told_.upper_bound(tail.after); told != told_.end(); ++told) {
    if ((told->second & shard_bit(shard)) == 0) continue;
    tail.before = told->first + 1;
    ++tail.frames;
  }
  if (tail.frames > 0) gaps.push_back(tail);
  return gaps;
}

ShardSet FoundRounds::hiding(const Shape& shape, ShardSet current,
                             std::span<const uint64_t> from) const {
  std::map<uint64_t, ShardSet> untold;  // shards on which frames of such a round are damaged
  for (size_t shard = 0; shard < shape.shards; ++shard) {
    if ((current & shard_bit(shard)) == 0) continue;
    for (const Gap& gap : gaps_of(shard, from[shard])) {
      std::vector<uint64_t> may_be;  // of which nobody tells on which shards it is
      uint64_t known = 0;
      for (uint64_t round = gap.after + 1; round < gap.before; ++round) {
        const auto seen = seen_.find(round);
        if (seen != seen_.end() && (seen->second & shard_bit(shard)) != 0) continue;
        const ShardSet* on = shards_of(round);
        if (on == nullptr) {
          may_be.push_back(round);
        } else if ((*on & shard_bit(shard)) != 0) {
          ++known;
          if (!seen_.contains(round + 1)) untold[round] |= shard_bit(shard);
        }
      }
      const bool more = gap.frames > known || gap.before == last_ + 1;
      for (const uint64_t round : may_be) {
        if (more && !seen_.contains(round + 1)) untold[round] |= shard_bit(shard);
      }
    }
  }
  ShardSet hiding = 0;
  for (const auto& [round, damaged] : untold) {
    const ShardSet all = shape.shards == kShardsMax ? ~ShardSet{0} : shard_bit(shape.shards) - 1;
    const ShardSet* on = shards_of(round);
    const ShardSet missing = on != nullptr ? *on & ~current : all & ~current;
    if (static_cast<size_t>(std::popcount(damaged | missing)) > shape.m) hiding |= damaged;
  }
  return hiding;
}

}  // namespace stoker::coded
