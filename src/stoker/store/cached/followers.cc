#include "stoker/store/cached/followers.h"

#include <algorithm>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/store/cached/format.h"

namespace stoker::cached {
namespace {

constexpr uint64_t kBehind = 4096;        // a position so far back is given up
constexpr uint64_t kAhead = 65'536;       // a read of what is used so late is somebody else's
constexpr uint64_t kHorizon = 1'048'576;  // positions that are known at a time
constexpr size_t kItemsARead = 64;        // whose places are found
constexpr uint64_t kBytesABlock = 128;    // of a table of blocks, with its list node
constexpr uint64_t kBytesAMissed = 64;    // of a position that was passed by
constexpr uint64_t kItemsMax = uint64_t{1} << 40;   // of a plan
constexpr uint64_t kBlocksMax = uint64_t{1} << 26;  // that its ranges touch

Error wrong(const std::string& what) { return fail(Code::invalid_argument, "{}", what); }

}  // namespace

Result<std::unique_ptr<Follower>> Follower::make(Plan plan, const std::vector<ObjectInfo>& objects,
                                                 uint32_t block_bytes, Budget& budget) {
  std::unique_ptr<Follower> made(new Follower(std::move(plan)));
  const Plan& given = made->plan_;
  made->block_bytes_ = block_bytes;
  for (const ObjectInfo& object : objects) {
    made->tags_.push_back(object.tag);
    made->object_bytes_.push_back(object.bytes);
  }
  for (const PlanRun& run : given.runs) {
    if (run.object >= objects.size())
      return wrong("a plan of reads refers to key " + std::to_string(run.object) +
                   ", counted from 0, and lists " + std::to_string(objects.size()) + " keys");
    const uint64_t all = objects[run.object].bytes;
    const bool inside = run.items > 0 && run.bytes > 0 && run.offset <= all &&
                        run.bytes <= all - run.offset &&
                        (run.stride == 0 || run.items - 1 <= (all - run.offset) / run.stride) &&
                        (run.items - 1) * run.stride <= all - run.offset - run.bytes;
    if (!inside)
      return wrong("a plan reads " + std::to_string(run.items) + " ranges of " +
                   std::to_string(run.bytes) + " bytes, from byte " + std::to_string(run.offset) +
                   " on, of '" + objects[run.object].key +
                   "'; they must hold something and lie inside its " + std::to_string(all) +
                   " bytes");
    if (run.items > kItemsMax - made->items_ ||
        run.bytes > (kNever - made->item_bytes_) / run.items)
      return wrong(
          "a plan of reads is too long: it has 2^40 items at most, of less than 2^64 bytes in all");
    made->items_ += run.items;
    made->item_bytes_ += run.items * run.bytes;
    made->ends_.push_back(made->items_);
  }
  STOKER_TRY(made->reserve(objects, budget));
  STOKER_TRY(made->name_blocks(objects));
  made->last_ = std::holds_alternative<Plan::Listed>(given.order) ? made->items_ : kNever;
  if (const auto* mixed = std::get_if<Plan::Mixed>(&given.order)) {
    uint64_t sum = 0;
    for (const uint64_t count : mixed->items) {
      made->source_begin_.push_back(sum);
      sum += count;
    }
    if (mixed->items.size() != mixed->weights.size() || sum != made->items_ ||
        std::ranges::find(mixed->items, 0U) != mixed->items.end())
      return wrong("a mixed plan needs a weight and at least one item for each source, and " +
                   std::to_string(made->items_) + " items in all, not " + std::to_string(sum));
    STOKER_ASSIGN(made->mixture_, Mixture::make(mixed->weights, mixed->seed));
  }
  made->position_ = made->dropped_ = made->unrolled_ = std::min(given.position, made->last_);
  made->find_runs();
  std::vector<BlockId> unused;
  made->unroll(unused);
  return made;
}

// Of a listed or a mixed plan.
uint64_t Follower::item(uint64_t position) const {
  if (!mixture_) return position;
  const auto& mixed = std::get<Plan::Mixed>(plan_.order);
  const Draw draw = mixture_->draw(position);
  const uint64_t count = mixed.items[draw.source];
  return source_begin_[draw.source] +
         Permutation(count, mixed.seed + 1 + draw.source, draw.number / count)
             .sample(draw.number % count);
}

uint64_t Follower::epoch_item(uint64_t position) const {
  const auto* shuffled = std::get_if<Plan::Shuffled>(&plan_.order);
  if (shuffled == nullptr) return item(position);
  return Permutation(items_, shuffled->seed, position / items_).sample(position % items_);
}

void Follower::find_runs() {
  if (!plan_.ahead || !std::holds_alternative<Plan::Shuffled>(plan_.order)) return;
  for (uint32_t i = 0; i < plan_.runs.size(); ++i)
    runs_of_[plan_.keys[plan_.runs[i].object]].push_back(i);
  for (auto& [key, runs] : runs_of_)
    std::ranges::stable_sort(runs, {}, [this](uint32_t run) { return plan_.runs[run].offset; });
}

// The blocks that it may name at most, and the positions that it may know at a time.
Status Follower::reserve(const std::vector<ObjectInfo>& objects, Budget& budget) {
  std::vector<uint64_t> touched(objects.size());
  uint64_t uses = 0, bytes = 0;
  for (const PlanRun& run : plan_.runs) {
    const uint64_t each = run.bytes / block_bytes_ + 2;
    uint64_t& of = touched[run.object];
    of = std::min<uint64_t>(objects[run.object].bytes / block_bytes_ + 1,
                            of + std::min(kBlocksMax, run.items) * each);
    uses = std::min(kHorizon, uses + std::min(kHorizon, run.items) * each);
  }
  for (const uint64_t each : touched) bytes += each * kBytesABlock;
  for (const ObjectInfo& object : objects)
    bytes += sizeof(std::string) * 4 + object.key.size() + object.tag.size();
  bytes += plan_.runs.size() * (sizeof(PlanRun) + sizeof(uint64_t) + sizeof(uint32_t));
  if (!std::holds_alternative<Plan::Shuffled>(plan_.order))
    bytes += uses * 2 * sizeof(uint64_t);
  else if (plan_.ahead)
    bytes += kBehind * kBytesAMissed;
  auto granted = budget.take(bytes, "a plan of " + std::to_string(items_) + " items");
  if (!granted) {
    Error refused = granted.error();
    refused.what +=
        " (budget_bytes of the runtime that opened the cache), or follow fewer ranges at a time";
    return refused;
  }
  memory_ = std::move(*granted);
  return {};
}

// Item by item only where blocks may lie between two of them: there are no more items than blocks.
Status Follower::name_blocks(const std::vector<ObjectInfo>& objects) {
  uint64_t touched = 0;
  for (const PlanRun& run : plan_.runs) {
    const ObjectInfo& object = objects[run.object];
    const uint64_t steps = run.stride > block_bytes_ ? run.items : 1;
    const uint64_t reach = steps == 1 ? (run.items - 1) * run.stride + run.bytes : run.bytes;
    for (uint64_t step = 0; step < steps; ++step) {
      const uint64_t offset = run.offset + step * run.stride;
      const uint64_t first = offset / block_bytes_, last = (offset + reach - 1) / block_bytes_;
      touched += last - first + 1;
      if (touched > kBlocksMax)
        return wrong("the ranges of a plan touch more than " + std::to_string(kBlocksMax) +
                     " blocks; make blocks larger, or name fewer ranges at a time");
      for (uint64_t block = first; block <= last; ++block) {
        if (blocks_.try_emplace(block_id(object.key, object.tag, block)).second)
          block_bytes_sum_ += std::min<uint64_t>(block_bytes_, object.bytes - block * block_bytes_);
      }
    }
  }
  return {};
}

template <typename Do>
void Follower::each_block(uint64_t item, Do use) const {
  const auto at = std::ranges::upper_bound(ends_, item);
  STOKER_CHECK(at != ends_.end() && ends_.size() == plan_.runs.size());
  const PlanRun& run = plan_.runs[static_cast<size_t>(at - ends_.begin())];
  const uint64_t offset = run.offset + (item - (*at - run.items)) * run.stride;
  const uint64_t last = (offset + run.bytes - 1) / block_bytes_;
  for (uint64_t block = offset / block_bytes_; block <= last; ++block)
    use(block_id(plan_.keys[run.object], tags_[run.object], block));
}

std::vector<Part> Follower::parts(uint64_t position) const {
  std::vector<Part> parts;
  if (position >= last_) return parts;
  const uint64_t item = epoch_item(position);
  const auto at = std::ranges::upper_bound(ends_, item);
  STOKER_CHECK(at != ends_.end());
  const PlanRun& run = plan_.runs[static_cast<size_t>(at - ends_.begin())];
  const std::string& key = plan_.keys[run.object];
  const uint64_t begin = run.offset + (item - (*at - run.items)) * run.stride;
  const uint64_t end = begin + run.bytes;
  for (uint64_t offset = begin; offset < end;) {
    const uint64_t block = offset / block_bytes_;
    const uint64_t bytes = std::min(end, (block + 1) * block_bytes_) - offset;
    parts.push_back({.id = block_id(key, tags_[run.object], block),
                     .key = &key,
                     .tag = &tags_[run.object],
                     .offset = offset,
                     .bytes = bytes,
                     .object_bytes = object_bytes_[run.object]});
    offset += bytes;
  }
  return parts;
}

void Follower::pass(std::string_view key, uint64_t offset, uint64_t bytes) {
  const auto of = runs_of_.find(key);
  if (of == runs_of_.end()) return;
  const auto above = std::ranges::lower_bound(
      of->second, offset + bytes, {}, [this](uint32_t run) { return plan_.runs[run].offset; });
  size_t left = kItemsARead;
  for (auto at = above; left > 0 && at != of->second.begin();) {
    const uint32_t index = *--at;
    const PlanRun& run = plan_.runs[index];
    const bool inside = run.offset >= offset;
    uint64_t step = 0;
    if (!inside) {
      if (run.stride == 0) break;
      step = (offset - run.offset + run.stride - 1) / run.stride;
    }
    for (; left > 0 && step < run.items && run.offset + step * run.stride < offset + bytes;
         ++step) {
      passed(ends_[index] - run.items + step);
      --left;
    }
    if (!inside) break;
  }
}

// An item is read once an epoch. So a read is the late one of a place that was passed by, where
// there is one. Else it is of this epoch, or it opens the next one.
void Follower::passed(uint64_t item) {
  const uint64_t seed = std::get<Plan::Shuffled>(plan_.order).seed;
  const auto place = [&](uint64_t epoch) {
    return epoch * items_ + Permutation(items_, seed, epoch).position(item);
  };
  const uint64_t epoch = position_ / items_;
  if (!missed_.empty()) {
    if (epoch > 0 && missed_.erase(place(epoch - 1)) > 0) return;
    if (missed_.erase(place(epoch)) > 0) return;
  }
  uint64_t at = place(epoch), reach = kAhead;
  if (at < position_) {
    at = place(epoch + 1);
    reach = std::min(kBehind, items_ / 4);
  }
  if (at - position_ > reach) return;
  for (uint64_t each = std::max(position_, at - std::min(at, kBehind)); each < at; ++each)
    missed_.insert(missed_.end(), each);
  position_ = at + 1;
  while (!missed_.empty() && *missed_.begin() + kBehind < position_) missed_.erase(missed_.begin());
}

// All items of a shuffled plan are used once an epoch, so none is worth another's place: it needs
// no positions.
void Follower::unroll(std::vector<BlockId>& changed) {
  if (std::holds_alternative<Plan::Shuffled>(plan_.order)) return;
  STOKER_CHECK(position_ <= last_ && unrolled_ <= last_ && dropped_ <= position_);
  const uint64_t end = last_ - position_ < kHorizon ? last_ : position_ + kHorizon;
  for (; unrolled_ < end && known_uses_ < kHorizon; ++unrolled_)
    each_block(item(unrolled_), [&](const BlockId& id) {
      auto& uses = blocks_.at(id);
      uses.push_back(unrolled_);
      ++known_uses_;
      if (uses.size() == 1) changed.push_back(id);
    });
}

uint64_t Follower::next(const BlockId& id) const {
  const auto& uses = blocks_.at(id);
  if (uses.empty()) return unrolled_ == last_ ? kNever : kSomeDay;
  return uses.front() > position_ ? uses.front() - position_ : 0;
}

uint64_t Follower::after(const BlockId& id, uint64_t position) const {
  const auto use = blocks_.at(id).after(position);
  if (!use) return unrolled_ == last_ ? kNever : kSomeDay;
  return *use > position_ ? *use - position_ : 0;
}

uint64_t Follower::read(const BlockId& id, std::vector<BlockId>& changed) {
  auto& uses = blocks_.at(id);
  if (uses.empty() || uses.front() > position_ + kAhead) return 0;
  const uint64_t before = position_;
  position_ = std::max(position_, uses.front() + 1);
  uses.pop_front();
  STOKER_CHECK(known_uses_ > 0);
  --known_uses_;
  changed.push_back(id);
  for (; dropped_ + kBehind < position_; ++dropped_)
    each_block(item(dropped_), [&](const BlockId& passed) {
      auto& late = blocks_.at(passed);
      if (late.empty() || late.front() > dropped_) return;
      late.pop_front();
      STOKER_CHECK(known_uses_ > 0);
      --known_uses_;
      changed.push_back(passed);
    });
  unroll(changed);
  return position_ - before;
}

void Followers::follow(const std::string& name, std::shared_ptr<Follower> follower) {
  followers_.erase(name);
  if (follower) followers_.emplace(name, std::move(follower));
}

template <typename Next>
std::optional<uint64_t> Followers::soonest(const BlockId& id, Next next_of) const {
  std::optional<uint64_t> first;
  for (const auto& [name, follower] : followers_) {
    if (!follower->names(id)) continue;
    uint64_t next = next_of(*follower);
    // Each read moves the clock for one of them alone.
    if (next < kSomeDay) next = clock_ + next * followers_.size();
    first = std::min(first.value_or(kNever), next);
  }
  return first;
}

std::optional<uint64_t> Followers::next(const BlockId& id) const {
  return soonest(id, [&](const Follower& each) { return each.next(id); });
}

std::optional<uint64_t> Followers::after(const BlockId& id, const Follower& first,
                                         uint64_t position) const {
  return soonest(id, [&](const Follower& each) {
    return &each == &first ? each.after(id, position) : each.next(id);
  });
}

void Followers::pass(std::string_view key, uint64_t offset, uint64_t bytes) {
  for (const auto& [name, follower] : followers_) follower->pass(key, offset, bytes);
}

void Followers::read(const BlockId& id, std::initializer_list<Policy*> policies) {
  Follower* soonest = nullptr;
  for (const auto& [name, follower] : followers_) {
    if (!follower->names(id)) continue;
    if (soonest == nullptr || follower->next(id) < soonest->next(id)) soonest = follower.get();
  }
  if (soonest == nullptr) return;
  std::vector<BlockId> changed;
  clock_ += soonest->read(id, changed);
  for (const BlockId& each : changed) {
    const auto then = next(each);
    for (Policy* policy : policies)
      if (policy != nullptr) policy->plan(each, then);
  }
}

}  // namespace stoker::cached
