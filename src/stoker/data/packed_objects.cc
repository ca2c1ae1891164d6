#include "stoker/data/packed_objects.h"

#include <algorithm>
#include <cstring>

#include "stoker/base/clock.h"

namespace stoker::data {
namespace {

constexpr const char* kWhere = "data/packed_objects";

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

Future<uint64_t> PackedObjects::read(std::span<const Piece> pieces, Slice into) {
  std::map<uint64_t, std::vector<Piece>> by_object;
  std::vector<Piece> plain;
  for (const Piece& piece : pieces) {
    if (table_->packed(piece.object).packing == Packing::none) {
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
    MutexLock lock(mutex_);
    for (const Piece& piece : plain) asked_ += piece.bytes;
    requests_ += plain.size();
    for (auto& [number, of] : by_object) {
      std::shared_ptr<Object>& object = objects_[number];
      if (object == nullptr) {
        object = std::make_shared<Object>();
        queue_.push_back(number);
      }
      Waiter waiter{std::move(of), into, rest};
      if (object->there) {
        ++object->used_by;
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
    stored_.read(plain, into).on_done([rest](const Result<uint64_t>& when) { rest->done(when); });
  }
  go_on();
  return all;
}

std::pair<uint64_t, uint64_t> PackedObjects::take_asked() {
  MutexLock lock(mutex_);
  return {std::exchange(asked_, 0), std::exchange(requests_, 0)};
}

// Fetches what there is memory for. Once the waiters of what failed are told, their owner may end
// all of this: that comes last.
void PackedObjects::go_on(std::optional<Failed> failed) {
  std::vector<Failed> all;
  if (failed) all.push_back(std::move(*failed));
  std::vector<Start> starts;
  {
    MutexLock lock(mutex_);
    while (auto more = admit(starts)) all.push_back(std::move(*more));
  }
  for (const auto& [number, object] : starts) {
    const Piece whole{number, 0, table_->packed(number).bytes, 0};
    stored_.read({&whole, 1}, object->packed.slice().sub(0, whole.bytes))
        .on_done([this, number = number, object = object](const Result<uint64_t>& when) {
          fetched(number, object, when);
        });
  }
  for (const Failed& each : all) {
    for (const Waiter& waiter : each.waiters) waiter.rest->done(each.error);
  }
}

// Takes objects out of the queue as long as there is memory; what needs more than there can be.
std::optional<PackedObjects::Failed> PackedObjects::admit(std::vector<Start>& starts) {
  while (!queue_.empty()) {
    const uint64_t number = queue_.front();
    const uint64_t packed = table_->packed(number).bytes, raw = table_->object_bytes(number);
    if (raw > budget_.cap() || packed > budget_.cap() - raw) {
      queue_.pop_front();
      return fail(number,
                  make_error(Code::over_budget,
                             name(number) + " needs " + std::to_string(raw) +
                                 " bytes to be unpacked, and " + std::to_string(packed) +
                                 " as it is stored, but unpacked_bytes allows " +
                                 std::to_string(budget_.cap()) +
                                 ": give the loader more, or unpack the data once with `stoker "
                                 "data build STORE OUT --unpack`",
                             kWhere));
    }
    const std::shared_ptr<Object>& object = objects_.at(number);
    if (!make_room(packed, object->packed_grant) || !make_room(raw, object->raw_grant)) {
      object->packed_grant = Grant();
      return {};
    }
    queue_.pop_front();
    object->packed = AlignedBytes(packed);
    object->raw = AlignedBytes(raw);
    asked_ += packed;
    ++requests_;
    starts.push_back({number, object});
  }
  return {};
}

// Forgets what was not used for the longest time, until there is room for so many bytes.
bool PackedObjects::make_room(uint64_t bytes, Grant& grant) {
  for (;;) {
    if (auto taken = budget_.take(bytes, "compressed shards")) {
      grant = std::move(*taken);
      return true;
    }
    auto oldest = objects_.end();
    for (auto each = objects_.begin(); each != objects_.end(); ++each) {
      const Object& object = *each->second;
      if (object.there && object.used_by == 0 &&
          (oldest == objects_.end() || object.last_used < oldest->second->last_used))
        oldest = each;
    }
    if (oldest == objects_.end()) return false;
    forget(oldest);
  }
}

// Its memory is free now, whoever still knows of it.
void PackedObjects::forget(Objects::iterator object) {
  Object& of = *object->second;
  of.packed = {};
  of.raw = {};
  of.packed_grant = Grant();
  of.raw_grant = Grant();
  objects_.erase(object);
}

void PackedObjects::fetched(uint64_t number, const std::shared_ptr<Object>& object,
                            const Result<uint64_t>& when) {
  if (when) {
    object->fetched = *when;
    return tasks_.run([this, number, object] { unpack_one(number, object); });
  }
  MutexLock lock(mutex_);
  Failed failed = fail(number, when.error());
  lock.unlock();
  go_on(std::move(failed));
}

void PackedObjects::unpack_one(uint64_t number, const std::shared_ptr<Object>& object) {
  const auto& [packing, packed] = table_->packed(number);
  const Status unpacked = unpack(packing, object->packed.span().first(packed),
                                 object->raw.span().first(table_->object_bytes(number)));
  MutexLock lock(mutex_);
  if (!unpacked) {
    const Error& why = unpacked.error();
    Failed failed = fail(number, make_error(why.code,
                                            name(number) + " cannot be unpacked (" + why.what +
                                                "); fetch that object anew, or index it again",
                                            kWhere));
    lock.unlock();
    return go_on(std::move(failed));
  }
  object->packed = {};
  object->packed_grant = Grant();
  object->there = true;
  ++object->used_by;
  const Waiters waiters = std::exchange(object->waiters, {});
  lock.unlock();
  copy(object, waiters);
  go_on();
}

PackedObjects::Failed PackedObjects::fail(uint64_t number, Error error) {
  const auto found = objects_.find(number);
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
    MutexLock lock(mutex_);
    --object->used_by;
    object->last_used = ++uses_;
  }
  for (const Waiter& waiter : waiters) waiter.rest->done(fetched);
}

}  // namespace stoker::data
