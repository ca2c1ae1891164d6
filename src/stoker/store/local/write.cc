// LocalStore: staging. Whole chunks go straight to fresh extents; parts of chunks are merged first
// (partial.cc).
#include <algorithm>
#include <cstring>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"
#include "stoker/base/log.h"
#include "stoker/store/chunk_size.h"
#include "stoker/store/local/local_store.h"

namespace stoker::local {
namespace {

// of an object that is set aside at once, so that it lies in one piece
constexpr uint64_t kAheadBytes = 32 * kMiB;

Chunk trimmed(Chunk chunk, uint64_t chunk_at, uint64_t limit) {
  if (chunk_at >= limit) return Chunk{};
  chunk.valid = static_cast<uint32_t>(std::min<uint64_t>(chunk.valid, limit - chunk_at));
  return chunk;
}

}  // namespace

Result<std::unique_ptr<Transaction>> LocalStore::begin() {
  MutexLock lock(mutex_);
  if (read_only_option_)
    return fail(Code::read_only, "the store '{}' was opened read-only; open it for writing",
                composition());
  if (poisoned_)
    return fail(Code::read_only, "the store refuses writes until it is reopened: {}",
                poisoned_->what);
  auto state = std::make_shared<TransactionState>();
  open_.insert(state.get());
  return std::unique_ptr<Transaction>(std::make_unique<LocalTransaction>(*this, std::move(state)));
}

Status LocalStore::check_writable(const TransactionState& state) const {
  if (poisoned_)
    return fail(Code::read_only, "the store refuses writes until it is reopened: {}",
                poisoned_->what);
  if (state.phase != TransactionState::Phase::open)
    return fail(Code::invalid_argument, "the transaction was already committed: begin another");
  return {};
}

// The staged object of `key`, which this transaction owns from now on.
Result<StagedObject*> LocalStore::own(TransactionState& state, std::string_view key,
                                      bool must_exist) {
  if (key.empty() || key.size() > kKeyMax)
    return fail(Code::invalid_argument, "an object's key has 1 to {} bytes, not {}", kKeyMax,
                key.size());
  if (auto found = state.objects.find(key); found != state.objects.end()) {
    if (must_exist && found->second.removed)
      return fail(Code::not_found, "there is no object '{}'", key);
    return &found->second;
  }
  if (const auto owner = owners_.find(key); owner != owners_.end()) {
    return fail(Code::busy,
                "'{}' is being written by another transaction; commit or abandon that first", key);
  }
  const auto committed = map_->current().find(key);
  if (committed == map_->current().end() && must_exist)
    return fail(Code::not_found, "there is no object '{}'", key);
  StagedObject object;
  object.runs.resize(volumes_.size());
  if (committed != map_->current().end()) {
    object.based = true;
    object.bytes = object.base_limit = committed->second->bytes;
    object.chunk_bytes = committed->second->chunk_bytes;
  } else {
    object.removed = true;  // until resize() makes it
  }
  owners_.emplace(key, &state);
  return &state.objects.emplace(key, std::move(object)).first->second;
}

Chunk LocalStore::base_chunk(const StagedObject& object, std::string_view key,
                             uint32_t index) const {
  if (!object.based) return {};
  const auto committed = map_->current().find(key);
  STOKER_CHECK(committed != map_->current().end());  // nobody else may remove it meanwhile
  const Object& base = *committed->second;
  return index < base.chunks.size()
             ? trimmed(base.chunks[index], object.chunk_at(index), object.base_limit)
             : Chunk{};
}

// What a reader of the transaction sees at `index`.
Chunk LocalStore::visible_chunk(const StagedObject& object, std::string_view key,
                                uint32_t index) const {
  const auto own = object.chunks.find(index);
  if (own == object.chunks.end()) return base_chunk(object, key, index);
  STOKER_CHECK(own->second->state == StagedChunk::State::done);
  return own->second->chunk;
}

Status LocalStore::resize(TransactionState& state, std::string_view key, uint64_t bytes,
                          uint32_t chunk_bytes) {
  MutexLock lock(mutex_);
  STOKER_TRY(check_writable(state));
  if (chunk_bytes != 0) STOKER_TRY(check_chunk_bytes(chunk_bytes));
  STOKER_ASSIGN(StagedObject * object, own(state, key, false));
  const uint32_t unit = !object->removed   ? object->chunk_bytes
                        : chunk_bytes != 0 ? chunk_bytes
                                           : chunk_bytes_;
  if (bytes / unit > map_->limits().slots_max)
    return fail(Code::out_of_space,
                "'{}' would be too large for the store ({}); make a store with a larger capacity",
                key, human_bytes(bytes));
  STOKER_TRY(charge_map((bytes - std::min(bytes, object->bytes)) / unit * sizeof(Chunk) + 256));
  if (object->removed) {
    object->removed = false;
    object->bytes = object->base_limit = 0;
    object->chunk_bytes = unit;
  } else if (chunk_bytes != 0 && chunk_bytes != object->chunk_bytes) {
    return fail(Code::invalid_argument,
                "'{}' has chunks of {} bytes, and their size cannot be changed; remove the object "
                "first, then write it with other chunks",
                key, object->chunk_bytes);
  }
  if (bytes < object->bytes) {
    object->base_limit = std::min(object->base_limit, bytes);
    for (auto at = object->chunks.lower_bound(static_cast<uint32_t>(bytes / object->chunk_bytes));
         at != object->chunks.end();) {
      const uint64_t from = object->chunk_at(at->first);
      if (from < bytes) {
        auto& node = at->second;
        if (node->partial && !node->partial->sealed) seal(state.shared_from_this(), node);
        node->limit = std::min(node->limit, static_cast<uint32_t>(bytes - from));
        node->chunk.valid = std::min(node->chunk.valid, node->limit);
        ++at;
      } else {
        drop_staged(state, at->second);
        at = object->chunks.erase(at);
      }
    }
  }
  object->bytes = bytes;
  return {};
}

Status LocalStore::remove(TransactionState& state, std::string_view key) {
  MutexLock lock(mutex_);
  STOKER_TRY(check_writable(state));
  STOKER_ASSIGN(StagedObject * object, own(state, key, true));
  for (auto& [index, node] : object->chunks) drop_staged(state, node);
  object->chunks.clear();
  for (size_t volume = 0; volume < object->runs.size(); ++volume)
    allocator_.give_back(volume, object->runs[volume]);
  object->removed = true;
  object->based = false;
  object->bytes = object->base_limit = 0;
  return {};
}

Status LocalStore::require(TransactionState& state, std::string_view key, std::string_view tag) {
  MutexLock lock(mutex_);
  STOKER_TRY(check_writable(state));
  state.required.insert_or_assign(std::string(key), std::string(tag));
  return {};
}

Status LocalStore::name(TransactionState& state, std::string_view snapshot) {
  STOKER_TRY(check_name(snapshot));
  MutexLock lock(mutex_);
  STOKER_TRY(check_writable(state));
  state.name = snapshot;
  return {};
}

// Who will have it written soonest, of those that have the room.
std::optional<size_t> LocalStore::pick_volume(uint64_t bytes, const ByVolume& given) const {
  std::optional<size_t> best;
  double best_ns = 0;
  uint64_t latest_ns = 0;
  for (const VolumeLoad& load : loads_) latest_ns = std::max(latest_ns, load.ended_ns());
  for (size_t volume = 0; volume < volumes_.size(); ++volume) {
    if (!has_room(volume, bytes)) continue;
    const double wait_ns = loads_[volume].wait_ns(given[volume], bytes, latest_ns);
    if (best && (wait_ns > best_ns || (wait_ns == best_ns && allocator_.free_blocks(volume) <=
                                                                 allocator_.free_blocks(*best))))
      continue;
    best = volume;
    best_ns = wait_ns;
  }
  return best;
}

Result<Extent> LocalStore::allocate(StagedObject& object, uint64_t bytes, uint64_t ahead_bytes,
                                    ByVolume& given) {
  STOKER_CHECK(bytes > 0 && object.runs.size() == volumes_.size());
  const uint64_t blocks = (bytes + kBlock - 1) / kBlock;
  const uint64_t ahead = std::min(ahead_bytes, kAheadBytes) / kBlock / volumes_.size();
  for (int attempt = 0; attempt < 2; ++attempt) {
    // A single volume serves the object's run even where nothing else is free.
    const auto volume =
        volumes_.size() == 1 ? std::optional<size_t>(0) : pick_volume(blocks * kBlock, given);
    if (volume) {
      if (const auto extent = allocator_.take(*volume, blocks, ahead, object.runs[*volume])) {
        given[*volume] += blocks * kBlock;
        for (size_t other = 0; other < volumes_.size(); ++other) {
          if (other != *volume && !has_room(other, blocks * kBlock))
            loads_[other].refuse(blocks * kBlock);
        }
        return *extent;
      }
    }
    // what was set aside is needed now
    for (TransactionState* state : open_) give_back_runs(*state);
  }
  return full(blocks * kBlock);
}

void LocalStore::give_back_runs(TransactionState& state) {
  for (auto& [key, object] : state.objects) {
    for (size_t volume = 0; volume < object.runs.size(); ++volume)
      allocator_.give_back(volume, object.runs[volume]);
  }
}

// What is set aside for chunks to come is free until they are written.
uint64_t LocalStore::free_blocks(size_t volume) const {
  uint64_t blocks = allocator_.free_blocks(volume);
  for (const TransactionState* state : open_) {
    for (const auto& [key, object] : state->objects) blocks += object.runs[volume].left;
  }
  return blocks;
}

Error LocalStore::full(uint64_t bytes) const {
  const uint64_t free = allocator_.free_bytes();
  std::string what = "the store '" + composition() + "' is full: " + human_bytes(bytes) +
                     " more are needed, " + human_bytes(free) + " of " +
                     human_bytes(allocator_.capacity_bytes()) + " are free";
  if (free >= bytes) what += " but in pieces of at most " + human_bytes(allocator_.largest_bytes());
  if (limbo_blocks_ > 0)
    what += " (" + human_bytes(limbo_blocks_ * kBlock) +
            " more after the next durable commit and the reads under way)";
  return fail(Code::out_of_space, "{}; remove objects or drop snapshots, or make a larger store",
              what);
}

void LocalStore::install(TransactionState& state, StagedObject& object, uint32_t index,
                         std::shared_ptr<StagedChunk> node) {
  auto& place = object.chunks[index];
  if (place) drop_staged(state, place);
  place = std::move(node);
}

// Of a staged chunk that nobody will commit; a read of the transaction may still be under way.
void LocalStore::drop_extent(const Extent& extent) {
  limbo_blocks_ += extent.blocks;
  release({&extent, 1});
}

// Its extent is free at once, or when its I/O ends (settle_node).
void LocalStore::drop_node(const std::shared_ptr<StagedChunk>& node) {
  if (std::exchange(node->dropped, true)) return;
  const bool idle_partial = node->partial && !node->partial->scheduled && !node->partial->sealed;
  if (node->state == StagedChunk::State::pending && !idle_partial) return;
  drop_extent(node->chunk.extent());
}

void LocalStore::drop_staged(TransactionState& state, const std::shared_ptr<StagedChunk>& node) {
  std::erase(state.partials, node);
  drop_node(node);
}

// A staged chunk's I/O has ended. What waits for it goes to `run`, to be run without the mutex.
void LocalStore::settle_node(StagedChunk& node, const Status& status, Jobs& run) {
  STOKER_CHECK(node.state == StagedChunk::State::pending);
  node.state = status ? StagedChunk::State::done : StagedChunk::State::failed;
  node.partial.reset();
  node.chunk.valid = std::min(node.chunk.valid, node.limit);
  if (node.dropped) drop_extent(node.chunk.extent());
  std::move(node.waiters.begin(), node.waiters.end(), std::back_inserter(run));
  node.waiters.clear();
}

// The transaction may write these bytes.
Result<StagedObject*> LocalStore::writable(TransactionState& state, std::string_view key,
                                           uint64_t offset, uint64_t bytes) {
  STOKER_TRY(check_writable(state));
  STOKER_ASSIGN(StagedObject * object, own(state, key, true));
  if (offset > object->bytes || bytes > object->bytes - offset) {
    return fail(Code::invalid_argument,
                "writing {} bytes at {} of '{}', which has {}: resize it first", bytes, offset, key,
                object->bytes);
  }
  return object;
}

// Cuts a write into whole chunks, each with an extent of its own, and parts of
// chunks (at most the first and the last). Where there is no room for all of it, no extent is kept.
Result<std::vector<LocalStore::Part>> LocalStore::cut_up(Transfer& transfer, StagedObject& object,
                                                         uint64_t offset, Slice from) {
  std::vector<Part> parts;
  ByVolume given{};
  for (size_t moved = 0; moved < from.size;) {
    const auto index = static_cast<uint32_t>((offset + moved) / object.chunk_bytes);
    const auto at = static_cast<uint32_t>((offset + moved) % object.chunk_bytes);
    const auto bytes =
        static_cast<uint32_t>(std::min<uint64_t>(object.chunk_bytes - at, from.size - moved));
    const Slice slice = from.sub(moved, bytes);
    moved += bytes;
    const auto staged = object.chunks.find(index);
    const bool nothing_behind = staged == object.chunks.end()
                                    ? base_chunk(object, transfer.key, index).valid <= bytes
                                    : bytes == object.length_of(index);
    if (at != 0 || !(nothing_behind || bytes == object.length_of(index))) {
      parts.push_back({index, at, slice});
      continue;
    }
    const auto extent = allocate(object, bytes, object.bytes - object.chunk_at(index), given);
    if (!extent) {
      give_up_pieces(transfer);
      return extent.error();
    }
    Piece piece;
    piece.index = index;
    piece.memory = slice;
    piece.chunk.place = extent->place;
    piece.chunk.stored = piece.chunk.valid = bytes;
    piece.node = std::make_shared<StagedChunk>();
    piece.node->chunk = piece.chunk;
    transfer.pieces.push_back(std::move(piece));
  }
  return parts;
}

void LocalStore::give_up_pieces(Transfer& transfer) {
  for (const Piece& piece : transfer.pieces) allocator_.give(piece.chunk.extent());
  transfer.pieces.clear();
}

Future<void> LocalStore::write(const StatePtr& state, std::string_view key, uint64_t offset,
                               Slice from, Priority priority) {
  std::vector<Future<void>> futures;
  auto transfer = transfers_.take();
  transfer->key = key;
  transfer->priority = priority;
  const auto refuse = [&](const Error& error) REQUIRES(mutex_) -> Future<void> {
    give_up_pieces(*transfer);
    // what was to be written is missing: the commit must not claim it
    if (!state->error) state->error = error;
    Promise<void> unused = std::move(transfer->promise);
    unused.complete(error);
    transfers_.give(std::move(transfer));
    return error;
  };

  MutexLock lock(mutex_);
  auto owned = writable(*state, key, offset, from.size);
  if (!owned) return refuse(owned.error());
  auto parts = cut_up(*transfer, **owned, offset, from);
  while (!parts && parts.error().code == Code::out_of_space && make_room(lock)) {
    owned = writable(*state, key, offset, from.size);  // the mutex was let go of
    if (!owned) return refuse(owned.error());
    parts = cut_up(*transfer, **owned, offset, from);
  }
  if (!parts) return refuse(parts.error());
  for (const Part& part : *parts) {
    Promise<void> promise;
    futures.push_back(promise.future());
    Status taken = write_partial(state, **owned, key, part.index, part.at, part.from, promise);
    while (!taken && taken.error().code == Code::out_of_space && make_room(lock)) {
      owned = writable(*state, key, offset, from.size);
      taken = owned ? write_partial(state, **owned, key, part.index, part.at, part.from, promise)
                    : Status(owned.error());
    }
    if (taken) continue;
    promise.complete(taken.error());
    futures.push_back(refuse(taken.error()));
    return all(futures);  // earlier parts may still be copied
  }
  for (Piece& piece : transfer->pieces) {
    state->touched |= uint64_t{1} << volume_of(piece.chunk.place);
    install(*state, **owned, piece.index, piece.node);
  }
  if (transfer->pieces.empty()) {
    lock.unlock();
    Promise<void> unused = std::move(transfer->promise);
    unused.complete(Status());
    transfers_.give(std::move(transfer));
    return futures.size() == 1 ? futures[0] : all(futures);
  }
  transfer->transaction = state;
  ++state->pending;
  ++in_flight_;
  lock.unlock();
  futures.push_back(transfer->promise.future());
  start_write(std::move(transfer));
  return futures.size() == 1 ? futures[0] : all(futures);
}

// The transfers run while the CRCs are computed here, on the caller's thread.
void LocalStore::start_write(std::unique_ptr<Transfer> owned) {
  Transfer& transfer = *owned.release();  // owns itself until write_done()
  transfer.store = this;
  transfer.finish = &LocalStore::write_done;
  size_t scratch = 0;
  for (Piece& piece : transfer.pieces) {
    STOKER_CHECK(piece.node && piece.memory.size == piece.chunk.stored);
    if (piece.chunk.stored % kBlock == 0) continue;
    piece.scratch = scratch;
    scratch += kBlock;
  }
  if (transfer.scratch.size() < scratch) transfer.scratch = AlignedBytes(scratch);
  for (size_t i = 0; i < transfer.pieces.size(); ++i) {
    const Piece& piece = transfer.pieces[i];
    const size_t volume = volume_of(piece.chunk.place);
    const uint64_t at = block_of(piece.chunk.place) * kBlock;
    const FileId file = volumes_[volume].file.id;
    const size_t straight = align_down(piece.chunk.stored, kBlock);
    if (straight > 0)
      transfer.add(Op::Kind::write, file, volume, at, piece.memory.sub(0, straight), i);
    if (straight == piece.chunk.stored) continue;
    const Slice last = transfer.scratch.slice().sub(piece.scratch, kBlock);
    std::memset(last.data, 0, kBlock);
    std::memcpy(last.data, piece.memory.data + straight, piece.chunk.stored - straight);
    transfer.add(Op::Kind::write, file, volume, at + straight, last, i);
  }
  transfer.start(runtime_.loop, loads_, runtime_.pool);
  for (Piece& piece : transfer.pieces)
    piece.chunk.crc = crc32c(piece.memory.data, piece.chunk.stored);
  transfer.release();
}

// On the Loop's thread, or the caller's.
void LocalStore::write_done(Transfer& transfer, void* store) {
  auto& self = *static_cast<LocalStore*>(store);
  std::unique_ptr<Transfer> owned(&transfer);
  const Status status = transfer.status();
  const StatePtr state = transfer.transaction;
  Promise<void> promise = std::move(transfer.promise);
  Jobs run;
  {
    MutexLock lock(self.mutex_);
    for (const Piece& piece : transfer.pieces) {
      piece.node->chunk.crc = piece.chunk.crc;
      self.settle_node(*piece.node, status, run);
    }
    self.write_settled(state, status);
    self.note_given_up(status);
  }
  self.transfers_.give(std::move(owned));
  for (auto& job : run) job();
  promise.complete(status);
  MutexLock lock(self.mutex_);
  self.ended();
}

void LocalStore::write_settled(const StatePtr& state, const Status& status) {
  STOKER_CHECK(state->pending > 0);
  if (!status && !state->error) state->error = status.error();
  if (--state->pending == 0 && state->phase == TransactionState::Phase::committing) kick();
}

// Without waiting: what is still being written gives up its extent when that ends.
void LocalStore::abandon(const StatePtr& state) {
  using Phase = TransactionState::Phase;
  MutexLock lock(mutex_);
  if (state->phase == Phase::committing) {
    state->orphaned = true;  // the commit goes on
    return;
  }
  STOKER_CHECK(open_.erase(state.get()) == 1);
  if (state->phase == Phase::open) let_go(*state, Phase::abandoned);
}

// Nothing that it staged will be committed.
void LocalStore::let_go(TransactionState& state, TransactionState::Phase phase) {
  STOKER_CHECK(state.phase == TransactionState::Phase::open ||
               state.phase == TransactionState::Phase::committing);
  state.phase = phase;
  give_back_runs(state);
  state.partials.clear();
  for (auto& [key, object] : state.objects) {
    for (auto& [index, node] : object.chunks) drop_node(node);
    STOKER_CHECK(owners_.erase(key) == 1);
  }
  state.objects.clear();
}

}  // namespace stoker::local
