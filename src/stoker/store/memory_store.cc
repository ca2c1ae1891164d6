#include "stoker/store/memory_store.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/base/crc32c.h"
#include "stoker/store/chunk_size.h"
#include "stoker/store/condition.h"

namespace stoker {
namespace {

Error no_object(std::string_view key) {
  return fail(Code::not_found, "there is no object '{}'", key);
}

Status check_name(std::string_view snapshot) {
  if (!snapshot.empty()) return {};
  return fail(Code::invalid_argument, "a snapshot needs a name");
}

Error snapshot_there(std::string_view name) {
  return fail(Code::already_exists,
              "there is a snapshot '{}' already: drop it or take another name", name);
}

Error no_snapshot(std::string_view name) {
  return fail(Code::not_found, "there is no snapshot '{}'; check its name", name);
}

Status check_range(std::string_view key, uint64_t object_bytes, uint64_t offset, size_t bytes) {
  if (offset <= object_bytes && bytes <= object_bytes - offset) return {};
  return fail(Code::invalid_argument,
              "bytes {} to {} are beyond the end of '{}', which has {}; resize it first", offset,
              offset + bytes, key, object_bytes);
}

}  // namespace

// Immutable once shared. May hold fewer bytes than its place in the object: the rest reads as
// zeros.
class MemoryStore::Chunk {
 public:
  static Result<std::shared_ptr<Chunk>> make(MemoryStore& store, size_t bytes) {
    const uint64_t before = store.used_bytes_.fetch_add(bytes);
    auto grant = store.budget_.take(bytes, "a chunk of a memory store");
    const uint64_t capacity = store.options_.capacity_bytes;
    const bool full = capacity != 0 && before + bytes > capacity;
    if (full || !grant) {
      store.used_bytes_.fetch_sub(bytes);
      if (!full) return grant.error();
      return fail(Code::out_of_space,
                  "the memory store of {} is full: {} are used and {} more are needed; remove "
                  "objects or snapshots",
                  human_bytes(capacity), human_bytes(before), human_bytes(bytes));
    }
    return std::shared_ptr<Chunk>(new Chunk(store, bytes, std::move(*grant)));
  }
  ~Chunk() { used_bytes_.fetch_sub(bytes_); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  std::span<std::byte> bytes() { return {data_.get(), bytes_}; }
  std::span<const std::byte> bytes() const { return {data_.get(), bytes_}; }
  void seal() { crc_ = crc32c(data_.get(), bytes_); }
  Status verify(std::string_view key, uint64_t index) const {
    if (crc32c(data_.get(), bytes_) == crc_) return {};
    return fail(Code::corruption,
                "chunk {} of '{}' differs from its checksum: the memory of this machine is failing",
                index, key);
  }

 private:
  Chunk(MemoryStore& store, size_t bytes, Grant grant)
      : used_bytes_(store.used_bytes_),
        bytes_(bytes),
        data_(std::make_unique_for_overwrite<std::byte[]>(bytes)),
        grant_(std::move(grant)) {}
  std::atomic<uint64_t>& used_bytes_;
  const size_t bytes_;
  const std::unique_ptr<std::byte[]> data_;
  uint32_t crc_ = 0;
  Grant grant_;
};

// A transaction keeps private copies of the objects it owns: lists of chunks, most of them shared
// with the committed version.
class MemoryStore::Staged final : public Transaction {
 public:
  explicit Staged(MemoryStore& store) : store_(store) {}
  ~Staged() override { release(); }

  Status resize(std::string_view key, uint64_t bytes, uint32_t chunk_bytes) override;
  Future<void> write(std::string_view key, uint64_t offset, Slice from, Priority) override;
  Status remove(std::string_view key) override;
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override;
  Status require(std::string_view key, std::string_view tag) override;
  Status name(std::string_view snapshot) override;
  Future<Version> commit(Durability) override;

 private:
  using Entry = std::optional<Object>;  // nullopt: removed

  // The staged entry of `key`, owned from now on; busy if another transaction owns it.
  Result<Entry*> own(std::string_view key) REQUIRES(mutex_);
  Status write_locked(std::string_view key, uint64_t offset, Slice from) REQUIRES(mutex_);
  Status write_chunk(std::string_view key, Object& object, uint64_t index, size_t at, Slice from);
  void release() REQUIRES(mutex_);

  MemoryStore& store_;
  Mutex mutex_;  // taken before store_.mutex_
  std::map<std::string, Entry, std::less<>> staged_ GUARDED_BY(mutex_);
  Requirements required_ GUARDED_BY(mutex_);
  std::string name_ GUARDED_BY(mutex_);             // of the version that it makes
  std::optional<Error> failed_ GUARDED_BY(mutex_);  // of the first write that failed
  bool done_ GUARDED_BY(mutex_) = false;            // committed or refused
};

Result<MemoryStore::Staged::Entry*> MemoryStore::Staged::own(std::string_view key) {
  if (done_)
    return fail(Code::invalid_argument, "the transaction is already committed: begin another");
  if (key.empty()) return fail(Code::invalid_argument, "an object needs a name");
  if (auto at = staged_.find(key); at != staged_.end()) return &at->second;
  MutexLock lock(store_.mutex_);
  if (!store_.owned_.emplace(key).second) {
    return fail(
        Code::busy,
        "another open transaction has changed '{}': wait until it is committed or abandoned", key);
  }
  const auto committed = store_.current_.find(key);
  Entry entry = committed == store_.current_.end() ? Entry() : Entry(*committed->second);
  return &staged_.emplace(key, std::move(entry)).first->second;
}

Status MemoryStore::Staged::resize(std::string_view key, uint64_t bytes, uint32_t chunk_bytes) {
  MutexLock lock(mutex_);
  if (chunk_bytes != 0) STOKER_TRY(check_chunk_bytes(chunk_bytes));
  STOKER_ASSIGN(Entry * entry, own(key));
  if (!entry->has_value()) {
    entry->emplace();
    (*entry)->chunk_bytes = chunk_bytes != 0 ? chunk_bytes : store_.options_.chunk_bytes;
  }
  Object& object = **entry;
  if (chunk_bytes != 0 && chunk_bytes != object.chunk_bytes) {
    return fail(Code::invalid_argument,
                "'{}' has chunks of {} bytes, and their size cannot be changed; remove the object "
                "first, then write it with other chunks",
                key, object.chunk_bytes);
  }
  const uint64_t chunks = align_up(bytes, object.chunk_bytes) / object.chunk_bytes;
  // Bytes cut off now must read as zeros when the object grows again, so the last chunk is cut, not
  // just hidden.
  if (const size_t tail = bytes % object.chunk_bytes; bytes < object.bytes && tail != 0) {
    ChunkPtr& last = object.chunks[chunks - 1];
    if (last && last->bytes().size() > tail) {
      STOKER_TRY(last->verify(key, chunks - 1));
      STOKER_ASSIGN(auto cut, Chunk::make(store_, tail));
      std::memcpy(cut->bytes().data(), last->bytes().data(), tail);
      cut->seal();
      last = std::move(cut);
    }
  }
  object.chunks.resize(chunks);
  object.bytes = bytes;
  return {};
}

Future<void> MemoryStore::Staged::write(std::string_view key, uint64_t offset, Slice from,
                                        Priority) {
  MutexLock lock(mutex_);
  Status status = write_locked(key, offset, from);
  if (!status && !failed_) failed_ = status.error();
  return status;
}

Status MemoryStore::Staged::write_locked(std::string_view key, uint64_t offset, Slice from) {
  STOKER_ASSIGN(Entry * entry, own(key));
  if (!entry->has_value()) return no_object(key);
  Object& object = **entry;
  STOKER_TRY(check_range(key, object.bytes, offset, from.size));
  for (size_t moved = 0; moved < from.size;) {
    const uint64_t index = (offset + moved) / object.chunk_bytes;
    const size_t at = (offset + moved) % object.chunk_bytes;
    const size_t piece = std::min<size_t>(object.chunk_bytes - at, from.size - moved);
    STOKER_TRY(write_chunk(key, object, index, at, from.sub(moved, piece)));
    moved += piece;
  }
  return {};
}

Status MemoryStore::Staged::write_chunk(std::string_view key, Object& object, uint64_t index,
                                        size_t at, Slice from) {
  const ChunkPtr old = object.chunks[index];
  const size_t old_bytes = old ? old->bytes().size() : 0;
  const bool whole = at == 0 && from.size >= old_bytes;
  if (old && !whole) STOKER_TRY(old->verify(key, index));
  STOKER_ASSIGN(auto chunk, Chunk::make(store_, std::max(old_bytes, at + from.size)));
  std::byte* data = chunk->bytes().data();
  if (!whole) {
    if (old) std::memcpy(data, old->bytes().data(), old_bytes);
    if (at > old_bytes) std::memset(data + old_bytes, 0, at - old_bytes);
  }
  std::memcpy(data + at, from.data, from.size);
  chunk->seal();
  object.chunks[index] = std::move(chunk);
  return {};
}

Status MemoryStore::Staged::remove(std::string_view key) {
  MutexLock lock(mutex_);
  STOKER_ASSIGN(Entry * entry, own(key));
  if (!entry->has_value()) return no_object(key);
  entry->reset();
  return {};
}

Future<void> MemoryStore::Staged::read(std::string_view key, uint64_t offset, Slice into,
                                       ReadOptions options) {
  if (!options.snapshot.empty()) return store_.read(key, offset, into, options);
  Object object;
  {
    MutexLock lock(mutex_);
    const auto at = staged_.find(key);
    if (at == staged_.end()) return store_.read(key, offset, into, options);
    if (!at->second.has_value()) return no_object(key);
    object = *at->second;
  }
  return read_object(key, object, offset, into);
}

Status MemoryStore::Staged::require(std::string_view key, std::string_view tag) {
  MutexLock lock(mutex_);
  if (done_)
    return fail(Code::invalid_argument, "the transaction is already committed: begin another");
  required_.insert_or_assign(std::string(key), std::string(tag));
  return {};
}

Status MemoryStore::Staged::name(std::string_view snapshot) {
  STOKER_TRY(check_name(snapshot));
  MutexLock lock(mutex_);
  if (done_)
    return fail(Code::invalid_argument, "the transaction is already committed: begin another");
  name_ = snapshot;
  return {};
}

Future<Version> MemoryStore::Staged::commit(Durability durability) {
  MutexLock lock(mutex_);
  if (done_)
    return fail(Code::invalid_argument, "the transaction is already committed: begin another");
  if (!name_.empty() && durability == Durability::deferred)
    return fail(Code::invalid_argument,
                "a version that gets a name must be durable: commit it as durable");
  done_ = true;
  MutexLock store_lock(store_.mutex_);
  for (const auto& [key, entry] : staged_) store_.owned_.erase(key);
  if (failed_) return *failed_;
  for (const auto& [key, tag] : required_) {
    const auto at = store_.current_.find(key);
    STOKER_TRY(check_required(
        key, tag, at == store_.current_.end() ? kAbsent : describe(key, *at->second).tag));
  }
  if (!name_.empty() && store_.snapshots_.contains(name_)) return snapshot_there(name_);
  const Version version = ++store_.version_;
  for (auto& [key, entry] : staged_) {
    if (entry.has_value()) {
      entry->version = version;
      store_.current_.insert_or_assign(key, std::make_shared<const Object>(*entry));
    } else {
      store_.current_.erase(key);
    }
  }
  if (!name_.empty()) store_.snapshots_.emplace(name_, Named{version, store_.current_});
  return Result<Version>(version);
}

void MemoryStore::Staged::release() {
  if (done_) return;
  MutexLock lock(store_.mutex_);
  for (const auto& [key, entry] : staged_) store_.owned_.erase(key);
}

Result<std::unique_ptr<MemoryStore>> MemoryStore::make(Budget& budget, MemoryStoreOptions options) {
  STOKER_TRY(check_chunk_bytes(options.chunk_bytes));
  return std::unique_ptr<MemoryStore>(new MemoryStore(budget, options));
}

const MemoryStore::Map* MemoryStore::map_of(std::string_view snapshot) const {
  if (snapshot.empty()) return &current_;
  const auto named = snapshots_.find(snapshot);
  return named == snapshots_.end() ? nullptr : &named->second.map;
}

Result<MemoryStore::ObjectPtr> MemoryStore::find(std::string_view key,
                                                 std::string_view snapshot) const {
  MutexLock lock(mutex_);
  const Map* map = map_of(snapshot);
  if (map == nullptr) return no_snapshot(snapshot);
  const auto at = map->find(key);
  if (at == map->end()) return no_object(key);
  return at->second;
}

ObjectInfo MemoryStore::describe(std::string_view key, const Object& object) {
  return {std::string(key), object.bytes, object.chunk_bytes,
          object.version,   {},           std::to_string(object.version)};
}

Result<ObjectInfo> MemoryStore::stat(std::string_view key, std::string_view snapshot) {
  STOKER_ASSIGN(const ObjectPtr object, find(key, snapshot));
  return describe(key, *object);
}

std::optional<ObjectInfo> MemoryStore::stat_at_once(std::string_view key) {
  auto object = stat(key);
  return object ? std::optional(std::move(*object)) : std::nullopt;
}

Result<std::vector<ObjectInfo>> MemoryStore::list(std::string_view prefix,
                                                  std::string_view snapshot) {
  MutexLock lock(mutex_);
  const Map* map = map_of(snapshot);
  if (map == nullptr) return no_snapshot(snapshot);
  std::vector<ObjectInfo> found;
  for (auto at = map->lower_bound(prefix); at != map->end() && at->first.starts_with(prefix);
       ++at) {
    found.push_back(describe(at->first, *at->second));
  }
  return found;
}

Future<void> MemoryStore::read(std::string_view key, uint64_t offset, Slice into,
                               ReadOptions options) {
  auto object = find(key, options.snapshot);
  if (!object) return object.error();
  return read_object(key, **object, offset, into);
}

Status MemoryStore::read_object(std::string_view key, const Object& object, uint64_t offset,
                                Slice into) {
  STOKER_TRY(check_range(key, object.bytes, offset, into.size));
  for (size_t moved = 0; moved < into.size;) {
    const uint64_t index = (offset + moved) / object.chunk_bytes;
    const size_t at = (offset + moved) % object.chunk_bytes;
    const size_t piece = std::min<size_t>(object.chunk_bytes - at, into.size - moved);
    const Chunk* chunk = object.chunks[index].get();
    size_t held = 0;
    if (chunk != nullptr) {
      STOKER_TRY(chunk->verify(key, index));
      held = at < chunk->bytes().size() ? std::min(piece, chunk->bytes().size() - at) : 0;
      if (held > 0) std::memcpy(into.data + moved, chunk->bytes().data() + at, held);
    }
    std::memset(into.data + moved + held, 0, piece - held);
    moved += piece;
  }
  return {};
}

Result<std::unique_ptr<Transaction>> MemoryStore::begin() {
  return std::unique_ptr<Transaction>(new Staged(*this));
}

Result<Version> MemoryStore::copy(std::string_view from, std::string_view to) {
  MutexLock lock(mutex_);
  if (from == to || to.empty())
    return fail(Code::invalid_argument,
                "'{}' cannot be copied to '{}'; give two different names that are not empty", from,
                to);
  const auto source = current_.find(from);
  if (source == current_.end()) return no_object(from);
  if (owned_.contains(to))
    return fail(Code::busy,
                "an open transaction has changed '{}': wait until it is committed or abandoned",
                to);
  auto copy = std::make_shared<Object>(*source->second);  // the chunks are shared
  copy->version = ++version_;
  current_.insert_or_assign(std::string(to), std::move(copy));
  return version_;
}

Future<void> MemoryStore::snapshot(std::string_view name) {
  STOKER_TRY(check_name(name));
  MutexLock lock(mutex_);
  if (!snapshots_.emplace(name, Named{version_, current_}).second) return snapshot_there(name);
  return Status();
}

Future<void> MemoryStore::drop(std::string_view name, Durability) {
  MutexLock lock(mutex_);
  const auto named = snapshots_.find(name);
  if (named == snapshots_.end()) return no_snapshot(name);
  snapshots_.erase(named);
  return Status();
}

StoreInfo MemoryStore::info() const {
  MutexLock lock(mutex_);
  StoreInfo info;
  info.composition = "memory:";
  info.committed = version_;
  info.durable = version_;
  info.capacity_bytes = options_.capacity_bytes;
  info.used_bytes = used_bytes_;
  for (const auto& [key, object] : current_)
    info.map_bytes += sizeof(Object) + object->chunks.size() * sizeof(ChunkPtr) + key.size();
  for (const auto& [name, named] : snapshots_) info.snapshots.push_back({name, named.version});
  return info;
}

}  // namespace stoker
