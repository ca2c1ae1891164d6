#include "stoker/store/coded/upkeep/resync.h"

#include <algorithm>
#include <utility>

#include "stoker/base/check.h"

namespace stoker::coded {
namespace {

constexpr size_t kFoldedAtOnce = 8;  // stripes, when the admission needs room
// chunks, at most, before it is asked again which are the most urgent
constexpr size_t kMendedAtOnce = 256;

}  // namespace

Result<bool> Resync::step() {
  STOKER_ASSIGN(const bool mended, mend_step());
  if (mended) return true;
  return resync_step();
}

// A piece of a stripe's chunk on the joining shard, or its admission.
Result<bool> Resync::resync_step() {
  if (const auto map = map_.lock(); map->refused) return false;
  if (!joining_.shard() && !joining_.choose()) return false;
  Status status;
  const StripePtr next = joining_.has_begun() ? nullptr : joining_.next();
  if (joining_.has_begun() || next) {
    status = joining_.has_begun() ? joining_.step() : joining_.begin_some(next);
    if (status) {
      joining_.tell();
      return true;
    }
  } else {
    status = admit();
    if (status) {
      joining_.end();
    } else if (status.error().code == Code::out_of_space) {
      // What is newer in the logs of the others does not fit its log: it goes into the bases first.
      const auto folded = folder_.paced({kFoldedAtOnce}, pace_);
      if (folded && *folded > 0) return true;
      if (!folded) status = folded.error();
    }
  }
  // not for ever: it goes on with the next chance
  if (!status && status.error().code == Code::over_budget) return status.error();
  if (!status && joining_.shard()) joining_.give_up(status.error().message());
  return true;
}

// The most urgent chunks by now; what is found meanwhile is in the next of these lists.
void Resync::choose_to_mend(const MapState& map) {
  std::vector<std::pair<MapState::Urgency, ChunkAt>> bad;
  bad.reserve(map.bad.size());
  for (const auto& [at, weak] : map.bad) {
    const StripePtr stripe = weak.lock();
    bad.emplace_back(stripe ? map.urgency(*stripe) : MapState::Urgency(), at);
  }
  std::sort(bad.begin(), bad.end());
  for (size_t i = bad.size() - std::min(kMendedAtOnce, bad.size()); i < bad.size(); ++i)
    to_mend_.push_back(bad[i].second);
}

// A chunk of which a reader found a block bad, or could not read a header page, is compared with
// the others and written where it differs, a piece a step.
Result<bool> Resync::mend_step() {
  {
    const auto map = map_.lock();
    if (map->refused || (!mending_ && map->bad.empty())) return false;
    if (!mending_) {
      if (to_mend_.empty()) choose_to_mend(*map);
      STOKER_CHECK(!to_mend_.empty());
      const auto next = map->bad.find(to_mend_.back());
      to_mend_.pop_back();
      if (next == map->bad.end()) return true;  // mended with something else
      mending_ = Rebuilding{next->second, next->first.second};
      map->bad.erase(next);
    }
  }
  Rebuilding& chunk = *mending_;
  const StripePtr stripe = chunk.stripe.lock();
  if (!stripe || !is_set(map_.live_positions(*stripe), chunk.position)) {
    mending_.reset();
    return true;
  }
  if (const Status loaded = rebuilder_.load_headers_paced(stripe); !loaded) {
    rebuilder_.note_loss(stripe, chunk.position, loaded.error().what);
    mending_.reset();
    return true;
  }
  const size_t before = chunk.done.blocks;
  const auto more = rebuilder_.rebuild_step(chunk);
  if (!more && more.error().code == Code::over_budget) return more.error();
  {
    const auto map = map_.lock();
    map->counts.mended_blocks += chunk.done.blocks - before;
  }
  const size_t position = chunk.position;
  const size_t shard = stripe->shards[position];
  if (!more || !*more) mending_.reset();
  if (more) return true;
  // It cannot be written. Where too little would be left without it, it stays.
  if (shape_.writable(map_.live() & ~shard_bit(shard))) {
    STOKER_TRY(logs_.drop_shards(shard_bit(shard), more.error().what));
  } else {
    rebuilder_.note_loss(stripe, position, more.error().what);
  }
  return true;
}

}  // namespace stoker::coded
