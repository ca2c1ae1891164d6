// LocalStore: commits. All of this runs on the worker, in order of the commit() calls: (1) the data
// writes have completed, (2) one flush a touched volume, (3) one record in both journal copies, (4)
// the map flips, (5) acknowledged. A deferred commit needs none of the flushes and records: where
// no other commit is under way it runs at once, on the thread that called. The worker may be laying
// parts over a chunk then; that chunk's space is not given back before a durable commit, which is
// the worker's.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/base/check.h"
#include "stoker/base/log.h"
#include "stoker/store/local/local_store.h"

namespace stoker::local {
namespace {

Result<uint64_t> framed_image_bytes(const Map& map) {
  uint64_t bytes = 0;
  STOKER_TRY(map.image(kMiB, [&bytes](std::string_view part) {
    bytes += framed_bytes(part.size() + sizeof(FrameKind));
    return Status();
  }));
  return bytes;
}

}  // namespace

Future<Version> LocalStore::commit(const StatePtr& state, Durability durability) {
  MutexLock lock(mutex_);
  if (state->phase != TransactionState::Phase::open)
    return fail(Code::invalid_argument, "the transaction is already committed: begin another");
  if (!state->name.empty() && durability == Durability::deferred)
    return fail(Code::invalid_argument,
                "a version that gets a name must be durable: commit it as durable");
  state->phase = TransactionState::Phase::committing;
  while (!state->partials.empty())
    seal(state, std::shared_ptr<StagedChunk>(state->partials.front()));
  auto entry = std::make_unique<CommitEntry>();
  entry->durability = durability;
  entry->state = state;
  Future<Version> future = entry->promise.future();
  committer_.push(std::move(entry));
  if (state->pending > 0) return future;  // the last of its writes kicks
  if (durability == Durability::durable || committer_.waiting() > 1 || committer_.claimed()) {
    kick();
    return future;
  }
  process_here(lock);
  return future;
}

// Nothing could go on behind half a commit, so what throws in here ends the process, as on the
// worker.
void LocalStore::process_here(MutexLock& lock) noexcept {
  start_processing();
  auto group = committer_.next_group();
  // no flush and no record is due, which would keep the caller waiting
  STOKER_CHECK(group.size() == 1 && group.front()->durability == Durability::deferred);
  lock.unlock();
  run_group(std::move(group));
  lock.lock();
  // What came meanwhile may have to wait for a disk: not here.
  if (committer_.waiting() == 0)
    stop_processing();
  else
    worker_.run([this] { process(); });
}

Status LocalStore::check_name(std::string_view snapshot) {
  if (!snapshot.empty() && snapshot.size() <= kKeyMax) return {};
  return fail(Code::invalid_argument, "a snapshot's name has 1 to {} bytes, not {}", kKeyMax,
              snapshot.size());
}

Future<void> LocalStore::snapshot(std::string_view name) {
  return enqueue_named(CommitEntry::Kind::snapshot, name, Durability::durable);
}
Future<void> LocalStore::drop(std::string_view name, Durability durability) {
  return enqueue_named(CommitEntry::Kind::drop, name, durability);
}

Future<void> LocalStore::enqueue_named(CommitEntry::Kind kind, std::string_view name,
                                       Durability durability) {
  STOKER_TRY(check_name(name));
  MutexLock lock(mutex_);
  if (read_only_option_)
    return fail(Code::read_only, "the store '{}' was opened read-only; open it for writing",
                composition());
  auto entry = std::make_unique<CommitEntry>();
  entry->kind = kind;
  entry->name = name;
  entry->durability = durability;
  Future<void> future = entry->named.future();
  committer_.push(std::move(entry));
  kick();
  return future;
}

// The worker looks at the queue soon, or whoever does already looks once more.
void LocalStore::kick() {
  if (committer_.claimed()) return;
  start_processing();
  worker_.run([this] { process(); });
}

void LocalStore::process() {
  STOKER_CHECK(worker_.here());
  MutexLock lock(mutex_);
  for (auto group = committer_.next_group(); !group.empty(); group = committer_.next_group()) {
    lock.unlock();
    run_group(std::move(group));
    lock.lock();
  }
  stop_processing();
}

void LocalStore::start_processing() {
  STOKER_CHECK(committer_.claim());
  ++in_flight_;
}

void LocalStore::stop_processing() {
  committer_.release();
  ended();
}

void LocalStore::ended() {
  STOKER_CHECK(in_flight_ > 0);
  if (--in_flight_ == 0) idle_.notify_all();
}

void LocalStore::run_group(CommitGroup group) {
  std::string items;
  uint64_t touched = 0;
  Growth grown;  // by the whole group
  std::vector<std::pair<std::unique_ptr<CommitEntry>, Status>> refused;
  const Map* map = nullptr;  // changed by nobody else meanwhile
  {
    MutexLock lock(mutex_);
    STOKER_CHECK(committer_.claimed());
    map = map_.get();
    for (auto& entry : group) {
      STOKER_CHECK(!entry->depends() || items.empty());
      Status status = encode(*entry, next_version_ + 1);
      Growth more = grown;
      if (status) more += growth_of(*entry);
      if (status) status = check_room(more, items, entry->items);
      if (!status) {
        refused.emplace_back(std::move(entry), status);
        continue;
      }
      if (entry->kind == CommitEntry::Kind::commit) entry->version = ++next_version_;
      items += entry->items;
      grown = more;
      if (entry->state) touched |= entry->state->touched;
    }
  }
  std::erase(group, nullptr);
  for (auto& [entry, status] : refused) finish(*entry, status);
  if (group.empty()) return;
  if (group.front()->durability == Durability::deferred) return run_deferred(group);

  const Status status = committer_.make_durable(items, touched, *map, mutex_);
  {
    MutexLock lock(mutex_);
    if (status) {
      for (auto& entry : group) flip(*entry);
      STOKER_CHECK(map_->version() == next_version_ && durable_ <= next_version_);
      durable_ = next_version_;
      release(std::exchange(undurable_, {}));
    } else {
      poison(status.error());
    }
  }
  for (auto& entry : group) finish(*entry, status);
}

// Visible now; carried by the next record.
void LocalStore::run_deferred(CommitGroup& group) {
  {
    MutexLock lock(mutex_);
    for (auto& entry : group) {
      committer_.defer(*entry);
      flip(*entry);
    }
  }
  for (auto& entry : group) finish(*entry, Status());
}

// Checks that the entry can be and says what it does to the map.
Status LocalStore::encode(CommitEntry& entry, Version version) {
  if (poisoned_)
    return fail(Code::read_only, "the store refuses writes until it is reopened: {}",
                poisoned_->what);
  ByteWriter out;
  if (entry.kind == CommitEntry::Kind::snapshot) {
    STOKER_TRY(put_name(out, entry.name));
  } else if (entry.kind == CommitEntry::Kind::drop) {
    if (map_->find_snapshot(entry.name) == nullptr)
      return fail(Code::not_found, "there is no snapshot '{}' to drop; check its name", entry.name);
    put_drop(out, entry.name);
  } else if (entry.kind == CommitEntry::Kind::commit) {
    STOKER_CHECK(entry.state->phase == TransactionState::Phase::committing);
    STOKER_CHECK(entry.state->pending == 0 && entry.state->partials.empty());
    if (entry.state->error) return *entry.state->error;
    STOKER_TRY(check_requirements(*entry.state));
    put_version(out, version);
    for (const auto& [key, object] : entry.state->objects) encode_object(out, key, object, version);
    if (!entry.state->name.empty()) STOKER_TRY(put_name(out, entry.state->name));
  }
  entry.items = out.take();
  return {};
}

Status LocalStore::put_name(ByteWriter& out, std::string_view name) const {
  if (map_->find_snapshot(name) != nullptr)
    return fail(Code::already_exists,
                "there is a snapshot '{}' already; drop it first or take another name", name);
  put_snapshot(out, name);
  return {};
}

Status LocalStore::check_requirements(const TransactionState& state) const {
  for (const auto& [key, tag] : state.required) {
    const auto found = map_->current().find(key);
    STOKER_TRY(check_required(
        key, tag, found == map_->current().end() ? std::string() : tag_of(*found->second)));
  }
  return {};
}

void LocalStore::encode_object(ByteWriter& out, const std::string& key, const StagedObject& object,
                               Version version) const {
  const auto committed = map_->current().find(key);
  const Object* base = committed == map_->current().end() ? nullptr : committed->second.get();
  STOKER_CHECK(!object.based || (base != nullptr && base->chunk_bytes == object.chunk_bytes));
  STOKER_CHECK(!object.based || !object.removed);
  if (base != nullptr && !object.based) put_remove(out, key);
  if (object.removed) return;
  put_object(out, key, object.bytes, object.chunk_bytes, version);
  std::map<uint32_t, Chunk> changed;
  if (object.based && object.base_limit < base->bytes) {  // it was cut, and may have grown again
    const size_t end = std::min<size_t>(
        base->chunks.size(), (object.bytes + object.chunk_bytes - 1) / object.chunk_bytes);
    for (size_t i = object.base_limit / object.chunk_bytes; i < end; ++i) {
      const auto index = static_cast<uint32_t>(i);
      const Chunk chunk = base_chunk(object, key, index);
      if (!(chunk == base->chunks[i])) changed[index] = chunk;
    }
  }
  for (const auto& [index, node] : object.chunks) {
    STOKER_CHECK(node->state == StagedChunk::State::done && !node->dropped);
    STOKER_CHECK(object.chunk_at(index) < object.bytes);
    Chunk chunk = node->chunk;
    STOKER_CHECK(!chunk.sparse() && chunk.valid <= chunk.stored);
    chunk.birth = version;
    changed[index] = chunk;
  }
  std::vector<Chunk> run;
  uint32_t first = 0;
  for (const auto& [index, chunk] : changed) {
    if (!run.empty() && index != first + run.size()) {
      put_chunks(out, first, run);
      run.clear();
    }
    if (run.empty()) first = index;
    run.push_back(chunk);
  }
  if (!run.empty()) put_chunks(out, first, run);
}

// By how much the map grows at most.
LocalStore::Growth LocalStore::growth_of(const CommitEntry& entry) const {
  constexpr uint64_t per_extent = kChunkRecordBytes + 9, per_object = 40;
  if (entry.kind == CommitEntry::Kind::snapshot) return {entry.items.size() + per_object, 0};
  if (entry.kind != CommitEntry::Kind::commit) return {};
  const bool kept = !map_->snapshots().empty();  // what is replaced may stay, for a snapshot
  Growth growth;
  if (!entry.state->name.empty()) growth.image_bytes += entry.state->name.size() + per_object;
  for (const auto& [key, object] : entry.state->objects) {
    const auto committed = map_->current().find(key);
    if (committed != map_->current().end())
      growth.slots -= static_cast<int64_t>(committed->second->chunks.size());
    if (!object.removed)
      growth.slots +=
          static_cast<int64_t>((object.bytes + object.chunk_bytes - 1) / object.chunk_bytes);
    if (object.removed && !kept) continue;
    if (!object.based || kept) growth.image_bytes += per_object + 2 * key.size();
    for (const auto& [index, node] : object.chunks) {
      if (kept || base_chunk(object, key, index).sparse()) growth.image_bytes += per_extent;
    }
  }
  return growth;
}

// The map that results must fit into half an area of the journal: else the store could not be
// opened again. What makes the map no larger always passes.
Status LocalStore::check_room(const Growth& growth, std::string_view group,
                              std::string_view entry) const {
  if (static_cast<int64_t>(map_->slots()) + growth.slots >
      static_cast<int64_t>(map_->limits().slots_max))
    return fail(Code::out_of_space,
                "the objects of the store would have more than {} chunks; write them in larger "
                "chunks, or make a larger store",
                map_->limits().slots_max);
  if (map_->image_bound() + growth.image_bytes <= committer_.payload_max()) return {};
  Map after = *map_;
  std::vector<Extent> freed;
  STOKER_TRY(after.apply(bytes_of(group), freed));
  STOKER_TRY(after.apply(bytes_of(entry), freed));
  STOKER_ASSIGN(const uint64_t bytes, framed_image_bytes(after));
  if (bytes <= committer_.payload_max()) return {};
  STOKER_ASSIGN(const uint64_t before, framed_image_bytes(*map_));
  if (bytes <= before) return {};
  return fail(Code::out_of_space,
              "the journal of the store is too small for its map: remove objects or snapshots, or "
              "make a store for more objects (objects_max)");
}

void LocalStore::flip(CommitEntry& entry) {
  std::vector<Extent> freed;
  const Status applied = map_->apply(bytes_of(entry.items), freed);
  STOKER_CHECK(applied.has_value());
  for (const Extent& extent : freed) limbo_blocks_ += extent.blocks;
  undurable_.insert(undurable_.end(), freed.begin(), freed.end());
  if (!entry.state) return;
  TransactionState& state = *entry.state;
  STOKER_CHECK(state.phase == TransactionState::Phase::committing);
  STOKER_CHECK(entry.version == map_->version());
  STOKER_CHECK(state.pending == 0 && !state.error);  // nothing becomes visible that is not on disk
  give_back_runs(state);
  for (const auto& [key, object] : state.objects) STOKER_CHECK(owners_.erase(key) == 1);
  state.objects.clear();  // the chunks are the map's now
  state.phase = TransactionState::Phase::committed;
  if (state.orphaned) open_.erase(&state);
}

void LocalStore::finish(CommitEntry& entry, const Status& status) {
  if (!status && entry.state) {
    MutexLock lock(mutex_);
    let_go(*entry.state, TransactionState::Phase::failed);
    if (entry.state->orphaned) open_.erase(entry.state.get());
  }
  if (entry.kind != CommitEntry::Kind::commit) {
    entry.named.complete(status);
  } else if (status) {
    STOKER_CHECK(entry.version > 0);
    entry.promise.complete(entry.version);
  } else {
    entry.promise.complete(status.error());
  }
}

// Whether the record is on disk is unknown: nothing may be written any more that it might name.
void LocalStore::poison(const Error& error) {
  log().error("the store '{}' takes no more writes until it is reopened: {}", composition(),
              error.message());
  if (!poisoned_) poisoned_ = error;
}

// What failed so may still reach memory that has new owners by now, or the disk:
// nothing of that may be committed.
void LocalStore::note_given_up(const Status& status) {
  if (!status && status.error().sys_errno == ETIMEDOUT && !poisoned_) poison(status.error());
}

void LocalStore::release(std::span<const Extent> extents) {
  if (poisoned_) return;
  for (const Extent& extent : extents) {
    if (readers_.contains(extent.place)) {
      STOKER_CHECK(limbo_.emplace(extent.place, extent).second);
    } else {
      give(extent);
    }
  }
}

void LocalStore::give(const Extent& extent) {
  STOKER_CHECK(limbo_blocks_ >= extent.blocks);
  allocator_.give(extent);
  limbo_blocks_ -= extent.blocks;
  ++given_;
  freed_.notify_all();
}

// What was freed and is not free yet becomes so:
// deferred commits are made durable, then reads of it are waited for. False: nothing
// more comes free, or this thread must not wait for it.
bool LocalStore::make_room(MutexLock& lock) {
  if (poisoned_ || runtime_.loop.here() || worker_.here()) return false;
  if (!undurable_.empty()) {
    auto entry = std::make_unique<CommitEntry>();
    entry->kind = CommitEntry::Kind::flush;
    const Future<void> flushed = entry->named.future();
    committer_.push(std::move(entry));
    kick();
    lock.unlock();
    const bool done = flushed.wait().has_value();
    lock.lock();
    return done;
  }
  if (limbo_.empty() || runtime_.pool.here()) return false;  // reads are verified on the pool
  freed_.wait(lock, [this, before = given_]()
                        REQUIRES(mutex_) { return limbo_.empty() || given_ != before; });
  return true;
}

}  // namespace stoker::local
