// Folding: what is newer in the logs goes into the bases, parity included, so that the logs' segments are free again.
#include <algorithm>
#include <bit>
#include <cstring>

#include "stoker/base/check.h"
#include "stoker/base/log.h"
#include "stoker/store/coded/coded_store.h"
#include "stoker/store/coded/headers.h"
#include "stoker/store/coded/mutation.h"
#include "stoker/store/coded/rows.h"

namespace stoker::coded {
namespace {

constexpr Version kStillRewritten = 1024;  // commits since a stripe was updated
constexpr size_t kFoldedAtOnce = 16;       // stripes
constexpr uint64_t kShareOfTheCap = 8;     // an eighth of it, in a step

// Rows that stand together and are newer in the same chunks.
struct Group {
  StripePtr stripe;
  size_t first = 0, count = 0;
  uint32_t dirty = 0;
  std::vector<Stripe::Newer> newer;  // by row, then by chunk of `dirty`
  AlignedBytes blocks;               // chunk c at c * count blocks: what the base holds, then what it will hold
  AlignedBytes fresh;                // the newest of each dirty chunk, one behind the other; gone once they are in `blocks`
  Grant grant;                       // for these, and for the parity in the frames of the logs
  bool by_delta = false;
  std::vector<std::vector<uint32_t>> parity_crcs;

  size_t dirty_count() const { return static_cast<size_t>(std::popcount(dirty)); }
  std::span<std::byte> chunk(size_t c) const { return blocks.span().subspan(c * count * kBlock, count * kBlock); }
};

}  // namespace

// One step of folding: some stripes from reading to durable headers. Writer thread.
class Folding {
 public:
  explicit Folding(CodedStore& store) : store_(store), shape_(store.shape_) {}
  // How many stripes were folded.
  Result<size_t> run(const CodedStore::FoldBounds& bounds);
  bool left_some() const { return !left_.empty(); }

 private:
  void choose(const CodedStore::FoldBounds& bounds);
  void add_groups(const StripePtr& stripe, size_t from_row, size_t& rows_left);
  using Overlay = std::map<size_t, Stripe::Newer>;
  void add_rows(const StripePtr& stripe, Overlay::const_iterator at, Overlay::const_iterator end, size_t& rows_left);
  Status take_memory();
  void compute_all();
  void fetch_newest();
  void plan_newest(Group& group, std::vector<CodedStore::Run>& runs);
  void fetch_bases();
  uint32_t choose_way(Group& group) const;
  Status compute(Group& group);
  void leave(const Group& group, const Error& why);
  void drop_left();
  Status stage();
  Status decide();
  Status append(std::map<size_t, FrameBuilder>& frames, std::map<size_t, LogFrame>& written);
  Status apply();
  void finish();
  void rejoin();
  void stand_in();
  Headers& next_headers(const StripePtr& stripe) { return next_.at(stripe->id); }
  void set_folding(bool folding);

  CodedStore& store_;
  const Shape& shape_;
  std::vector<StripePtr> stripes_;
  std::vector<Group> groups_;
  std::map<uint64_t, uint64_t> ids_;      // of the folds, by stripe
  std::map<uint64_t, Headers> next_;      // by stripe: as they will be
  std::map<uint64_t, std::string> left_;  // stripes that cannot be folded, and why
  struct Staged {
    size_t row, position;
    Place place;
    size_t at;  // of the block, in its frame
  };
  std::map<uint64_t, std::vector<Staged>> staged_;  // by stripe
  std::vector<SegmentRef> held_;          // what a crash would need to roll forward
};

// Where all that was chosen cannot be folded, what comes next may be.
Result<size_t> CodedStore::fold_step(const FoldBounds& bounds) {
  if (refused()) return *refused_;
  for (;;) {
    Folding folding(*this);
    STOKER_ASSIGN(const size_t folded, folding.run(bounds));
    if (folded > 0 || !folding.left_some()) return folded;
  }
}

Result<size_t> CodedStore::fold_paced(const FoldBounds& bounds, Pace& pace) {
  const uint64_t before = moved_;
  auto folded = fold_step(bounds);
  pace.spend(moved_ - before);
  return folded;
}

Result<size_t> Folding::run(const CodedStore::FoldBounds& bounds) {
  choose(bounds);
  if (groups_.empty()) return size_t{0};
  STOKER_TRY(take_memory());
  compute_all();
  if (groups_.empty()) return size_t{0};
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
  rejoin();
  return stripes_.size();
}

// The stripes whose blocks have waited longest, as segments come free in their order; with room to spare not those that are still rewritten; as long as one
// frame can stage their parity.
void Folding::choose(const CodedStore::FoldBounds& bounds) {
  struct Old {
    Stamp stamp;
    size_t block;  // that has waited longest
    StripePtr stripe;
  };
  std::vector<Old> first;
  {
    std::lock_guard lock(store_.mutex_);
    std::erase_if(store_.dirty_, [&](const auto& each) {
      const StripePtr stripe = each.second.lock();
      if (!stripe || stripe->overlay.empty()) return true;
      if (store_.stuck_.contains(stripe->id)) return false;
      Old old{UINT64_MAX, 0, stripe};
      Stamp newest = 0;
      for (const auto& [block, newer] : stripe->overlay) {
        if (newer.val->stamp < old.stamp) old = {newer.val->stamp, block, stripe};
        newest = std::max(newest, newer.val->stamp);
      }
      const bool rewritten = store_.classes_.of(stripe->object) == Class::read_write && number_of(newest) + kStillRewritten > store_.version_;
      if (!rewritten || !bounds.spare) first.push_back(std::move(old));
      return false;
    });
  }
  std::stable_sort(first.begin(), first.end(), [](const Old& a, const Old& b) { return a.stamp < b.stamp; });
  size_t rows_left = std::min(bounds.rows, std::max<size_t>(1, shape_.segment_bytes / 4 / (kBlock + 8 + shape_.parity_entry_bytes())));
  for (const auto& [oldest, block, stripe] : first) {
    if (stripes_.size() == bounds.stripes || rows_left == 0) break;
    {
      std::lock_guard lock(store_.mutex_);
      if (!stripe->headers) store_.moved_ += shape_.n() * header_bytes(shape_);
    }
    if (const Status loaded = store_.load_headers(stripe, Priority::scrub); !loaded) {
      const std::lock_guard lock(store_.mutex_);
      store_.stuck_.emplace(stripe->id, loaded.error().what);
      continue;
    }
    add_groups(stripe, block / shape_.k, rows_left);
    stripes_.push_back(stripe);
  }
}

// From the row of the block that has waited longest on, or one that is rewritten for ever would keep others in the log.
void Folding::add_groups(const StripePtr& stripe, size_t from_row, size_t& rows_left) {
  std::lock_guard lock(store_.mutex_);
  ids_[stripe->id] = make_stamp(store_.epoch_, store_.next_id_++);
  next_.emplace(stripe->id, *stripe->headers);
  const auto from = stripe->overlay.lower_bound(from_row * shape_.k);
  add_rows(stripe, from, stripe->overlay.end(), rows_left);
  add_rows(stripe, stripe->overlay.begin(), from, rows_left);
}

void Folding::add_rows(const StripePtr& stripe, Overlay::const_iterator at, Overlay::const_iterator end, size_t& rows_left) {
  for (; at != end && rows_left > 0; --rows_left) {
    const size_t row = at->first / shape_.k;
    uint32_t dirty = 0;
    std::vector<Stripe::Newer> newer;
    for (; at != end && at->first / shape_.k == row; ++at) {
      dirty |= uint32_t{1} << at->first % shape_.k;
      newer.push_back(at->second);
    }
    const bool goes_on = !groups_.empty() && groups_.back().stripe == stripe && groups_.back().first + groups_.back().count == row && groups_.back().dirty == dirty;
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

// From the cap, and no more than a share of it, as users who find nothing left are refused: what does not fit waits for a later step. An error if a single
// row does not.
Status Folding::take_memory() {
  uint64_t share = store_.runtime_.budget.cap() / kShareOfTheCap;
  for (size_t i = 0; i < groups_.size(); ++i) {
    Group& group = groups_[i];
    for (;;) {
      const uint64_t bytes = (shape_.n() + shape_.m + group.dirty_count()) * group.count * kBlock;
      const bool least = i == 0 && group.count == 1;
      auto grant = bytes <= share || least ? store_.runtime_.budget.take(bytes, "folding in a coded store") : Result<Grant>(make_error(Code::over_budget, "too much of the cap for a fold", "store/coded/fold"));
      if (grant) {
        group.grant = std::move(*grant);
        share -= std::min(share, bytes);
        break;
      }
      groups_.erase(groups_.begin() + static_cast<ptrdiff_t>(std::max<size_t>(i, 1)), groups_.end());
      if (i > 0) break;
      if (group.count == 1) return grant.error();
      group.count /= 2;
      group.newer.resize(group.count * group.dirty_count());
    }
  }
  std::erase_if(stripes_, [&](const StripePtr& stripe) { return std::none_of(groups_.begin(), groups_.end(), [&](const Group& group) { return group.stripe == stripe; }); });
  return {};
}

// What is newest of all rows is read in one batch, and what else their new parity takes in a second one: commits wait behind this.
void Folding::compute_all() {
  fetch_newest();
  drop_left();
  fetch_bases();
  drop_left();
  for (Group& group : groups_) {
    if (const Status computed = compute(group); !computed) leave(group, computed.error());
  }
  drop_left();
}

// A stripe with rows that have lost too much stays in the log, and out of the way.
void Folding::leave(const Group& group, const Error& why) {
  if (left_.emplace(group.stripe->id, why.what).second) log().warn("a stripe cannot be folded: {}", why.message());
}

void Folding::drop_left() {
  if (left_.empty()) return;
  std::erase_if(groups_, [&](const Group& group) { return left_.contains(group.stripe->id); });
  std::erase_if(stripes_, [&](const StripePtr& stripe) { return left_.contains(stripe->id); });
  std::lock_guard lock(store_.mutex_);
  store_.stuck_.insert(left_.begin(), left_.end());
}

void Folding::fetch_newest() {
  std::vector<CodedStore::Run> runs;
  for (Group& group : groups_) plan_newest(group, runs);
  for (const Group& group : groups_) store_.moved_ += group.fresh.size();
  if (store_.fetch(runs, Priority::scrub)) return;
  // Which of them it is, each tells by itself.
  for (Group& group : groups_) {
    runs.clear();
    plan_newest(group, runs);
    if (const Status fetched = store_.fetch(runs, Priority::scrub); !fetched) leave(group, fetched.error());
  }
}

// Where the newest blocks of the group are, and what its headers will say of them.
void Folding::plan_newest(Group& group, std::vector<CodedStore::Run>& runs) {
  Headers& next = next_headers(group.stripe);
  group.fresh = AlignedBytes(group.dirty_count() * group.count * kBlock);
  size_t nth = 0;
  for (size_t c = 0; c < shape_.k; ++c) {
    if (!is_set(group.dirty, c)) continue;
    for (size_t r = 0; r < group.count; ++r) {
      const Stripe::Newer& newer = group.newer[r * group.dirty_count() + nth];
      std::byte* into = group.fresh.data() + (nth * group.count + r) * kBlock;
      const bool goes_on = r > 0 && runs.back().val == newer.val && runs.back().index + runs.back().count == newer.index;
      if (goes_on) {
        ++runs.back().count;
      } else {
        runs.push_back({CodedStore::Run::From::log, group.stripe, c, group.first + r, 1, newer.val, newer.index, into});
      }
      next.versions[(group.first + r) * shape_.k + c] = newer.val->stamp + (mutated(Mutation::fold_oldest) ? 1 : 0);
      next.crcs[(group.first + r) * shape_.n() + c] = newer.val->crcs[newer.index];
    }
    ++nth;
  }
}

void Folding::fetch_bases() {
  std::vector<RowsWanted> rows;
  std::vector<Group*> whose;
  for (Group& group : groups_) {
    const uint32_t wanted = choose_way(group);
    group.blocks = AlignedBytes(shape_.n() * group.count * kBlock);
    if (wanted == 0) continue;
    rows.push_back({group.stripe.get(), group.first, group.count, wanted, group.blocks.span()});
    whose.push_back(&group);
  }
  store_.read_rows(rows, Priority::scrub);
  for (size_t i = 0; i < rows.size(); ++i) {
    store_.moved_ += rows[i].blocks_read * kBlock;
    if (!rows[i].status) leave(*whose[i], rows[i].status.error());
  }
}

// By delta, or from all data of the rows, whichever reads less: the bases that it takes.
uint32_t Folding::choose_way(Group& group) const {
  const Headers& headers = *group.stripe->headers;
  const uint32_t live = store_.live_positions(*group.stripe);
  const uint32_t data_all = (uint32_t{1} << shape_.k) - 1;
  const uint32_t parity_all = ((uint32_t{1} << shape_.n()) - 1) & ~data_all;
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
  return group.by_delta ? group.dirty | (parity_all & live) : data_all & ~group.dirty;
}

// New data and new parity of the rows.
Status Folding::compute(Group& group) {
  Headers& next = next_headers(group.stripe);
  const uint32_t live = store_.live_positions(*group.stripe);
  group.parity_crcs.assign(shape_.m, std::vector<uint32_t>(group.count));
  std::vector<codec::Target> targets(shape_.m);
  for (size_t j = 0; j < shape_.m; ++j) {
    if (group.by_delta && !is_set(live, shape_.k + j)) continue;
    targets[j] = {group.chunk(shape_.k + j), group.parity_crcs[j]};
  }
  size_t nth = 0;
  for (size_t c = 0; c < shape_.k; ++c) {
    if (!is_set(group.dirty, c)) continue;
    const auto newest = group.fresh.span().subspan(nth++ * group.count * kBlock, group.count * kBlock);
    if (group.by_delta && mutated(Mutation::delta_against_new)) std::memcpy(group.chunk(c).data(), newest.data(), newest.size());
    if (group.by_delta && mutated(Mutation::apply_delta_twice)) STOKER_TRY(store_.code_.delta(static_cast<int>(c), group.chunk(c), {newest, {}}, targets));
    if (group.by_delta) STOKER_TRY(store_.code_.delta(static_cast<int>(c), group.chunk(c), {newest, {}}, targets));
    std::memcpy(group.chunk(c).data(), newest.data(), newest.size());
  }
  if (!group.by_delta) {
    std::vector<codec::Source> sources(shape_.k);
    for (size_t c = 0; c < shape_.k; ++c) sources[c].bytes = group.chunk(c);
    STOKER_TRY(store_.code_.encode(sources, targets));
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

// The new parity, durable in the logs of the live parities.
Status Folding::stage() {
  std::map<size_t, FrameBuilder> frames;
  for (const Group& group : groups_) {
    const uint32_t live = store_.live_positions(*group.stripe);
    const Headers& next = next_headers(group.stripe);
    for (size_t j = 0; j < shape_.m; ++j) {
      if (!is_set(live, shape_.k + j)) continue;
      StageItem item;
      item.fold = ids_.at(group.stripe->id);
      item.stripe = group.stripe->id;
      item.chunk = shape_.k + j;
      for (size_t row = group.first; row < group.first + group.count; ++row) {
        const Stamp* versions = &next.versions[row * shape_.k];
        const uint32_t* crcs = &next.crcs[row * shape_.n()];
        item.rows.push_back({row, {crcs[shape_.k + j], {versions, versions + shape_.k}, {crcs, crcs + shape_.k}}});
      }
      const size_t shard = group.stripe->shards[shape_.k + j];
      FrameBuilder& frame = frames[shard];
      for (size_t r = 0; r < group.count; ++r) staged_[group.stripe->id].push_back({group.first + r, shape_.k + j, {shard, 0}, frame.block_count() + r});
      frame.add(shape_, item, group.chunk(shape_.k + j));
    }
  }
  std::map<size_t, LogFrame> written;
  STOKER_TRY(append(frames, written));
  for (auto& [id, blocks] : staged_) {
    for (Staged& block : blocks) {
      if (const auto frame = written.find(block.place.shard); frame != written.end()) block.place.offset = frame->second.blocks_at + block.at * kBlock;
    }
  }
  return {};
}

// From here on a crash rolls the folds forward.
Status Folding::decide() {
  std::map<uint64_t, FoldItem> items;
  std::map<uint64_t, uint32_t> concerned;
  for (const Group& group : groups_) {
    FoldItem& item = items[group.stripe->id];
    item.fold = ids_.at(group.stripe->id);
    item.stripe = group.stripe->id;
    concerned[group.stripe->id] |= group.dirty;
    for (size_t i = 0; i < group.newer.size(); ++i) {
      const Stripe::Newer& newer = group.newer[i];
      item.rows.push_back({group.first + i / group.dirty_count(), newer.val->chunk, newer.val->stamp});
    }
  }
  std::map<size_t, FrameBuilder> frames;
  for (const StripePtr& stripe : stripes_) {
    const auto item = items.find(stripe->id);
    if (item == items.end()) continue;
    const uint32_t live = store_.live_positions(*stripe);
    for (size_t c = 0; c < shape_.n(); ++c) {
      if (is_set(live, c) && (c >= shape_.k || is_set(concerned[stripe->id], c))) frames[stripe->shards[c]].add(item->second);
    }
  }
  std::map<size_t, LogFrame> written;
  return append(frames, written);
}

Status Folding::append(std::map<size_t, FrameBuilder>& frames, std::map<size_t, LogFrame>& written) {
  for (const auto& [shard, frame] : frames) store_.moved_ += frame.bytes();
  STOKER_TRY(store_.append(frames, 0, written));
  for (const auto& [shard, frame] : written) held_.push_back(frame.segment);
  return {};
}

void Folding::set_folding(bool folding) {
  std::unique_lock lock(store_.mutex_);
  for (const StripePtr& stripe : stripes_) stripe->folding = folding;
  store_.unpinned_.notify_all();
  if (!folding) return;
  store_.unpinned_.wait(lock, [&] { return std::all_of(stripes_.begin(), stripes_.end(), [](const StripePtr& stripe) { return stripe->readers == 0; }); });
}

// Blocks in place, durable; then the headers, durable.
Status Folding::apply() {
  ShardBatch blocks(store_.shards(), Priority::scrub);
  ShardSet touched = 0;
  std::map<uint64_t, std::set<std::pair<size_t, size_t>>> pages;  // by stripe: position, page
  for (const Group& group : groups_) {
    const uint32_t live = store_.live_positions(*group.stripe);
    for (size_t c = 0; c < shape_.n(); ++c) {
      if (!is_set(live, c) || (c < shape_.k && !is_set(group.dirty, c))) continue;
      blocks.write(group.stripe->shards[c], shape_.block_at(group.stripe->slots[c], group.first), {group.chunk(c).data(), group.count * kBlock, -1});
      store_.moved_ += group.count * kBlock;
      touched |= shard_bit(group.stripe->shards[c]);
      for (size_t page = group.first / shape_.rows_per_page(); page <= (group.first + group.count - 1) / shape_.rows_per_page(); ++page) pages[group.stripe->id].emplace(c, page);
    }
  }
  ShardSet failed = blocks.run();
  if (failed != 0) STOKER_TRY(store_.drop_shards(failed, blocks.why()));
  if (!mutated(Mutation::header_before_blocks)) STOKER_TRY(store_.flush(touched));
  std::vector<AlignedBytes> memory;
  ShardBatch headers(store_.shards(), Priority::scrub);
  for (const StripePtr& stripe : stripes_) {
    Headers& next = next_headers(stripe);
    const uint32_t live = store_.live_positions(*stripe);
    for (const auto& [position, page] : pages[stripe->id]) {
      if (!is_set(live, position)) continue;
      const HeaderPage header = page_of(shape_, stripe->id, next, position, page);
      next.counters[position * shape_.pages() + page] = header.counter;
      encode_page(shape_, store_.shards().store(), header, memory.emplace_back(kBlock).span());
      headers.write(stripe->shards[position], shape_.page_at(stripe->slots[position], page, header.counter), memory.back().slice());
    }
  }
  store_.moved_ += memory.size() * kBlock;
  failed = headers.run();
  if (failed != 0) STOKER_TRY(store_.drop_shards(failed, headers.why()));
  return store_.flush(touched);
}

// Too few shards are left to write to. What the bases hold of these rows is unknown; VALs and staged blocks stand for them, as they would after
// opening again.
void Folding::stand_in() {
  std::lock_guard lock(store_.mutex_);
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.newer.size(); ++i) {
      const Stripe::Newer& newer = group.newer[i];
      const Place* copy = newer.val->live_place(store_.live_, 0);
      Place place = copy != nullptr ? *copy : newer.val->places.front();
      place.offset += newer.index * kBlock;
      group.stripe->overrides[(group.first + i / group.dirty_count()) * shape_.n() + newer.val->chunk] = {place, newer.val, newer.index};
    }
  }
  for (const StripePtr& stripe : stripes_) {
    for (const Staged& block : staged_[stripe->id]) {
      if (block.place.offset != 0) stripe->overrides[block.row * shape_.n() + block.position] = {block.place, nullptr, 0};
    }
    stripe->headers = std::move(next_headers(stripe));
  }
  store_.stand_ins_.insert(store_.stand_ins_.end(), held_.begin(), held_.end());
}

void Folding::finish() {
  std::lock_guard lock(store_.mutex_);
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.newer.size(); ++i) {
      const size_t block = (group.first + i / group.dirty_count()) * shape_.k + group.newer[i].val->chunk;
      const auto at = group.stripe->overlay.find(block);
      if (at != group.stripe->overlay.end() && at->second.val == group.newer[i].val) group.stripe->overlay.erase(at);
    }
  }
  for (const StripePtr& stripe : stripes_) {
    stripe->headers = std::move(next_headers(stripe));
    ++store_.counts_.folds;
  }
}

void Folding::rejoin() {
  for (const StripePtr& stripe : stripes_) {
    if (const Status joined = store_.join_again(stripe); !joined) store_.give_up_joining(joined.error().message());
  }
}

Future<void> CodedStore::fold_all() {
  Request request;
  request.work = [this]() -> Status {
    for (;;) {
      STOKER_ASSIGN(const size_t folded, fold_step({kFoldedAtOnce}));
      if (folded == 0) return checkpoint();
    }
  };
  Future<void> future = request.done.future();
  std::lock_guard lock(queue_mutex_);
  queue_.push_back(std::move(request));
  queued_.notify_all();
  return future;
}

bool CodedStore::folded_up_to(Stamp stamp) const {
  std::lock_guard lock(mutex_);
  for (const auto& [id, weak] : dirty_) {
    const StripePtr stripe = weak.lock();
    if (!stripe || stuck_.contains(id)) continue;
    if (std::any_of(stripe->overlay.begin(), stripe->overlay.end(), [stamp](const auto& each) { return each.second.val->stamp <= stamp; })) return false;
  }
  return true;
}

// What comes meanwhile is not waited for, or it might never end.
Future<void> CodedStore::drain() {
  Stamp until = 0;
  {
    std::lock_guard lock(mutex_);
    until = make_stamp(epoch_, version_);
  }
  return add_job([this, until]() -> Result<bool> {
    STOKER_ASSIGN(const size_t folded, fold_paced({kFoldedAtOnce, kRowsAStep}, fold_pace_));
    if (folded > 0 && !folded_up_to(until)) return true;  // 0: all that is left cannot be folded
    STOKER_TRY(checkpoint());
    return false;
  }, fold_pace_);
}

}  // namespace stoker::coded
