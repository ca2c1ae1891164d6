#include "stoker/store/coded/fold/joining.h"

#include <algorithm>
#include <cstring>
#include <latch>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/log.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {
namespace {

// stripes, at least, before it is asked again which are the most urgent
constexpr size_t kJoinedAtOnce = 256;

}  // namespace

// The shard without which most of what has the fewest survivors is at risk; its stripes in that
// order.
bool Joining::choose() {
  STOKER_CHECK(!shard_ && !chunk_ && joined_.empty());
  const ShardSet away = shards_.present() & ~map_.live();
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
  shard_ = best;
  {
    const auto map = map_.lock();
    map->headers.keep_all(true);
    map->joining = shard_bit(*best);
    ++map->joinings[*best];
  }
  log().info("the shard '{}' is being brought up to date", shards_[*best].path);
  return true;
}

StripePtr Joining::next_listed() {
  while (!to_join_.empty()) {
    StripePtr stripe = to_join_.back().lock();
    to_join_.pop_back();
    if (stripe && !joined_.contains(stripe->id)) return stripe;
  }
  return nullptr;
}

StripePtr Joining::next() {
  STOKER_CHECK(shard_ && !chunk_);
  for (int looks = 0; looks < 2; ++looks) {
    if (StripePtr stripe = next_listed(); stripe || looks > 0) return stripe;
    // The most urgent of all that is missing: at first everything, later what is left and what came
    // meanwhile.
    std::vector<std::pair<MapState::Urgency, StripePtr>> missing;
    const auto map = map_.lock();
    for (const auto& [key, object] : map->table.objects()) {
      for (const StripePtr& stripe : object->stripes) {
        if (!stripe || joined_.contains(stripe->id) || mutated(Mutation::admit_stale) ||
            std::find(stripe->shards.begin(), stripe->shards.end(), *shard_) ==
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
    map->counts.doing = {"rebuilding '" + shards_[*shard_].path + "'", joined_.size(),
                         joined_.size() + missing.size(), joined_.size() * shape_.chunk_bytes};
  }
  return nullptr;
}

std::optional<size_t> Joining::position_on_it(const Stripe& stripe) const {
  const auto found = std::find(stripe.shards.begin(), stripe.shards.end(), *shard_);
  if (found == stripe.shards.end()) return {};
  return static_cast<size_t>(found - stripe.shards.begin());
}

// A thread each. What one of them cannot do, for lack of memory, say, is begun again by itself.
Status Joining::begin_some(const StripePtr& first) {
  struct Each {
    StripePtr stripe;
    std::optional<Result<Rebuilt>> done;
  };
  std::vector<Each> all{{first, {}}};
  const size_t most = rebuilder_.at_once();
  while (all.size() < most) {
    StripePtr stripe = next_listed();
    if (!stripe) break;
    const auto map = map_.lock();
    if (map->urgency(*stripe) != map->urgency(*first)) {  // it comes after them
      to_join_.push_back(stripe);
      break;
    }
    all.push_back({std::move(stripe), {}});
  }
  if (all.size() == 1) return begin(first);
  if (!helpers_) helpers_ = std::make_unique<Pool>(most);
  std::latch left(static_cast<ptrdiff_t>(all.size()));
  for (Each& each : all) {
    helpers_->run([this, &each, &left, position = position_on_it(*each.stripe)] {
      if (position && rebuilder_.load_headers_paced(each.stripe))
        each.done = rebuilder_.rebuild(each.stripe, *position);
      left.count_down();
    });
  }
  left.wait();
  Status status;
  for (const Each& each : all) {
    if (each.done && *each.done) {
      joined_.insert(each.stripe->id);
      count(**each.done, 0);
    } else if (status) {
      status = begin(each.stripe);
    }
  }
  return status;
}

void Joining::count(const Rebuilt& done, size_t blocks_before) {
  const auto map = map_.lock();
  map->counts.rebuilt_bytes += (done.blocks - blocks_before) * kBlock;
}

Status Joining::begin(const StripePtr& stripe) {
  STOKER_CHECK(shard_ && stripe);
  const auto at = position_on_it(*stripe);
  if (!at) return {};
  const size_t position = *at;
  if (const Status loaded = rebuilder_.load_headers_paced(stripe); !loaded) {
    STOKER_TRY(forget_chunk(stripe, position));
    rebuilder_.note_loss(stripe, position, loaded.error().what);
    joined_.insert(stripe->id);
    return {};
  }
  chunk_ = Rebuilding{stripe, position};
  return step();
}

Status Joining::step() {
  STOKER_CHECK(chunk_.has_value());
  Rebuilding& chunk = *chunk_;
  const size_t before = chunk.done.blocks;
  STOKER_ASSIGN(const bool more, rebuilder_.rebuild_step(chunk));
  if (!more) {
    if (const StripePtr stripe = chunk.stripe.lock()) joined_.insert(stripe->id);
  }
  count(chunk.done, before);
  if (!more) chunk_.reset();
  return {};
}

// What a fold has changed of a stripe that the joining shard has, or is about to have: it gets that
// again at once, or folds beside it would keep it away for ever.
Status Joining::again(const StripePtr& stripe) {
  if (!shard_) return {};
  const bool under_way = chunk_ && chunk_->stripe.lock() == stripe;
  if (!under_way && joined_.erase(stripe->id) == 0) return {};
  const auto other = under_way ? std::nullopt : std::exchange(chunk_, std::nullopt);
  Status status = begin(stripe);
  while (status && chunk_) status = step();
  if (status) chunk_ = other;
  return status;
}

// Nobody knows what belongs there: what stands there is old, and must not count once the shard
// does.
Status Joining::forget_chunk(const StripePtr& stripe, size_t position) {
  const size_t shard = stripe->shards[position];
  AlignedBytes zeros(header_bytes(shape_));
  std::memset(zeros.data(), 0, zeros.size());
  ShardBatch batch(shards_, Priority::scrub);
  batch.write(shard, shape_.slot_at(stripe->slots[position]), zeros.slice());
  return batch.run() == 0 ? Status() : stays_out(shards_[shard].path, batch.why());
}

void Joining::end() {
  shard_.reset();
  helpers_.reset();
  chunk_.reset();
  joined_.clear();
  to_join_.clear();
  const auto map = map_.lock();
  map->headers.keep_all(false);
  map->joining = 0;
  map->counts.doing = {};
}

void Joining::give_up(const std::string& why) {
  STOKER_CHECK(shard_.has_value());
  log().warn("{}", why);
  logs_.set_trouble(shard_bit(*shard_), why);
  given_up_.insert(*shard_);
  end();
}

void Joining::tell() {
  const auto map = map_.lock();
  map->counts.doing.done = joined_.size();
  map->counts.doing.bytes = joined_.size() * shape_.chunk_bytes;
}

Status Joining::checkpoint() {
  ShardSet failed = 0;
  Status written = logs_.checkpoint(set(), failed);
  if (failed != 0) give_up("writing the object table on '" + shards_[*shard_].path + "' failed");
  return written;
}

}  // namespace stoker::coded
