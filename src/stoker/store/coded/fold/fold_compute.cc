// Folding: what is newest is read from the logs, and the new parity computed.
#include <algorithm>
#include <cstring>

#include "stoker/base/check.h"
#include "stoker/base/log.h"
#include "stoker/store/coded/fold/folding.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {

// What is newest of all rows is read in one batch, and what else their new parity takes in a second
// one: commits wait behind this.
void Folding::compute_all() {
  fetch_newest();
  drop_left();
  fetch_bases();
  drop_left();
  for (Group& group : groups_) {
    if (const Status computed = compute(group); !computed)
      leave(group.stripe->id, computed.error());
  }
  drop_left();
}

// A stripe with rows that have lost too much stays in the log, and out of the way.
void Folding::leave(uint64_t stripe, const Error& why) {
  if (left_.emplace(stripe, why.what).second)
    log().warn("updates of stripe {} stay in the logs, as they cannot be applied: {}", stripe,
               why.message());
}

void Folding::drop_left() {
  if (left_.empty()) return;
  std::erase_if(groups_, [&](const Group& group) { return left_.contains(group.stripe->id); });
  std::erase_if(stripes_, [&](const StripePtr& stripe) { return left_.contains(stripe->id); });
  const auto map = parts_.map.lock();
  map->stuck.insert(left_.begin(), left_.end());
}

void Folding::fetch_newest() {
  const Status all = fetch_newest(groups_);
  for (const Group& group : groups_) parts_.logs.count_moved(group.fresh.size());
  if (all) return;
  // Which of them it is, each tells by itself.
  for (Group& group : groups_) {
    if (const Status fetched = fetch_newest({&group, 1}); !fetched)
      leave(group.stripe->id, fetched.error());
  }
}

// Again, into other memory, where a disk was given up that may still write to it.
Status Folding::fetch_newest(std::span<Group> groups) {
  for (;;) {
    std::vector<Run> runs;
    for (Group& group : groups) plan_newest(group, runs);
    Status fetched = parts_.reader.fetch(runs, Priority::scrub);
    if (std::none_of(groups.begin(), groups.end(),
                     [](const Group& group) { return group.fresh.lost(); }))
      return fetched;
  }
}

// Where the newest blocks of the group are, and what its headers will say of them.
void Folding::plan_newest(Group& group, std::vector<Run>& runs) {
  Headers& next = next_headers(group.stripe);
  group.fresh = AlignedBytes(group.dirty_count() * group.count * kBlock);
  size_t nth = 0;
  for (size_t c = 0; c < shape_.k; ++c) {
    if (!is_set(group.dirty, c)) continue;
    for (size_t r = 0; r < group.count; ++r) {
      const Stripe::Newer& newer = group.newer[r * group.dirty_count() + nth];
      STOKER_CHECK(newer.val->chunk == c && newer.index < newer.val->crcs.size());
      std::byte* into = group.fresh.data() + (nth * group.count + r) * kBlock;
      const bool goes_on = r > 0 && runs.back().val == newer.val &&
                           runs.back().index + runs.back().count == newer.index;
      if (goes_on) {
        ++runs.back().count;
      } else {
        runs.push_back(
            {Run::From::log, group.stripe, c, group.first + r, 1, newer.val, newer.index, into});
      }
      next.versions[(group.first + r) * shape_.k + c] =
          newer.val->stamp + (mutated(Mutation::fold_oldest) ? 1 : 0);
      next.crcs[(group.first + r) * shape_.n() + c] = newer.val->crcs[newer.index];
    }
    ++nth;
  }
  STOKER_CHECK(nth == group.dirty_count());
}

// Again, likewise: what is worked on must not change.
void Folding::fetch_bases() {
  std::vector<RowsWanted> rows;
  std::vector<Group*> whose;
  do {
    rows.clear();
    whose.clear();
    for (Group& group : groups_) {
      const uint32_t wanted = choose_way(group);
      group.blocks = AlignedBytes(shape_.n() * group.count * kBlock);
      if (wanted == 0) continue;
      rows.push_back({group.stripe.get(), group.first, group.count, wanted, group.blocks.span()});
      whose.push_back(&group);
    }
    parts_.reader.read_rows(rows, nullptr, Priority::scrub);  // into blocks that are worked on
    for (const RowsWanted& each : rows) parts_.logs.count_moved(each.blocks_read * kBlock);
  } while (std::any_of(groups_.begin(), groups_.end(),
                       [](const Group& group) { return group.blocks.lost(); }));
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!rows[i].status) leave(whose[i]->stripe->id, rows[i].status.error());
  }
}

// By delta, or from all data of the rows, whichever reads less: the bases that it takes.
uint32_t Folding::choose_way(Group& group) const {
  STOKER_CHECK(group.stripe->has_whole_headers());
  const Headers& headers = *group.stripe->headers;
  const uint32_t live = parts_.map.live_positions(*group.stripe);
  const uint32_t data_all = (uint32_t{1} << shape_.k) - 1;
  const uint32_t parity = live & ~data_all;
  if (parity == 0) {
    group.by_delta = true;  // to none: those that are away get theirs when they come back
    return 0;
  }
  bool sound = (group.dirty & ~live) == 0;
  size_t delta_reads = 0, encode_reads = 0;
  for (size_t row = group.first; row < group.first + group.count; ++row) {
    const bool blank = row_is_blank(shape_, headers, row);
    for (size_t c = 0; c < shape_.k; ++c) {
      if (headers.versions[row * shape_.k + c] == 0) continue;
      (is_set(group.dirty, c) ? delta_reads : encode_reads) += 1;
    }
    for (size_t j = 0; j < shape_.m; ++j) {
      if (!is_set(live, shape_.k + j)) continue;
      delta_reads += blank ? 0 : 1;
      sound = sound && !headers.unsound[row * shape_.m + j];
    }
  }
  group.by_delta = sound && delta_reads < encode_reads;
  return group.by_delta ? group.dirty | parity : data_all & ~group.dirty;
}

// New data and new parity of the rows.
Status Folding::compute(Group& group) {
  Headers& next = next_headers(group.stripe);
  const uint32_t live = parts_.map.live_positions(*group.stripe);
  STOKER_CHECK(group.blocks.size() == shape_.n() * group.count * kBlock);
  STOKER_CHECK(group.fresh.size() == group.dirty_count() * group.count * kBlock);
  group.parity_crcs.assign(shape_.m, std::vector<uint32_t>(group.count));
  std::vector<codec::Target> targets(shape_.m);
  for (size_t j = 0; j < shape_.m; ++j) {
    if (group.by_delta && !is_set(live, shape_.k + j)) continue;
    targets[j] = {group.chunk(shape_.k + j), group.parity_crcs[j]};
  }
  const bool adds = group.by_delta && live >> shape_.k != 0;
  size_t nth = 0;
  for (size_t c = 0; c < shape_.k; ++c) {
    if (!is_set(group.dirty, c)) continue;
    const auto newest =
        group.fresh.span().subspan(nth++ * group.count * kBlock, group.count * kBlock);
    if (adds && mutated(Mutation::delta_against_new))
      std::memcpy(group.chunk(c).data(), newest.data(), newest.size());
    if (adds && mutated(Mutation::apply_delta_twice))
      STOKER_TRY(parts_.code.delta(static_cast<int>(c), group.chunk(c), {newest, {}}, targets));
    if (adds)
      STOKER_TRY(parts_.code.delta(static_cast<int>(c), group.chunk(c), {newest, {}}, targets));
    std::memcpy(group.chunk(c).data(), newest.data(), newest.size());
  }
  if (!group.by_delta) {
    std::vector<codec::Source> sources(shape_.k);
    for (size_t c = 0; c < shape_.k; ++c) sources[c].bytes = group.chunk(c);
    STOKER_TRY(parts_.code.encode(sources, targets));
  }
  group.fresh = AlignedBytes();
  for (size_t r = 0; r < group.count; ++r) {
    for (size_t j = 0; j < shape_.m; ++j) {
      next.unsound[(group.first + r) * shape_.m + j] = !is_set(live, shape_.k + j);
      next.crcs[(group.first + r) * shape_.n() + shape_.k + j] = group.parity_crcs[j][r];
    }
  }
  return {};
}

}  // namespace stoker::coded
