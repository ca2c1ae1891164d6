// Admission: a shard that was resynced gets a log, the VALs that belong to it and the table, and
// counts again from the epoch on that names it.
#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "stoker/base/crc32c.h"
#include "stoker/base/log.h"
#include "stoker/store/coded/coded_store.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {
namespace {

constexpr const char* kWhere = "store/coded/resync";

Error failing(const std::string& path, const std::string& why, Code code = Code::io) {
  return make_error(code, "the shard '" + path + "' cannot be brought up to date: " + why, kWhere);
}

}  // namespace

// Reads an area of the joining shard; what cannot be read is made zeros, on the disk too: it is not
// read again, and must not come back.
Status CodedStore::make_readable(size_t shard, uint64_t offset, size_t bytes,
                                 AlignedBytes& content) {
  content = AlignedBytes(bytes);
  pace_.spend(bytes);
  Area area{shard, offset, content.slice()};
  if (read_areas(*shards_, Priority::scrub, {&area, 1}).empty()) return {};
  ShardBatch writes(*shards_, Priority::scrub);
  for (size_t i = 0; i * kBlock < bytes; ++i) {
    if (!area.readable[i])
      writes.write(shard, offset + i * kBlock, content.slice().sub(i * kBlock, kBlock));
  }
  return writes.run() == 0 ? Status() : failing((*shards_)[shard].path, writes.why());
}

// A log of its own, above all that it ever wrote.
Status CodedStore::begin_log(size_t shard) {
  Shard& each = (*shards_)[shard];
  AlignedBytes bytes;
  for (size_t area = 0; area < 2; ++area)
    STOKER_TRY(make_readable(shard, shape_.area_at(area), shape_.area_bytes, bytes));
  uint64_t highest = each.super.log_floor;
  for (size_t segment = 0; segment < shape_.segments; ++segment) {
    STOKER_TRY(make_readable(shard, shape_.segment_at(segment), shape_.segment_bytes, bytes));
    highest = std::max(highest, read_segment(shape_, shards_->store(), shard, segment, 0,
                                             bytes.span(), [](uint64_t, const FrameContent&) {})
                                    .count());
  }
  each.log = std::make_unique<ShardLog>(shape_, shards_->store(), shard);
  each.log->seen(highest);
  each.super.log_floor = highest + 1;
  each.super.first_round = rounds_.last() + 1;
  return {};
}

// Into the shard's log, not flushed. They are settled: none of them needs its COMMIT any more.
Status CodedStore::append_settled(size_t shard,
                                  const std::vector<std::pair<StripePtr, ValRef>>& vals) {
  Shard& each = (*shards_)[shard];
  for (size_t first = 0; first < vals.size();) {
    FrameBuilder frame;
    std::vector<AlignedBytes> memory;
    std::vector<Run> runs;
    std::vector<size_t> at;
    size_t end = first;
    for (size_t blocks = 0; end < vals.size() && blocks * kBlock < shape_.segment_bytes / 4;
         ++end) {
      const auto& [stripe, val] = vals[end];
      runs.push_back({Run::From::log, stripe, val->chunk, val->first, val->crcs.size(), val, 0,
                      memory.emplace_back(val->crcs.size() * kBlock).data()});
      blocks += val->crcs.size();
    }
    reader_.fetch_records(runs, Priority::scrub);
    if (std::any_of(memory.begin(), memory.end(),
                    [](const AlignedBytes& blocks) { return blocks.lost(); }))
      continue;
    for (size_t i = first; i < end; ++i) {
      const auto& val = vals[i].second;
      at.push_back(frame.block_count());
      frame.add(ValItem{val->stamp, false, val->stripe, val->chunk, val->first, val->crcs, 0},
                memory[i - first].span());
    }
    if (frame.bytes() > shape_.segment_bytes || !each.log->fits(frame.bytes(), kReserve))
      return failing(each.path, "its log is full", Code::out_of_space);
    const LogFrame made = each.log->append(frame);
    ShardBatch batch(*shards_, Priority::scrub);
    batch.write(shard, made.offset, made.bytes.slice());
    if (batch.run() != 0) return failing(each.path, batch.why());
    const auto map = map_.lock();
    for (size_t i = first; i < end; ++i) {
      const auto& [stripe, val] = vals[i];
      const auto more = std::make_shared<Val>(*val);  // readers may be looking at the old one
      std::erase_if(more->places, [shard](const Place& place) { return place.shard == shard; });
      const bool data = stripe->shards[val->chunk] == shard;
      more->places.insert(data ? more->places.begin() : more->places.end(),
                          {shard, made.blocks_at + at[i - first] * kBlock});
      more->held.push_back(made.segment);
      if (!more->told) rounds_.add(more);
      for (auto& [block, newer] : stripe->overlay) {
        if (newer.val == val) newer.val = more;
      }
    }
    first = end;
  }
  return {};
}

// The VALs that belong to the shard, the table, and then the epoch that counts it.
Status CodedStore::admit() {
  const size_t shard = *joining_;
  Shard& each = (*shards_)[shard];
  each.super.incarnation = std::random_device{}();
  STOKER_TRY(begin_log(shard));
  auto vals = map_.vals_of(shard);
  if (mutated(Mutation::resync_without_vals)) vals.clear();
  STOKER_TRY(append_settled(shard, vals));
  STOKER_TRY(checkpoint());  // on the joining shard too
  if (!joining_) return failing(each.path, each.trouble);
  ShardBatch flush(*shards_, Priority::scrub);
  flush.sync(shard_bit(shard));  // all that was rebuilt, too
  if (flush.run() != 0) return failing(each.path, flush.why());
  STOKER_TRY(change_epoch(map_.live() | shard_bit(shard)));
  if ((map_.live() & shard_bit(shard)) == 0) return failing(each.path, each.trouble);
  set_trouble(shard_bit(shard), "");
  {
    // What was too much to be decoded may not be any more.
    const auto map = map_.lock();
    map->stuck.clear();
    for (const auto& [at, loss] : map->lost) map->bad[at] = loss.stripe;
    map->lost.clear();
  }
  log().info("the shard '{}' is up to date and counts again", each.path);
  return {};
}

}  // namespace stoker::coded
