#include "stoker/store/cached/store.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/log.h"
#include "stoker/store/cached/cached_store.h"

namespace stoker::cached {
namespace {

// Whether another try may succeed although nobody changes the composition.
bool passes(Code code) {
  return code == Code::io || code == Code::corruption || code == Code::busy ||
         code == Code::out_of_space || code == Code::read_only || code == Code::cancelled;
}

// The rest is for blocks that stay.
uint64_t moving_places(const CachedOptions& options) {
  const uint64_t places = options.dram_bytes / options.block_bytes;
  return std::max<uint64_t>(1, std::min(places / 2, 2 * kCommitBytes / options.block_bytes));
}

}  // namespace

// What changes SLOW. When a commit is done, readers ask for the objects again.
class CachedStore::Change final : public Transaction {
 public:
  Change(CachedStore& store, std::unique_ptr<Transaction> slow)
      : store_(store), slow_(std::move(slow)) {}

  Status resize(std::string_view key, uint64_t bytes, uint32_t chunk_bytes) override {
    return slow_->resize(key, bytes, chunk_bytes);
  }
  Future<void> write(std::string_view key, uint64_t offset, Slice from,
                     Priority priority) override {
    return slow_->write(key, offset, from, priority);
  }
  Status remove(std::string_view key) override { return slow_->remove(key); }
  Status expect(std::string_view key, Class expected) override {
    return slow_->expect(key, expected);
  }
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override {
    return slow_->read(key, offset, into, options);
  }
  Status require(std::string_view key, std::string_view tag) override {
    return slow_->require(key, tag);
  }
  Status name(std::string_view snapshot) override { return slow_->name(snapshot); }
  Future<Version> commit(Durability durability) override {
    return slow_->commit(durability).then([&store = store_](const Result<Version>& done) {
      store.doubt();
      return done;
    });
  }

 private:
  CachedStore& store_;
  const std::unique_ptr<Transaction> slow_;
};

CachedStore::CachedStore(std::string name, OpenFast fast, std::unique_ptr<Store> slow,
                         std::unique_ptr<Arena> memory, Budget& budget,
                         const CachedOptions& options)
    : name_(std::move(name)),
      open_fast_(std::move(fast)),
      slow_(std::move(slow)),
      options_(options),
      memory_(std::move(memory)),
      budget_(budget),
      moving_places_(moving_places(options)),
      in_memory_(options.dram_bytes / options.block_bytes),
      ahead_(moving_places_ / 4) {
  if (const uint64_t staying = in_memory_.cap() - moving_places_; staying > 0)
    memory_policy_ = std::make_unique<Policy>(staying);
}

Result<std::unique_ptr<Store>> CachedStore::open(std::string name, OpenFast fast,
                                                 std::unique_ptr<Store> slow,
                                                 const Runtime& runtime,
                                                 const CachedOptions& options) {
  const uint32_t block = options.block_bytes;
  if (!std::has_single_bit(block) || block < 64 * kKiB || block > 8 * kMiB)
    return fail(Code::invalid_argument,
                "the blocks of a cache are a power of two from 64 KiB to 8 MiB, not {}",
                human_bytes(block));
  if (options.dram_bytes < block)
    return fail(Code::invalid_argument,
                "the cache has {} of memory, less than one block of {}; give it more with dram=",
                human_bytes(options.dram_bytes), human_bytes(block));
  STOKER_ASSIGN(auto memory, Arena::make(options.dram_bytes, runtime.budget));
  std::unique_ptr<CachedStore> store(new CachedStore(std::move(name), std::move(fast),
                                                     std::move(slow), std::move(memory),
                                                     runtime.budget, options));
  STOKER_TRY(store->start());
  return std::unique_ptr<Store>(std::move(store));
}

Status CachedStore::start() {
  {
    MutexLock lock(mutex_);
    auto slots = open_slots();
    if (slots) {
      take_up(std::move(*slots));
    } else if (passes(slots.error().code)) {
      turn_off(slots.error());
    } else {
      return slots.error();
    }
  }
  writer_ = std::thread([this] { write_behind(); });
  prefetcher_ = std::thread([this] { fetch_ahead(); });
  return {};
}

CachedStore::~CachedStore() {
  {
    MutexLock lock(mutex_);
    ahead_stopping_ = true;
    ahead_wake_.notify_all();
  }
  if (prefetcher_.joinable()) prefetcher_.join();
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (writer_.joinable()) writer_.join();
}

// Opens FAST, and knows then how many slots there are.
Result<CachedStore::Opened> CachedStore::open_slots() {
  const uint64_t wanted = options_.disk_bytes / options_.block_bytes;
  if (options_.disk_bytes != 0 && wanted == 0)
    return fail(
        Code::invalid_argument,
        "disk= holds less than one block of the cache; give a larger disk= or a smaller block=");
  STOKER_ASSIGN(auto fast,
                open_fast_(wanted == 0 ? 0 : room_for(wanted, options_.block_bytes).fast_bytes));
  const StoreInfo info = fast->info();
  if (!info.read_only.empty()) return fail(Code::read_only, "{}", info.read_only);
  if (wanted == 0 && info.capacity_bytes == 0)
    return fail(Code::invalid_argument,
                "'{}' has no size of its own; say with disk= how much of it the cache may take",
                info.composition);
  const Room room = wanted != 0 ? room_for(wanted, options_.block_bytes)
                                : room_in(info.capacity_bytes, options_.block_bytes);
  if (room.usable == 0 || (info.capacity_bytes != 0 && room.fast_bytes > info.capacity_bytes))
    return fail(
        Code::invalid_argument,
        "'{}' holds {}, and the cache needs {}; make it larger or disk= smaller", info.composition,
        human_bytes(info.capacity_bytes),
        human_bytes(room_for(std::max<uint64_t>(1, wanted), options_.block_bytes).fast_bytes));
  STOKER_ASSIGN(auto slots,
                Slots::open(std::move(fast), {.block_bytes = options_.block_bytes,
                                              .slots = room.slots,
                                              .slow = identity(slow_->info().composition)}));
  return Opened{std::move(slots), room};
}

void CachedStore::take_up(Opened opened) {
  room_ = opened.room;
  slots_ = std::move(opened.slots);
  last_slots_ = slots_;
  ++life_;
  errors_ = good_ = 0;
  counts_.off.clear();
  counts_.usable_bytes = room_.usable * options_.block_bytes;
  policy_ = std::make_unique<Policy>(room_.usable);
  places_.clear();
  free_.clear();
  leaving_.clear();
  generation_.assign(room_.slots, 0);
  std::vector<bool> used(room_.slots);
  for (const Record& record : slots_->found()) {
    used[record.slot] = true;
    if (policy_->size() == room_.usable) {
      leaving_.push_back(record.slot);
      continue;
    }
    policy_->add(record.id, followers_.next(record.id));
    places_[record.id] = {record.slot, record.bytes};
  }
  for (uint64_t slot = room_.slots; slot-- > 0;)
    if (!used[slot]) free_.push_back(static_cast<uint32_t>(slot));
  STOKER_CHECK(places_.size() + free_.size() + leaving_.size() == room_.slots);
  if (!leaving_.empty()) ++flush_wanted_;  // they are needed as free ones
}

// At least one and at most half of the slots that are free for it: the other half takes what comes
// during the commit.
uint64_t CachedStore::batch() const {
  return std::max<uint64_t>(
      1, std::min({kCommitBytes / options_.block_bytes, free_.size() / 2, moving_places_ / 2}));
}

void CachedStore::turn_off(const Error& error) {
  if (counts_.off.empty() && probes_ == 0)  // else it was said already
    log().warn("the cache '{}' is not used for now, reads go to the slow store: {}", name_,
               error.message());
  counts_.off = error.message();
  closing_ = std::move(slots_);
  ++life_;
  policy_.reset();
  places_.clear();
  gathered_.clear();
  next_.clear();
  ahead_.drop_whole();
  wake_.notify_all();
}

void CachedStore::let_go() {
  auto closing = std::exchange(closing_, nullptr);
  mutex_.unlock();
  closing.reset();
  mutex_.lock();
}

// Opens FAST once more, when the last reader let go of it.
void CachedStore::turn_on() {
  probes_ = std::min(probes_ + 1, 6U);
  if (!last_slots_.expired()) return;
  mutex_.unlock();
  auto slots = open_slots();
  mutex_.lock();
  if (!slots) {
    counts_.off = slots.error().message();
    return;
  }
  take_up(std::move(*slots));
  log().warn("the cache '{}' is used again", name_);
}

void CachedStore::forget_block(const BlockId& id) {
  if (ahead_.drop_whole(id)) ahead_.pressed();
  if (const auto gathered = gathered_.find(id); gathered != gathered_.end()) {
    STOKER_CHECK(policy_ && !policy_->holds(id));
    next_.erase(gathered->second.number);
    gathered_.erase(gathered);
  }
  if (const auto place = places_.find(id); place != places_.end()) {
    leaving_.push_back(place->second.slot);
    places_.erase(place);
  }
}

Status CachedStore::forget(std::string_view key, uint64_t offset, uint64_t bytes) {
  STOKER_ASSIGN(const ObjectInfo object, object_now(key));
  if (offset > object.bytes || bytes > object.bytes - offset)
    return fail(Code::invalid_argument, "'{}' has {} bytes: there are no bytes {} to {} to forget",
                object.key, object.bytes, offset, offset + bytes);
  if (bytes == 0) return {};
  MutexLock lock(mutex_);
  const uint64_t last = (offset + bytes - 1) / options_.block_bytes;
  for (uint64_t block = offset / options_.block_bytes; block <= last; ++block) {
    const BlockId id = block_id(key, object.tag, block);
    fetches_.erase(id);
    kept_.erase(id);
    counts_.prefetched_in_vain_bytes += ahead_.drop(id);
    if (memory_policy_) memory_policy_->remove(id);
    if (!policy_) continue;
    policy_->remove(id);
    forget_block(id);
  }
  const uint64_t wanted = ++flush_wanted_;
  const uint64_t life = life_;  // of another one the map says nothing of what was forgotten
  wake_.notify_one();
  flushed_.wait(
      lock, [&]() REQUIRES(mutex_) { return flush_done_ >= wanted || life_ != life || !slots_; });
  if (slots_ && life_ == life) return {};
  return fail(Code::io,
              "the cache forgot the bytes, but cannot record that on its disk{}; forget them again",
              counts_.off.empty() ? "" : " (" + counts_.off + ")");
}

Result<std::unique_ptr<Transaction>> CachedStore::begin() {
  STOKER_ASSIGN(auto begun, slow_->begin());
  return std::unique_ptr<Transaction>(new Change(*this, std::move(begun)));
}

Result<Version> CachedStore::copy(std::string_view from, std::string_view to) {
  auto done = slow_->copy(from, to);
  doubt();
  return done;
}

void CachedStore::doubt() {
  MutexLock lock(mutex_);
  ++doubts_;
  for (auto& [key, known] : known_) known.asked.reset();
}

bool CachedStore::believed(const Known& known) const {
  return known.asked && std::chrono::steady_clock::now() - *known.asked <= options_.believe;
}

std::optional<ObjectInfo> CachedStore::known(std::string_view key) {
  MutexLock lock(mutex_);
  const auto at = known_.find(key);
  if (at == known_.end() || !believed(at->second)) return {};
  return at->second.object;
}

std::optional<ObjectInfo> CachedStore::stat_at_once(std::string_view key) {
  auto object = known(key);
  return object ? object : slow_->stat_at_once(key);
}

Result<ObjectInfo> CachedStore::object_of(std::string_view key) {
  if (auto object = known(key)) return std::move(*object);
  return object_now(key);
}

Result<ObjectInfo> CachedStore::object_now(std::string_view key) {
  const auto asked = std::chrono::steady_clock::now();
  MutexLock lock(mutex_);
  const uint64_t doubts = doubts_;
  lock.unlock();
  auto object = slow_->stat(key);
  lock.lock();
  const auto at = known_.find(key);
  if (at == known_.end() || doubts != doubts_) return object;
  at->second.asked = object ? Asked(asked) : std::nullopt;
  if (object) at->second.object = *object;
  return object;
}

void CachedStore::name_keys(const std::vector<ObjectInfo>& objects, Asked asked) {
  for (const ObjectInfo& object : objects) {
    Known& known = known_[object.key];
    ++known.plans;
    known.object = object;
    known.asked = asked;
  }
}

Status CachedStore::follow(const Plan& plan) {
  std::shared_ptr<Follower> follower;
  std::vector<ObjectInfo> objects;
  const auto asked = std::chrono::steady_clock::now();
  MutexLock lock(mutex_);
  const uint64_t doubts = doubts_;
  lock.unlock();
  if (!plan.runs.empty()) {
    for (const std::string& key : plan.keys) {
      STOKER_ASSIGN(ObjectInfo object, slow_->stat(key));
      objects.push_back(std::move(object));
    }
    STOKER_ASSIGN(follower, Follower::make(plan, objects, options_.block_bytes, budget_));
  }
  lock.lock();
  if (const auto before = epochs_.find(plan.name); before != epochs_.end()) {
    counts_.prefetched_in_vain_bytes += ahead_.drop(*before->second.follower);
    for (const std::string& key : before->second.keys) {
      const auto at = known_.find(key);
      STOKER_CHECK(at != known_.end() && at->second.plans > 0);
      if (--at->second.plans == 0) known_.erase(at);
    }
    epochs_.erase(before);
  }
  if (follower) {
    Epoch& epoch = epochs_[plan.name];
    epoch.keys = plan.keys;
    name_keys(objects, doubts == doubts_ ? Asked(asked) : std::nullopt);
    epoch.item_bytes = follower->item_bytes();
    epoch.distinct_bytes = follower->distinct_bytes();
    epoch.fetched_before = counts_.fetched_bytes;
    epoch.follower = follower;
    for (const auto& [id, place] : places_)
      if (follower->names(id)) epoch.kept_bytes += place.bytes;
    for (const auto& [id, block] : gathered_)
      if (follower->names(id)) epoch.kept_bytes += block.block->size;
  }
  followers_.follow(plan.name, std::move(follower));
  counts_.plans = followers_.size();
  wake_ahead();
  for (Policy* policy : {policy_.get(), memory_policy_.get()})
    if (policy != nullptr)
      for (const BlockId& id : policy->held()) policy->plan(id, followers_.next(id));
  return {};
}

void CachedStore::write_behind() {
  MutexLock lock(mutex_);
  for (;;) {
    const auto due = [this]() REQUIRES(mutex_) {
      return stopping_ || (slots_ && (next_.size() >= batch() || flush_wanted_ > flush_done_));
    };
    if (slots_) {
      wake_.wait(lock, [&]() REQUIRES(mutex_) { return due() || !slots_; });
    } else {
      flushed_.notify_all();
      let_go();
      if (!wake_.wait_for(lock, options_.probe * (1U << probes_), due)) turn_on();
    }
    const bool last = stopping_;  // said during a commit, it is not: more may be gathered
    if (slots_ && due()) commit();
    if (last && (next_.empty() || !slots_)) return;
  }
}

void CachedStore::commit() {
  const uint64_t flush = flush_wanted_;
  std::vector<Fill> fills;
  const size_t most = std::min<uint64_t>(free_.size(), kCommitBytes / options_.block_bytes);
  while (!next_.empty() && fills.size() < most) {
    ++generation_[free_.back()];
    fills.push_back({free_.back(), std::move(next_.begin()->second)});
    free_.pop_back();
    next_.erase(next_.begin());
  }
  const std::vector<uint32_t> freed = std::exchange(leaving_, {});
  if (!fills.empty() || !freed.empty()) {
    std::vector<Record> others;
    if (slots_->rewrites(fills.size() + freed.size()))
      for (const auto& [id, place] : places_) others.push_back({id, place.slot, place.bytes});
    auto slots = slots_;
    const uint64_t life = life_;
    mutex_.unlock();
    const Status status = slots->commit(fills, freed, others);
    slots.reset();
    mutex_.lock();
    if (life != life_) return;
    if (!status) {
      turn_off(status.error());
      return;
    }
    ++counts_.commits;
    wake_ahead();  // there is memory again
    free_.insert(free_.end(), freed.begin(), freed.end());
    for (const auto& [slot, block] : fills) {
      const auto at = gathered_.find(block->id);
      if (at == gathered_.end() || at->second.block != block) {
        leaving_.push_back(slot);
        continue;
      }
      gathered_.erase(at);
      const Place place{slot, static_cast<uint32_t>(block->size)};
      STOKER_CHECK(places_.emplace(block->id, place).second);
    }
    STOKER_CHECK(places_.size() + free_.size() + leaving_.size() == room_.slots);
    STOKER_CHECK(places_.size() <= policy_->size());
  }
  flush_done_ = flush;
  flushed_.notify_all();
}

StoreInfo CachedStore::info() const {
  StoreInfo info = slow_->info();
  MutexLock lock(mutex_);
  info.composition = name_;
  info.cache = counts_;
  info.cache->ahead_depth_bytes = ahead_.depth() * options_.block_bytes;
  info.cache->ahead_bytes = ahead_.unread_bytes();
  for (const auto& [id, place] : places_) info.cache->held_bytes += place.bytes;
  return info;
}

}  // namespace stoker::cached

namespace stoker {

Result<std::unique_ptr<Store>> open_cached_store(std::string name, OpenFast fast,
                                                 std::unique_ptr<Store> slow,
                                                 const Runtime& runtime,
                                                 const CachedOptions& options) {
  return cached::CachedStore::open(std::move(name), std::move(fast), std::move(slow), runtime,
                                   options);
}

}  // namespace stoker
