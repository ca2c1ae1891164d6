// LocalStore: reads. Look up and pin under the mutex, transfer, verify on the pool what has come
// while the rest is on its way, unpin.
#include <algorithm>
#include <cstring>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"
#include "stoker/store/local/local_store.h"

namespace stoker::local {
namespace {

Error not_found(std::string_view key, std::string_view snapshot) {
  std::string what = "there is no object '" + std::string(key) + "'";
  if (!snapshot.empty()) what += " in snapshot '" + std::string(snapshot) + "'";
  return fail(Code::not_found, "{}", what);
}

Result<const Table*> table_of(const Map& map, std::string_view snapshot) {
  if (snapshot.empty()) return &map.current();
  const Snapshot* found = map.find_snapshot(snapshot);
  if (found == nullptr)
    return fail(Code::not_found, "there is no snapshot '{}'; check its name", snapshot);
  return &found->table;
}

ObjectInfo describe(const std::string& key, const Object& object) {
  return {key, object.bytes, object.chunk_bytes, object.version, {}, tag_of(object)};
}

}  // namespace

Result<ObjectInfo> LocalStore::stat(std::string_view key, std::string_view snapshot) {
  MutexLock lock(mutex_);
  STOKER_ASSIGN(const Table* table, table_of(*map_, snapshot));
  const auto found = table->find(key);
  if (found == table->end()) return not_found(key, snapshot);
  return describe(found->first, *found->second);
}

std::optional<ObjectInfo> LocalStore::stat_at_once(std::string_view key) {
  auto object = stat(key, {});
  return object ? std::optional(std::move(*object)) : std::nullopt;
}

Result<std::vector<ObjectInfo>> LocalStore::list(std::string_view prefix,
                                                 std::string_view snapshot) {
  MutexLock lock(mutex_);
  STOKER_ASSIGN(const Table* table, table_of(*map_, snapshot));
  std::vector<ObjectInfo> objects;
  for (auto at = table->lower_bound(prefix); at != table->end() && at->first.starts_with(prefix);
       ++at)
    objects.push_back(describe(at->first, *at->second));
  return objects;
}

Future<void> LocalStore::read(std::string_view key, uint64_t offset, Slice into,
                              ReadOptions options) {
  return start_read(nullptr, key, offset, into, options);
}

Future<void> LocalStore::start_read(StatePtr state, std::string_view key, uint64_t offset,
                                    Slice into, const ReadOptions& options) {
  if (state && !options.snapshot.empty())
    return fail(Code::invalid_argument,
                "a transaction cannot read from a snapshot: read it through the store instead");
  auto transfer = transfers_.take();
  transfer->key = key;
  transfer->priority = options.priority;
  transfer->deadline_ns = options.deadline_ns;
  Future<void> future = transfer->promise.future();
  try_read(std::move(transfer), std::move(state), std::string(options.snapshot), offset, into);
  return future;
}

// Where it meets a staged chunk that is still being written it begins anew once that is done.
void LocalStore::try_read(std::unique_ptr<Transfer> transfer, StatePtr state, std::string snapshot,
                          uint64_t offset, Slice into) {
  MutexLock lock(mutex_);
  auto waits_for = gather(*transfer, state, snapshot, offset, into);
  if (waits_for && *waits_for != nullptr) {
    transfer->pieces.clear();
    auto shared = std::make_shared<std::unique_ptr<Transfer>>(std::move(transfer));
    (*waits_for)
        ->waiters.push_back(
            [this, shared, state = std::move(state), snapshot = std::move(snapshot), offset, into] {
              try_read(std::move(*shared), state, snapshot, offset, into);
            });
    return;
  }
  if (!waits_for) {
    lock.unlock();
    Promise<void> promise = std::move(transfer->promise);
    transfers_.give(std::move(transfer));
    return promise.complete(waits_for.error());
  }
  pin(*transfer);
  ++in_flight_;
  lock.unlock();
  Transfer& started = *transfer.release();  // owns itself until read_done()
  started.store = this;
  started.arrived = &LocalStore::verify;
  started.finish = &LocalStore::read_done;
  if (const Status ready = prepare_read(started); !ready) {
    started.refused = ready.error();
    return read_done(started, this);
  }
  started.start(runtime_.loop, loads_, runtime_.pool);
  started.release();
}

// The pieces of the read; or the staged chunk it must wait for; or why it cannot be.
Result<std::shared_ptr<StagedChunk>> LocalStore::gather(Transfer& transfer, const StatePtr& state,
                                                        std::string_view snapshot, uint64_t offset,
                                                        Slice into) {
  using Phase = TransactionState::Phase;
  const StagedObject* staged = nullptr;
  if (state && state->phase == Phase::failed)
    return fail(Code::cancelled,
                "the commit of the transaction failed, so its bytes are gone; begin another");
  if (state && state->phase == Phase::abandoned)
    return fail(Code::cancelled,
                "the transaction was abandoned before its bytes were read; begin another");
  if (state && state->phase != Phase::committed) {
    if (const auto own = state->objects.find(transfer.key); own != state->objects.end())
      staged = &own->second;
  }
  STOKER_ASSIGN(const Table* table, table_of(*map_, snapshot));
  const auto found = table->find(transfer.key);
  if (staged != nullptr ? staged->removed : found == table->end())
    return not_found(transfer.key, snapshot);
  const uint64_t bytes = staged != nullptr ? staged->bytes : found->second->bytes;
  const uint32_t chunk_bytes = staged != nullptr ? staged->chunk_bytes : found->second->chunk_bytes;
  if (offset > bytes || into.size > bytes - offset) {
    return fail(Code::invalid_argument,
                "{} bytes at {} of '{}' cannot be read: it has {}; read less", into.size, offset,
                transfer.key, bytes);
  }
  for (size_t moved = 0; moved < into.size;) {
    Piece piece;
    piece.index = static_cast<uint32_t>((offset + moved) / chunk_bytes);
    piece.from = static_cast<uint32_t>((offset + moved) % chunk_bytes);
    piece.to =
        static_cast<uint32_t>(std::min<uint64_t>(chunk_bytes, piece.from + (into.size - moved)));
    piece.memory = into.sub(moved, piece.to - piece.from);
    moved += piece.to - piece.from;
    if (staged == nullptr) {
      STOKER_CHECK(piece.index < found->second->chunks.size());
      piece.chunk = found->second->chunks[piece.index];
    } else if (const auto own = staged->chunks.find(piece.index); own != staged->chunks.end()) {
      const auto& node = own->second;
      if (node->partial && !node->partial->sealed) seal(state, node);
      if (node->state == StagedChunk::State::pending) return node;
      if (node->state == StagedChunk::State::failed) {
        STOKER_CHECK(state->error);
        return *state->error;
      }
      piece.chunk = visible_chunk(*staged, transfer.key, piece.index);
    } else {
      piece.chunk = visible_chunk(*staged, transfer.key, piece.index);
    }
    transfer.pieces.push_back(std::move(piece));
  }
  return std::shared_ptr<StagedChunk>();
}

// Decides what goes straight into the caller's memory and what through scratch, and makes the ops.
Status LocalStore::prepare_read(Transfer& transfer) {
  size_t scratch = 0;
  for (Piece& piece : transfer.pieces) {
    const Chunk& chunk = piece.chunk;
    if (chunk.sparse()) {
      std::memset(piece.memory.data, 0, piece.memory.size);
      continue;
    }
    piece.direct = piece.from == 0 && piece.to >= chunk.stored;
    const size_t in_scratch = piece.direct ? chunk.stored % kBlock : chunk.stored;
    if (in_scratch == 0) continue;
    piece.scratch = scratch;
    scratch += align_up(in_scratch, kBlock);
  }
  if (scratch > 0) {
    STOKER_ASSIGN(transfer.grant, runtime_.budget.take(scratch, "reading a part of a chunk of '" +
                                                                    transfer.key + "'"));
    if (transfer.scratch.size() < scratch) transfer.scratch = AlignedBytes(scratch);
  }
  for (size_t i = 0; i < transfer.pieces.size(); ++i) {
    const Piece& piece = transfer.pieces[i];
    const Chunk& chunk = piece.chunk;
    if (chunk.sparse()) continue;
    const size_t volume = volume_of(chunk.place);
    const uint64_t at = block_of(chunk.place) * kBlock;
    const size_t straight = piece.direct ? align_down(chunk.stored, kBlock) : 0;
    const FileId file = volumes_[volume].file.id;
    if (straight > 0)
      transfer.add(Op::Kind::read, file, volume, at, piece.memory.sub(0, straight), i);
    if (straight < chunk.stored) {
      transfer.add(
          Op::Kind::read, file, volume, at + straight,
          transfer.scratch.slice().sub(piece.scratch, align_up(chunk.stored - straight, kBlock)),
          i);
    }
  }
  return {};
}

// On the pool, for several pieces of a transfer at a time: checks the whole stored chunk, then
// completes the caller's bytes.
void LocalStore::verify(Transfer& transfer, const Piece& piece, void* /*store*/) {
  const Chunk& chunk = piece.chunk;
  const std::byte* const scratch =
      piece.scratch == SIZE_MAX ? nullptr : transfer.scratch.data() + piece.scratch;
  const size_t straight = piece.direct ? align_down(chunk.stored, kBlock) : 0;
  const size_t behind = chunk.stored - straight;
  STOKER_CHECK(!chunk.sparse() && straight <= piece.memory.size);
  STOKER_CHECK(behind == 0 || piece.scratch + behind <= transfer.scratch.size());
  uint32_t crc = crc32c(piece.memory.data, straight);
  if (behind > 0) crc = crc32c(scratch, behind, crc);
  if (crc != chunk.crc) return transfer.bad(piece);
  if (behind > 0) {
    const size_t from = piece.direct ? 0 : piece.from;
    const size_t to = piece.direct ? behind : std::min<size_t>(piece.to, chunk.stored);
    if (to > from) std::memcpy(piece.memory.data + straight, scratch + from, to - from);
  }
  if (piece.to > chunk.valid) {  // never written there, or cut off
    const size_t zeros_from = std::max(piece.from, chunk.valid) - piece.from;
    std::memset(piece.memory.data + zeros_from, 0, piece.memory.size - zeros_from);
  }
}

// All pieces came and were verified, or an op failed. On the pool, or the caller's thread if
// nothing was read.
void LocalStore::read_done(Transfer& transfer, void* store) {
  auto& self = *static_cast<LocalStore*>(store);
  std::unique_ptr<Transfer> owned(&transfer);
  Status status = transfer.status();
  const Piece* const bad = transfer.first_bad();
  if (status && bad != nullptr) status = self.corrupt(transfer.key, bad->index, bad->chunk);
  // all were verified
  if (status)
    STOKER_CHECK(std::all_of(transfer.pieces.begin(), transfer.pieces.end(),
                             [](const Piece& piece) { return piece.to_come == 0; }));
  Promise<void> promise = std::move(transfer.promise);
  if (!status) {
    MutexLock lock(self.mutex_);
    self.note_given_up(status);
  }
  self.unpin(*owned);
  self.transfers_.give(std::move(owned));
  promise.complete(std::move(status));
  MutexLock lock(self.mutex_);
  self.ended();
}

// The chunk's bytes are lost; a snapshot may still have those from before they
// were written.
Error LocalStore::corrupt(std::string_view key, uint32_t index, const Chunk& chunk) const {
  std::string older;
  {
    MutexLock lock(mutex_);
    for (const Snapshot& snapshot : map_->snapshots()) {  // the newest such one is the last
      const auto found = snapshot.table.find(key);
      if (found != snapshot.table.end() && (index >= found->second->chunks.size() ||
                                            found->second->chunks[index].place != chunk.place))
        older = snapshot.name;
    }
  }
  const std::string rest = older.empty() ? "no snapshot has an earlier form of it, so restore the "
                                           "store from a copy or write the object again"
                                         : "snapshot '" + older + "' has an earlier form of it";
  return fail(Code::corruption,
              "chunk {} of '{}' differs from its checksum (volume {}, byte {}): its bytes on disk "
              "are damaged. `stoker fsck` lists all damage; {}",
              index, key, volume_of(chunk.place), block_of(chunk.place) * kBlock, rest);
}

// A whole chunk, verified; what follows the valid bytes is zero.
Status LocalStore::read_chunk(std::string_view key, uint32_t index, const Chunk& chunk,
                              Slice into) {
  STOKER_CHECK(worker_.here());  // it waits
  IoBatch batch(runtime_.loop, Priority::write_back);
  batch.read(volumes_[volume_of(chunk.place)].file.id, block_of(chunk.place) * kBlock,
             into.sub(0, align_up(chunk.stored, kBlock)));
  if (const Status status = batch.run(); !status)
    return status.error().with("reading chunk " + std::to_string(index) + " of '" +
                               std::string(key) + "'");
  if (crc32c(into.data, chunk.stored) != chunk.crc) return corrupt(key, index, chunk);
  std::memset(into.data + chunk.valid, 0, into.size - chunk.valid);
  return {};
}

void LocalStore::pin(const Transfer& transfer) {
  for (const Piece& piece : transfer.pieces) {
    if (!piece.chunk.sparse()) ++readers_[piece.chunk.place];
  }
}

void LocalStore::unpin(const Transfer& transfer) {
  MutexLock lock(mutex_);
  for (const Piece& piece : transfer.pieces) {
    if (piece.chunk.sparse()) continue;
    const auto reader = readers_.find(piece.chunk.place);
    STOKER_CHECK(reader != readers_.end() && reader->second > 0);
    if (--reader->second > 0) continue;
    readers_.erase(reader);
    if (const auto left = limbo_.find(piece.chunk.place); left != limbo_.end()) {
      if (!poisoned_) give(left->second);
      limbo_.erase(left);
    }
  }
}

}  // namespace stoker::local
