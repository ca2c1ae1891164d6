// Admission: a shard that was resynced gets a log, the VALs that belong to it and the table, and
// counts again from the epoch on that names it.
#include <algorithm>
#include <cstring>
#include <random>

#include "stoker/base/check.h"
#include "stoker/base/log.h"
#include "stoker/store/coded/mutation.h"
#include "stoker/store/coded/upkeep/resync.h"

namespace stoker::coded {
// Reads an area of the joining shard; what cannot be read is made zeros.
Status Resync::make_readable(size_t shard, uint64_t offset, size_t bytes) {
  STOKER_CHECK(is_aligned(offset, kBlock) && is_aligned(bytes, kBlock));
  const AlignedBytes content(bytes);
  pace_.spend(bytes);
  Area area{shard, offset, content.slice()};
  read_areas(shards_, Priority::scrub, {&area, 1});
  std::vector<uint64_t> unreadable;
  for (size_t i = 0; i * kBlock < bytes; ++i) {
    if (!area.readable[i]) unreadable.push_back(offset + i * kBlock);
  }
  return make_zeros(shard, unreadable);
}

// On the disk: these blocks are not read again, and must not come back.
Status Resync::make_zeros(size_t shard, const std::vector<uint64_t>& blocks) {
  if (blocks.empty()) return {};
  const AlignedBytes zeros(kBlock);
  std::memset(zeros.data(), 0, kBlock);
  ShardBatch writes(shards_, Priority::scrub);
  for (const uint64_t offset : blocks) writes.write(shard, offset, zeros.slice());
  return writes.run() == 0 ? Status() : stays_out(shards_[shard].path, writes.why());
}

// A log of its own, above all that it ever wrote.
Status Resync::begin_log(size_t shard) {
  Member& each = shards_[shard];
  for (size_t area = 0; area < 2; ++area)
    STOKER_TRY(make_readable(shard, shape_.area_at(area), shape_.area_bytes));
  uint64_t highest = each.super.log_floor;
  for (size_t segment = 0; segment < shape_.segments; ++segment) {
    pace_.spend(shape_.segment_bytes);
    const ShardScan scan =
        each.shard->scan({shape_, shards_.store(), shard, segment, 0}, Priority::scrub);
    STOKER_TRY(make_zeros(shard, scan.unreadable));
    highest = std::max(highest, scan.end.count());
  }
  each.log = std::make_unique<ShardLog>(shape_, shards_.store(), shard);
  each.log->seen(highest);
  each.super.log_floor = highest + 1;
  each.super.first_round = logs_.rounds().last() + 1;
  return {};
}

// The VALs that belong to the shard, the table, and then the epoch that counts it.
Status Resync::admit() {
  STOKER_CHECK(joining_.shard() && !joining_.has_begun());
  const size_t shard = *joining_.shard();
  STOKER_CHECK(shards_[shard].present() && (map_.live() & shard_bit(shard)) == 0);
  Member& each = shards_[shard];
  each.super.incarnation = std::random_device{}();
  STOKER_TRY(begin_log(shard));
  auto vals = map_.vals_of(shard);
  if (mutated(Mutation::resync_without_vals)) vals.clear();
  STOKER_TRY(logs_.append_settled(shard, vals));
  STOKER_TRY(joining_.checkpoint());  // on the joining shard too
  if (!joining_.shard()) return stays_out(each.path, each.trouble);
  ShardBatch sync(shards_, Priority::scrub);
  sync.flush(shard_bit(shard));  // all that was rebuilt, too
  if (sync.run() != 0) return stays_out(each.path, sync.why());
  STOKER_TRY(logs_.change_epoch(map_.live() | shard_bit(shard)));
  if ((map_.live() & shard_bit(shard)) == 0) return stays_out(each.path, each.trouble);
  logs_.set_trouble(shard_bit(shard), "");
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
