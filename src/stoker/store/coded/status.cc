// How a coded store is: what info() and Health say, and what is told when it opens.
#include <string>
#include <vector>

#include "stoker/base/log.h"
#include "stoker/store/coded/coded_store.h"

namespace stoker::coded {

StoreInfo CodedStore::info() const {
  const auto map = map_.lock();
  StoreInfo info;
  info.composition = map_.name();
  info.committed = info.durable = map->version;
  info.capacity_bytes = shape().capacity_bytes();
  info.used_bytes = map_.slots().used() / shape().n() * shape().stripe_bytes();
  info.map_bytes = map->table.memory_bytes(shape()) + map->classes.memory_bytes();
  if (map->refused) info.read_only = map->refused->what;
  return info;
}

Health CodedStore::health() const {
  const auto map = map_.lock();
  Health health = map->counts;
  health.epoch = map->epoch;
  for (size_t shard = 0; shard < shape().shards; ++shard) {
    const Member& each = (*shards_)[shard];
    if (each.present()) health.disks.push_back({each.path, each.shard->health()});
    if (map->is_live(shard)) {
      health.live.push_back(each.path);
    } else {
      health.troubles.push_back(each.trouble.empty() ? "'" + each.path + "' is not up to date"
                                                     : each.trouble);
    }
  }
  for (const auto& [at, loss] : map->lost) {
    if (loss.stripe.expired()) continue;
    if (health.lost_chunks++ == 0) health.lost_why = loss.why;
  }
  for (const auto& [id, weak] : map->dirty) {
    const auto stuck = map->stuck.find(id);
    if (stuck == map->stuck.end() || weak.expired()) continue;
    if (health.stuck_stripes++ == 0 && health.lost_chunks == 0) health.lost_why = stuck->second;
  }
  for (const auto& [id, weak] : map->dirty) {
    if (const StripePtr stripe = weak.lock()) health.newer_blocks += stripe->overlay.size();
  }
  return health;
}

// One sentence for each shard that does not count.
std::vector<std::string> CodedStore::repair_plan() const {
  std::vector<std::string> plan;
  const ShardSet now = map_.live();
  for (size_t shard = 0; shard < shape().shards; ++shard) {
    const Member& each = (*shards_)[shard];
    if ((now & shard_bit(shard)) != 0) continue;
    if (!each.present()) {
      plan.push_back((each.trouble.empty() ? "'" + each.path + "' is not there" : each.trouble) +
                     ": left as it is; to replace it for good, name it with --replace");
    } else if ((shards_->knowing() & shard_bit(shard)) == 0) {
      plan.push_back("'" + each.path + "' is new, of " + human_bytes(shape().file_bytes()) +
                     ", and is rebuilt from the others");
    } else {
      plan.push_back("'" + each.path +
                     "' missed what was written meanwhile and is brought up to date");
    }
  }
  return plan;
}

void CodedStore::tell_shards() {
  const auto map = map_.lock();
  for (size_t shard = 0; shard < shards_->size(); ++shard) {
    const Member& each = (*shards_)[shard];
    if (map->is_live(shard) && each.super.scrubbed.ended_at > map->counts.scrubbed.ended_at)
      map->counts.scrubbed = each.super.scrubbed;
    if (!map->is_live(shard))
      log().warn("a coded store works without a shard: {}",
                 each.trouble.empty() ? "'" + each.path + "' missed what was written meanwhile"
                                      : each.trouble);
  }
}

}  // namespace stoker::coded
