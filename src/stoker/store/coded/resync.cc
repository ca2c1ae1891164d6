// Resync: a shard that was away, or made anew, gets the chunks that it misses, while the store
// works on, and counts again once it has all.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "stoker/base/log.h"
#include "stoker/store/coded/coded_store.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {
namespace {

constexpr const char* kWhere = "store/coded/resync";
constexpr size_t kFoldedAtOnce = 8;  // stripes, when the admission needs room
// chunks, at most, before it is asked again which are the most urgent
constexpr size_t kMendedAtOnce = 256;
// stripes, at least, before it is asked again which are the most urgent
constexpr size_t kJoinedAtOnce = 256;

Error failing(const std::string& path, const std::string& why) {
  return make_error(Code::io, "the shard '" + path + "' cannot be brought up to date: " + why,
                    kWhere);
}

}  // namespace

Result<bool> CodedStore::repair_step() {
  STOKER_ASSIGN(const bool mended, mend_step());
  if (mended) return true;
  return resync_step();
}

// The shard without which most of what has the fewest survivors is at risk; its stripes in that
// order.
bool CodedStore::choose_joining() {
  const ShardSet away = shards_->present() & ~map_.live();
  std::optional<size_t> best;
  // chunks lost of its worst stripe; how many stripes have lost that many
  std::pair<size_t, size_t> best_risk;
  for (size_t shard = 0; shard < shape_.shards; ++shard) {
    if ((away & shard_bit(shard)) == 0 || given_up_.contains(shard)) continue;
    std::pair<size_t, size_t> risk;
    const auto map = map_.lock();
    for (const auto& [key, object] : map->table.objects()) {
      for (const StripePtr& stripe : object->stripes) {
        if (!stripe ||
            std::find(stripe->shards.begin(), stripe->shards.end(), shard) == stripe->shards.end())
          continue;
        const auto lost = static_cast<size_t>(
            std::count_if(stripe->shards.begin(), stripe->shards.end(),
                          [&](size_t each) { return (map->live & shard_bit(each)) == 0; }));
        if (lost > risk.first) risk = {lost, 0};
        risk.second += lost == risk.first ? 1 : 0;
      }
    }
    if (best && risk <= best_risk) continue;
    best = shard;
    best_risk = risk;
  }
  if (!best) return false;
  joining_ = best;
  log().info("the shard '{}' is being brought up to date", (*shards_)[*best].path);
  return true;
}

StripePtr CodedStore::next_to_join() {
  for (int looks = 0; looks < 2; ++looks) {
    while (!to_join_.empty()) {
      StripePtr stripe = to_join_.back().lock();
      to_join_.pop_back();
      if (stripe && !joined_.contains(stripe->id)) return stripe;
    }
    if (looks > 0) break;
    // The most urgent of all that is missing: at first everything, later what is left and what came
    // meanwhile.
    std::vector<std::pair<MapState::Urgency, StripePtr>> missing;
    const auto map = map_.lock();
    for (const auto& [key, object] : map->table.objects()) {
      for (const StripePtr& stripe : object->stripes) {
        if (!stripe || joined_.contains(stripe->id) || mutated(Mutation::admit_stale) ||
            std::find(stripe->shards.begin(), stripe->shards.end(), *joining_) ==
                stripe->shards.end())
          continue;
        missing.emplace_back(map->urgency(*stripe), stripe);
      }
    }
    std::stable_sort(missing.begin(), missing.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    // Some of them: what readers miss in the meantime comes forward then.
    const size_t now = std::max(kJoinedAtOnce, missing.size() / 16);
    for (size_t i = missing.size() - std::min(now, missing.size()); i < missing.size(); ++i)
      to_join_.push_back(missing[i].second);
    map->counts.doing = {"rebuilding '" + (*shards_)[*joining_].path + "'", joined_.size(),
                         joined_.size() + missing.size(), joined_.size() * shape_.chunk_bytes};
  }
  return nullptr;
}

// A piece of a stripe's chunk on the joining shard, or its admission.
Result<bool> CodedStore::resync_step() {
  if (const auto map = map_.lock(); map->refused) return false;
  if (!joining_ && !choose_joining()) return false;
  Status status;
  const StripePtr next = joining_chunk_ ? nullptr : next_to_join();
  if (joining_chunk_ || next) {
    status = joining_chunk_ ? join_step() : begin_to_join(next);
    if (status) {
      const auto map = map_.lock();
      map->counts.doing.done = joined_.size();
      map->counts.doing.bytes = joined_.size() * shape_.chunk_bytes;
      return true;
    }
  } else {
    status = admit();
    if (status) {
      end_joining();
    } else if (status.error().code == Code::out_of_space) {
      // What is newer in the logs of the others does not fit its log: it goes into the bases first.
      const auto folded = fold_paced({kFoldedAtOnce}, pace_);
      if (folded && *folded > 0) return true;
      if (!folded) status = folded.error();
    }
  }
  // not for ever: it goes on with the next chance
  if (!status && status.error().code == Code::over_budget) return status.error();
  if (!status && joining_) give_up_joining(status.error().message());
  return true;
}

Status CodedStore::begin_to_join(const StripePtr& stripe) {
  const auto position = static_cast<size_t>(
      std::find(stripe->shards.begin(), stripe->shards.end(), *joining_) - stripe->shards.begin());
  if (position == shape_.n()) return {};
  if (const Status loaded = load_headers_paced(stripe); !loaded) {
    STOKER_TRY(forget_chunk(stripe, position));
    note_loss(stripe, position, loaded.error().what);
    joined_.insert(stripe->id);
    return {};
  }
  joining_chunk_ = Rebuilding{stripe, position};
  return join_step();
}

Status CodedStore::join_step() {
  Rebuilding& chunk = *joining_chunk_;
  const size_t before = chunk.done.blocks;
  STOKER_ASSIGN(const bool more, rebuild_step(chunk));
  if (!more) {
    if (const StripePtr stripe = chunk.stripe.lock()) joined_.insert(stripe->id);
  }
  {
    const auto map = map_.lock();
    map->counts.rebuilt_bytes += (chunk.done.blocks - before) * kBlock;
  }
  if (!more) joining_chunk_.reset();
  return {};
}

// What a fold has changed of a stripe that the joining shard has, or is about to have: it gets that
// again at once, or folds beside it would keep it away for ever.
Status CodedStore::join_again(const StripePtr& stripe) {
  if (!joining_) return {};
  const bool under_way = joining_chunk_ && joining_chunk_->stripe.lock() == stripe;
  if (!under_way && joined_.erase(stripe->id) == 0) return {};
  const auto other = under_way ? std::nullopt : std::exchange(joining_chunk_, std::nullopt);
  Status status = begin_to_join(stripe);
  while (status && joining_chunk_) status = join_step();
  if (status) joining_chunk_ = other;
  return status;
}

// Nobody knows what belongs there: what stands there is old, and must not count once the shard
// does.
Status CodedStore::forget_chunk(const StripePtr& stripe, size_t position) {
  const size_t shard = stripe->shards[position];
  AlignedBytes zeros(header_bytes(shape_));
  std::memset(zeros.data(), 0, zeros.size());
  ShardBatch batch(*shards_, Priority::scrub);
  batch.write(shard, shape_.slot_at(stripe->slots[position]), zeros.slice());
  return batch.run() == 0 ? Status() : failing((*shards_)[shard].path, batch.why());
}

void CodedStore::note_loss(const StripePtr& stripe, size_t position, const std::string& why) {
  {
    const auto map = map_.lock();
    Loss& loss = map->lost[{stripe->id, position}];
    if (std::exchange(loss.why, why) == why) return;  // every scrub finds it again
    loss.stripe = stripe;
  }
  log().warn("{}", why);
}

void CodedStore::end_joining() {
  joining_.reset();
  joining_chunk_.reset();
  joined_.clear();
  to_join_.clear();
  const auto map = map_.lock();
  map->counts.doing = {};
}

void CodedStore::give_up_joining(const std::string& why) {
  log().warn("{}", why);
  set_trouble(shard_bit(*joining_), why);
  given_up_.insert(*joining_);
  end_joining();
}

// The most urgent chunks by now; what is found meanwhile is in the next of these lists.
void CodedStore::choose_to_mend(const MapState& map) {
  std::vector<std::pair<MapState::Urgency, std::pair<uint64_t, size_t>>> bad;
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
Result<bool> CodedStore::mend_step() {
  {
    const auto map = map_.lock();
    if (map->refused || (!mending_ && map->bad.empty())) return false;
    if (!mending_) {
      if (to_mend_.empty()) choose_to_mend(*map);
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
  if (const Status loaded = load_headers_paced(stripe); !loaded) {
    note_loss(stripe, chunk.position, loaded.error().what);
    mending_.reset();
    return true;
  }
  const size_t before = chunk.done.blocks;
  const auto more = rebuild_step(chunk);
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
    STOKER_TRY(drop_shards(shard_bit(shard), more.error().what));
  } else {
    note_loss(stripe, position, more.error().what);
  }
  return true;
}

Future<void> CodedStore::repair() {
  return add_job(
      [this, begun = false]() mutable -> Result<bool> {
        if (!begun) given_up_.clear();
        begun = true;
        return repair_step();
      },
      pace_);
}

}  // namespace stoker::coded
