// Folding: what is newer in the logs goes into the bases, parity included, so that the logs'
// segments are free again. Here: what is taken on, and how much.
#include <algorithm>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/store/coded/fold/folding.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {
namespace {

constexpr Version kStillRewritten = 1024;  // commits since a stripe was updated
constexpr uint64_t kFoldShare = 8;         // an eighth of it, in a step
constexpr uint64_t kShareOfTheLog = 4;     // a quarter of its commits count as the oldest

}  // namespace

// Where all that was chosen cannot be folded, what comes next may be.
Result<size_t> Folder::step(const FoldBounds& bounds) {
  if (const auto refused = parts_.map.refused()) return *refused;
  for (;;) {
    Folding folding(parts_, stand_ins_);
    STOKER_ASSIGN(const size_t folded, folding.run(bounds));
    if (folded > 0 || !folding.left_some()) return folded;
  }
}

Result<size_t> Folder::paced(const FoldBounds& bounds, Pace& pace) {
  const uint64_t before = parts_.logs.moved();
  auto folded = step(bounds);
  pace.spend(parts_.logs.moved() - before);
  return folded;
}

Result<size_t> Folding::run(const FoldBounds& bounds) {
  STOKER_TRY(choose(bounds));
  if (groups_.empty()) return size_t{0};
  STOKER_TRY(take_memory());
  compute_all();
  if (groups_.empty()) return size_t{0};
  STOKER_CHECK(!stripes_.empty());
  if (!mutated(Mutation::skip_stage)) STOKER_TRY(stage());
  if (!mutated(Mutation::skip_fold_record)) STOKER_TRY(decide());
  set_folding(true);
  const Status applied = apply();
  if (applied) {
    finish();
  } else {
    stand_in();
  }
  set_folding(false);
  if (!applied) return applied.error();
  groups_.clear();  // with their share of the cap
  rejoin();
  return stripes_.size();
}

// The stripes whose blocks have waited longest, as segments come free in their order; with room to
// spare not those that are still rewritten; as long as one frame can stage their parity.
Status Folding::choose(const FoldBounds& bounds) {
  struct Old {
    Stamp stamp;
    size_t block;  // that has waited longest
    StripePtr stripe;
  };
  std::vector<Old> first;
  {
    const auto map = parts_.map.lock();
    std::erase_if(map->dirty, [&](const auto& each) {
      const StripePtr stripe = each.second.lock();
      if (!stripe || stripe->overlay.empty()) {
        map->stuck.erase(each.first);
        return true;
      }
      if (map->stuck.contains(stripe->id)) return false;
      Old old{UINT64_MAX, 0, stripe};
      Stamp newest = 0;
      for (const auto& [block, newer] : stripe->overlay) {
        if (newer.val->stamp < old.stamp) old = {newer.val->stamp, block, stripe};
        newest = std::max(newest, newer.val->stamp);
      }
      const bool rewritten = map->classes.of(stripe->object) == Class::read_write &&
                             number_of(newest) + kStillRewritten > map->version;
      if (!rewritten || !bounds.spare) first.push_back(std::move(old));
      return false;
    });
  }
  std::stable_sort(first.begin(), first.end(),
                   [](const Old& a, const Old& b) { return a.stamp < b.stamp; });
  if (bounds.oldest && !first.empty()) bound_by_age(number_of(first.front().stamp));
  size_t rows_left = std::min(bounds.rows, rows_of_a_frame());
  std::vector<StripePtr> chosen;
  {
    const auto map = parts_.map.lock();
    size_t rows = 0;
    for (const Old& old : first) {
      if (chosen.size() == bounds.stripes || rows >= rows_left || !waited(number_of(old.stamp)))
        break;
      chosen.push_back(old.stripe);
      rows += waiting_rows(*old.stripe);
      if (!old.stripe->has_whole_headers())
        parts_.logs.count_moved(shape_.n() * header_bytes(shape_));
    }
  }
  const auto unread = parts_.reader.load_headers(chosen, Priority::scrub);
  for (const auto& [id, why] : unread) leave(id, why);
  for (size_t i = 0; i < chosen.size(); ++i) {
    if (unread.contains(chosen[i]->id)) continue;
    if (const Status mended = parts_.rebuilder.mend_unread(chosen[i]); !mended) {
      if (mended.error().code == Code::over_budget || parts_.map.refused()) return mended.error();
      leave(chosen[i]->id, mended.error());
      continue;
    }
    STOKER_CHECK(chosen[i] == first[i].stripe);
    add_groups(chosen[i], first[i].block / shape_.k, rows_left);
    stripes_.push_back(chosen[i]);
  }
  drop_left();
  return {};
}

void Folding::bound_by_age(Version oldest) {
  const Version newest = parts_.map.lock()->version;
  STOKER_CHECK(oldest <= newest);
  until_ = oldest + (newest - oldest) / kShareOfTheLog;
}

// Whose parity one frame can stage.
size_t Folding::rows_of_a_frame() const {
  return std::max<size_t>(1, shape_.segment_bytes / 4 / (kBlock + 8 + shape_.parity_entry_bytes()));
}

// With the map locked.
size_t Folding::waiting_rows(const Stripe& stripe) const {
  size_t rows = 0;
  size_t last = SIZE_MAX;
  for (const auto& [block, newer] : stripe.overlay) {
    if (waited(number_of(newer.val->stamp)))
      rows += std::exchange(last, block / shape_.k) != block / shape_.k ? 1 : 0;
  }
  return rows;
}

// From the row of the block that has waited longest on, or one that is rewritten for ever would
// keep others in the log.
void Folding::add_groups(const StripePtr& stripe, size_t from_row, size_t& rows_left) {
  const auto map = parts_.map.lock();
  // what is newer in the log keeps the headers in memory
  STOKER_CHECK(stripe->has_whole_headers() && !stripe->overlay.empty() && !stripe->folding);
  STOKER_CHECK(ids_.emplace(stripe->id, map->take_id()).second);
  next_.emplace(stripe->id, *stripe->headers);
  const auto from = stripe->overlay.lower_bound(from_row * shape_.k);
  add_rows(stripe, from, stripe->overlay.end(), rows_left);
  add_rows(stripe, stripe->overlay.begin(), from, rows_left);
}

void Folding::add_rows(const StripePtr& stripe, Overlay::const_iterator at,
                       Overlay::const_iterator end, size_t& rows_left) {
  while (at != end && rows_left > 0) {
    const size_t row = at->first / shape_.k;
    uint32_t dirty = 0;
    std::vector<Stripe::Newer> newer;
    bool waits = false;
    for (; at != end && at->first / shape_.k == row; ++at) {
      dirty |= uint32_t{1} << at->first % shape_.k;
      newer.push_back(at->second);
      waits = waits || waited(number_of(at->second.val->stamp));
    }
    if (!waits) continue;
    --rows_left;
    const bool goes_on = !groups_.empty() && groups_.back().stripe == stripe &&
                         groups_.back().first + groups_.back().count == row &&
                         groups_.back().dirty == dirty;
    if (!goes_on) {
      Group group;
      group.stripe = stripe;
      group.first = row;
      group.dirty = dirty;
      groups_.push_back(std::move(group));
    }
    Group& group = groups_.back();
    ++group.count;
    group.newer.insert(group.newer.end(), newer.begin(), newer.end());
  }
}

// From the cap, and no more than a share of it, as users who find nothing left are refused: what
// does not fit waits for a later step. An error if a single row does not.
Status Folding::take_memory() {
  uint64_t share = parts_.budget.cap() / kFoldShare;
  for (size_t i = 0; i < groups_.size(); ++i) {
    Group& group = groups_[i];
    STOKER_CHECK(group.count > 0 && group.newer.size() == group.count * group.dirty_count());
    for (bool last = false;;) {
      const uint64_t bytes = (shape_.n() + shape_.m + group.dirty_count()) * group.count * kBlock;
      const bool least = i == 0 && group.count == 1;
      auto grant = bytes <= share || least
                       ? parts_.budget.take(bytes, "folding in a coded store")
                       : Result<Grant>(fail(Code::over_budget,
                                            "a fold takes a share of the memory cap only"));
      if (grant) {
        group.grant = std::move(*grant);
        share -= std::min(share, bytes);
        break;
      }
      groups_.erase(groups_.begin() + static_cast<ptrdiff_t>(std::max<size_t>(i, 1)),
                    groups_.end());
      if (i > 0) break;
      if (last) return grant.error();
      if (group.count == 1) {  // reads that were left behind hold some of it a moment longer
        last = !parts_.shards.stragglers().await();
        continue;
      }
      group.count /= 2;
      group.newer.resize(group.count * group.dirty_count());
    }
  }
  std::erase_if(stripes_, [&](const StripePtr& stripe) {
    return std::none_of(groups_.begin(), groups_.end(),
                        [&](const Group& group) { return group.stripe == stripe; });
  });
  return {};
}

}  // namespace stoker::coded
