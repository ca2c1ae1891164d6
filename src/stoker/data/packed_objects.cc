#include "stoker/data/packed_objects.h"

#include <algorithm>
#include <cstring>

#include "stoker/base/bytes.h"
#include "stoker/base/clock.h"

namespace stoker::data {
namespace {

constexpr const char* kUnpackOnce =
    ", or unpack the data once with `stoker data build STORE OUT --unpack`";

// An eighth stays for the store's own transfers.
uint64_t most_of(const Budget& budget) { return budget.cap() - budget.cap() / 8; }

// Which part of it nobody has.
uint64_t left_of(const Budget& budget) {
  const uint64_t used = budget.used();
  return used < most_of(budget) ? most_of(budget) - used : 0;
}

}  // namespace

class PackedObjects::Rest {
 public:
  explicit Rest(size_t parts) : left_(parts) {}
  Future<uint64_t> future() const { return promise_.future(); }

  void done(const Result<uint64_t>& fetched) {
    MutexLock lock(mutex_);
    if (fetched) {
      fetched_ = std::max(fetched_, *fetched);
    } else if (!error_) {
      error_ = fetched.error();
    }
    if (--left_ != 0) return;
    Promise<uint64_t> promise = std::move(promise_);
    const Result<uint64_t> all = error_ ? Result<uint64_t>(*error_) : Result<uint64_t>(fetched_);
    lock.unlock();
    promise.complete(all);
  }

 private:
  Mutex mutex_;
  size_t left_ GUARDED_BY(mutex_);
  uint64_t fetched_ GUARDED_BY(mutex_) = 0;
  std::optional<Error> error_ GUARDED_BY(mutex_);
  Promise<uint64_t> promise_;  // moved away with the mutex, by the last
};

PackedObjects::PackedObjects(std::vector<PackedSource> sources, uint64_t most, PipelineTasks& tasks)
    : sources_(std::move(sources)), tasks_(tasks), asked_(sources_.size()) {
  for (size_t i = 0; i < sources_.size(); ++i) limits_.push_back(std::make_unique<Budget>(most));
  MutexLock lock(common_mutex);
  all().push_back(this);
}

PackedObjects::~PackedObjects() {
  MutexLock lock(common_mutex);
  std::erase(all(), this);
  objects_.clear();
}

std::vector<PackedObjects*>& PackedObjects::all() {
  static auto* all = new std::vector<PackedObjects*>;
  return *all;
}

Future<uint64_t> PackedObjects::read(uint32_t source, std::span<const Piece> pieces, Slice into) {
  std::map<uint64_t, std::vector<Piece>> by_object;
  std::vector<Piece> plain;
  for (const Piece& piece : pieces) {
    if (sources_[source].table->packed(piece.object).packing == Packing::none) {
      plain.push_back(piece);
    } else {
      by_object[piece.object].push_back(piece);
    }
  }
  if (by_object.empty() && plain.empty()) return Result<uint64_t>(Clock::real().now_ns());
  const auto rest = std::make_shared<Rest>(by_object.size() + (plain.empty() ? 0 : 1));
  Future<uint64_t> all = rest->future();
  std::vector<std::pair<std::shared_ptr<Object>, Waiter>> ready;
  {
    MutexLock lock(common_mutex);
    for (const Piece& piece : plain) asked_[source].first += piece.bytes;
    asked_[source].second += plain.size();
    for (auto& [number, of] : by_object) {
      const Id id{source, number};
      std::shared_ptr<Object>& object = objects_[id];
      if (object == nullptr) {
        object = std::make_shared<Object>();
        queue_.push_back(id);
      }
      Waiter waiter{std::move(of), into, rest};
      if (object->there) {
        ++object->used_by;
        ++under_way_;
        ready.emplace_back(object, std::move(waiter));
      } else {
        object->waiters.push_back(std::move(waiter));
      }
    }
  }
  for (auto& [object, waiter] : ready) {
    tasks_.run([this, object = std::move(object), waiter = std::move(waiter)] {
      copy(object, {waiter});
      go_on();
    });
  }
  if (!plain.empty()) {
    sources_[source].stored->read(plain, into).on_done([rest](const Result<uint64_t>& when) {
      rest->done(when);
    });
  }
  go_on();
  return all;
}

std::pair<uint64_t, uint64_t> PackedObjects::take_asked(uint32_t source) {
  MutexLock lock(common_mutex);
  return std::exchange(asked_[source], {});
}

// Fetches what there is memory for; those that wait for it come first. Once the waiters of what
// failed are told, their owner may end all of this: that comes last.
void PackedObjects::go_on(std::optional<Failed> failed) {
  std::vector<Todo> todo;
  {
    MutexLock lock(common_mutex);
    std::vector<PackedObjects*> order = all();
    std::erase_if(order, [this](const PackedObjects* each)
                             REQUIRES(common_mutex) { return each == this || each->turn_ == 0; });
    std::sort(order.begin(), order.end(),
              [](const PackedObjects* a, const PackedObjects* b)
                  REQUIRES(common_mutex) { return a->turn_ < b->turn_; });
    order.push_back(this);
    for (PackedObjects* each : order) todo.push_back(each->admit());
    if (failed) todo.back().failed.push_back(std::move(*failed));
  }
  for (const Todo& each : todo) {
    if (!each.starts.empty()) each.of->start(each.starts);
  }
  for (const Todo& each : todo) {
    for (const Failed& one : each.failed) {
      for (const Waiter& waiter : one.waiters) waiter.rest->done(one.error);
    }
  }
}

void PackedObjects::start(const std::vector<Start>& starts) {
  for (const auto& [id, object] : starts) {
    const Piece whole{id.number, 0, table(id).packed(id.number).bytes, 0};
    sources_[id.source]
        .stored->read({&whole, 1}, object->packed.slice().sub(0, whole.bytes))
        .on_done([this, id = id, object = object](const Result<uint64_t>& when) {
          fetched(id, object, when);
        });
  }
}

// Takes objects out of the queue as long as there is memory; what cannot have enough of it fails.
PackedObjects::Todo PackedObjects::admit() {
  Todo todo{this, {}, {}};
  while (!queue_.empty()) {
    const Id id = queue_.front();
    if (auto error = too_large(id)) {
      queue_.pop_front();
      todo.failed.push_back(give_up(id, std::move(*error)));
      continue;
    }
    const uint64_t packed = table(id).packed(id.number).bytes;
    const uint64_t raw = table(id).object_bytes(id.number);
    const std::shared_ptr<Object>& object = objects_.at(id);
    Budget* const budget = sources_[id.source].budget;
    if (!room_for(id, *object)) {
      if (under_way_ != 0) return todo;
      if (has_to_wait(budget)) {
        if (turn_ == 0) turn_ = ++turn_count;
        return todo;
      }
      // All that is kept was forgotten: others have the memory, and may keep it.
      queue_.pop_front();
      todo.failed.push_back(give_up(
          id,
          fail(Code::over_budget,
               "{} needs {} bytes to be fetched and unpacked. Of the {} that its store may take "
               "(dram=), only {} are left: open the store with more{}",
               name(id), raw + packed, human_bytes(budget->cap()), left_of(*budget), kUnpackOnce)));
      continue;
    }
    queue_.pop_front();
    object->packed = AlignedBytes(packed);
    object->raw = AlignedBytes(raw);
    asked_[id.source].first += packed;
    ++asked_[id.source].second;
    ++under_way_;
    todo.starts.push_back({id, object});
  }
  turn_ = 0;
  return todo;
}

// Reserves all that the object needs, unless others are first.
bool PackedObjects::room_for(const Id& id, Object& object) {
  const auto others = sharing(sources_[id.source].budget);
  const bool first = std::none_of(others.begin(), others.end(),
                                  [this](const PackedObjects* other)
                                      REQUIRES(common_mutex) { return other->is_before(*this); });
  const bool room = first &&
                    make_room(id, table(id).packed(id.number).bytes, object.packed_memory) &&
                    make_room(id, table(id).object_bytes(id.number), object.raw_memory);
  if (!room) object.packed_memory = {};
  return room;
}

bool PackedObjects::is_before(const PackedObjects& other) const {
  return turn_ != 0 && (other.turn_ == 0 || turn_ < other.turn_);
}

// Whether others will have memory to give: each of those calls go_on() then. The first of those
// that wait does so for one that has something under way.
bool PackedObjects::has_to_wait(const Budget* budget) {
  const auto others = sharing(budget);
  return std::any_of(others.begin(), others.end(),
                     [this](const PackedObjects* other) REQUIRES(common_mutex) {
                       return other->under_way_ != 0 || other->is_before(*this);
                     });
}

// The others that take memory of that store.
std::vector<PackedObjects*> PackedObjects::sharing(const Budget* budget) const {
  std::vector<PackedObjects*> found;
  if (budget == nullptr) return found;
  std::copy_if(
      all().begin(), all().end(), std::back_inserter(found), [&](const PackedObjects* each) {
        return each != this && std::any_of(each->sources_.begin(), each->sources_.end(),
                                           [&](const auto& one) { return one.budget == budget; });
      });
  return found;
}

// More than there can be.
std::optional<Error> PackedObjects::too_large(const Id& id) const {
  const uint64_t raw = table(id).object_bytes(id.number);
  const uint64_t packed = table(id).packed(id.number).bytes;
  const auto beyond = [&](uint64_t most) { return raw > most || packed > most - raw; };
  const std::string needs = name(id) + " needs " + std::to_string(raw) +
                            " bytes to be unpacked, and " + std::to_string(packed) +
                            " as it is stored, but ";
  const uint64_t limit = limits_[id.source]->cap();
  if (beyond(limit)) {
    return fail(Code::over_budget, "{}unpacked_bytes allows {}: give the loader more{}", needs,
                limit, kUnpackOnce);
  }
  const Budget* const budget = sources_[id.source].budget;
  if (budget != nullptr && beyond(most_of(*budget))) {
    return fail(Code::over_budget,
                "{}of the {} that its store may take (dram=) it gets {} at most: open the store "
                "with more{}",
                needs, human_bytes(budget->cap()), most_of(*budget), kUnpackOnce);
  }
  return {};
}

// Forgets what was not used for the longest time, until there is room for so many bytes.
bool PackedObjects::make_room(const Id& id, uint64_t bytes, Reserved& reserved) {
  Budget* const budget = sources_[id.source].budget;
  for (;;) {
    auto of_source = limits_[id.source]->take(bytes, "compressed shards");
    if (!of_source) {
      if (!forget_oldest(id, false)) return false;
      continue;
    }
    if (budget == nullptr) {
      reserved = {std::move(*of_source), {}};
      return true;
    }
    if (bytes <= left_of(*budget)) {
      if (auto of_store = budget->take(bytes, "compressed shards")) {
        reserved = {std::move(*of_source), std::move(*of_store)};
        return true;
      }
    }
    if (forget_oldest(id, true)) continue;
    if (under_way_ != 0 || !forget_oldest_of_others(budget)) return false;
  }
}

bool PackedObjects::forget_oldest_of_others(const Budget* budget) {
  for (PackedObjects* other : sharing(budget)) {
    for (uint32_t source = 0; source < other->sources_.size(); ++source) {
      if (other->sources_[source].budget == budget) {
        if (other->forget_oldest({source, 0}, true)) return true;
        break;
      }
    }
  }
  return false;
}

// Of the same source, or of all whose stores have the same memory.
bool PackedObjects::forget_oldest(const Id& of, bool of_store) {
  const Budget* const budget = sources_[of.source].budget;
  auto oldest = objects_.end();
  for (auto each = objects_.begin(); each != objects_.end(); ++each) {
    const Object& object = *each->second;
    if (!object.there || object.used_by != 0) continue;
    const uint32_t source = each->first.source;
    if (of_store ? sources_[source].budget != budget : source != of.source) continue;
    if (oldest == objects_.end() || object.last_used < oldest->second->last_used) oldest = each;
  }
  if (oldest == objects_.end()) return false;
  forget(oldest);
  return true;
}

// Its memory is free now, whoever still knows of it.
void PackedObjects::forget(Objects::iterator object) {
  Object& of = *object->second;
  of.packed = {};
  of.raw = {};
  of.packed_memory = {};
  of.raw_memory = {};
  objects_.erase(object);
}

void PackedObjects::fetched(const Id& id, const std::shared_ptr<Object>& object,
                            const Result<uint64_t>& when) {
  if (when) {
    object->fetched = *when;
    return tasks_.run([this, id, object] { unpack_one(id, object); });
  }
  MutexLock lock(common_mutex);
  --under_way_;
  Failed failed = give_up(id, when.error());
  lock.unlock();
  go_on(std::move(failed));
}

void PackedObjects::unpack_one(const Id& id, const std::shared_ptr<Object>& object) {
  const auto& [packing, packed] = table(id).packed(id.number);
  const Status unpacked = unpack(packing, object->packed.span().first(packed),
                                 object->raw.span().first(table(id).object_bytes(id.number)));
  MutexLock lock(common_mutex);
  if (!unpacked) {
    const Error& why = unpacked.error();
    --under_way_;
    const bool damaged = why.code == Code::corruption;
    Failed failed = give_up(
        id, damaged ? fail(why.code,
                           "{} cannot be unpacked ({}); fetch that object again, or index it again",
                           name(id), why.what)
                    : why.with(name(id) + " cannot be unpacked"));
    lock.unlock();
    return go_on(std::move(failed));
  }
  object->packed = {};
  object->packed_memory = {};
  object->there = true;
  ++object->used_by;
  const Waiters waiters = std::exchange(object->waiters, {});
  lock.unlock();
  copy(object, waiters);
  go_on();
}

PackedObjects::Failed PackedObjects::give_up(const Id& id, Error error) {
  const auto found = objects_.find(id);
  Failed failed{std::move(found->second->waiters), std::move(error)};
  forget(found);  // another read tries anew
  return failed;
}

// In a task: those end before this does.
void PackedObjects::copy(const std::shared_ptr<Object>& object, const Waiters& waiters) {
  for (const Waiter& waiter : waiters) {
    for (const Piece& piece : waiter.pieces)
      std::memcpy(waiter.into.data + piece.into, object->raw.data() + piece.offset, piece.bytes);
  }
  const uint64_t fetched = object->fetched;
  {
    MutexLock lock(common_mutex);
    --object->used_by;
    --under_way_;
    object->last_used = ++use_count;
  }
  for (const Waiter& waiter : waiters) waiter.rest->done(fetched);
}

}  // namespace stoker::data
