// A read, in numbered steps:
//
// 1. SLOW tells the object's tag, or told it lately. All blocks of the read are those of this tag.
// 2. Each block is found in memory or in a slot, or is on its way for somebody else, or is missing.
//    A missing one is fetched whole where the policy admits it and there is memory for it, else
//    only the range asked for. One in a slot is read whole where it shall stay in memory.
// 3. All of this starts before anything is waited for.
// 4. If bytes came from SLOW, the tag is asked for again. Another tag: the read begins anew. Only
//    blocks whose tag was the same before and after are kept.
// 5. What was read from a slot counts only if the slot was not filled anew meanwhile. What FAST
//    could not give comes from SLOW.
#include <algorithm>
#include <chrono>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/store/cached/cached_store.h"

namespace stoker::cached {

constexpr uint32_t kErrorsMax = 3;      // one after the other, before FAST is given up
constexpr uint32_t kPlannedReads = 64;  // after which one looks for what is due
constexpr uint32_t kGoodReads = 1000;   // after which FAST is as good as one that never failed

void CachedStore::Piece::copy() const {
  STOKER_CHECK(block && at >= begin && at - begin + into.size <= block->size);
  if (into.size > 0) std::memcpy(into.data, block->slice().data + (at - begin), into.size);
}

Future<void> CachedStore::read(std::string_view key, uint64_t offset, Slice into,
                               ReadOptions options) {
  if (!options.snapshot.empty() || into.size == 0) return slow_->read(key, offset, into, options);
  return read(key, {}, offset, into, options);
}

Future<void> CachedStore::read_tagged(std::string_view key, std::string_view tag, uint64_t offset,
                                      Slice into) {
  return read(key, tag, offset, into, {});
}

// tag: that the object must have; empty: any.
Future<void> CachedStore::read(std::string_view key, std::string_view tag, uint64_t offset,
                               Slice into, const ReadOptions& options) {
  if (read_from_memory(key, tag, offset, into)) return Status();
  auto promise = std::make_shared<Promise<void>>();
  Future<void> future = promise->future();
  readers_.run([this, promise, name = std::string(key), wanted = std::string(tag), offset, into,
                options] { promise->complete(read_now(name, wanted, offset, into, options)); });
  return future;
}

Status CachedStore::read_now(const std::string& key, const std::string& tag, uint64_t offset,
                             Slice into, const ReadOptions& options) {
  for (int attempt = 0; attempt < 4; ++attempt) {
    const auto object = object_of(key);
    if (!object) return object.error();
    if (!tag.empty() && object->tag != tag)
      return fail(Code::conflict,
                  "'{}' was replaced since it was looked up; look it up and read it again", key);
    if (offset > object->bytes || into.size > object->bytes - offset) break;  // SLOW has a sentence
    const auto same = read_content(*object, offset, into, options);
    if (!same) return same.error();
    if (*same) return {};
  }
  if (!tag.empty())
    return fail(Code::conflict,
                "'{}' was replaced during each of 4 reads; read it again when nobody writes it",
                key);
  return slow_->read(key, offset, into, options).wait();  // written all the time: not kept
}

std::vector<CachedStore::Piece> CachedStore::pieces_of(const ObjectInfo& object, uint64_t offset,
                                                       Slice into) const {
  std::vector<Piece> pieces;
  for (size_t done = 0; done < into.size;) {
    Piece piece;
    const uint64_t block = (offset + done) / options_.block_bytes;
    piece.id = block_id(object.key, object.tag, block);
    piece.offset = offset + done;
    piece.at = piece.offset % options_.block_bytes;
    piece.block_bytes =
        std::min<uint64_t>(options_.block_bytes, object.bytes - block * options_.block_bytes);
    piece.into = into.sub(done, std::min<size_t>(piece.block_bytes - piece.at, into.size - done));
    done += piece.into.size;
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

// All of it at once, on the caller's thread, if nobody needs to be asked.
bool CachedStore::read_from_memory(std::string_view key, std::string_view tag, uint64_t offset,
                                   Slice into) {
  ObjectInfo object;
  {
    MutexLock lock(mutex_);
    const auto at = known_.find(key);
    if (at == known_.end() || !believed(at->second)) return false;
    object = at->second.object;
  }
  if (offset > object.bytes || into.size > object.bytes - offset) return false;
  if (!tag.empty() && object.tag != tag) return false;
  std::vector<Piece> pieces = pieces_of(object, offset, into);
  {
    MutexLock lock(mutex_);
    for (const Piece& piece : pieces)
      if (!kept_.contains(piece.id) && !gathered_.contains(piece.id)) {
        const auto ahead = ahead_.covering(piece.id, piece.at, piece.into.size);
        if (!ahead || !ahead->part || !ahead->arrived) return false;
      }
    for (Piece& piece : pieces) choose(key, piece);
  }
  for (const Piece& piece : pieces) piece.copy();
  return true;
}

// Whether the object was the same one all the time.
Result<bool> CachedStore::read_content(const ObjectInfo& object, uint64_t offset, Slice into,
                                       const ReadOptions& options) {
  using From = Piece::From;
  std::vector<Piece> pieces = pieces_of(object, offset, into);
  {
    MutexLock lock(mutex_);
    for (Piece& piece : pieces) choose(object.key, piece);
  }
  const bool asked = std::any_of(pieces.begin(), pieces.end(), [](const Piece& piece) {
    return piece.from == From::slow || piece.from == From::fetch;
  });
  for (Piece& piece : pieces) {
    if (piece.from == From::slot) {
      piece.begun = std::chrono::steady_clock::now();
      piece.moved = piece.block ? piece.slots->read(piece.slot, 0, piece.block->slice(), options)
                                : piece.slots->read(piece.slot, piece.at, piece.into, options);
    }
    if (piece.from == From::fetch)
      piece.moved = slow_->read(object.key, piece.offset - piece.at, piece.block->slice(), options);
  }
  const Status slow = direct(object, pieces, options);
  for (Piece& piece : pieces)
    if (piece.from == From::fetch) (void)piece.moved.wait();
  bool same = true;
  if (asked) {
    const auto now = object_now(object.key);
    same = now && now->tag == object.tag;
  }
  bool again = false;
  for (Piece& piece : pieces) {
    if (piece.from != From::fetch) continue;
    Status status = piece.moved.wait();
    if (status && !same)
      status =
          fail(Code::conflict, "'{}' was replaced while it was read; read it again", object.key);
    fetched(piece, status);
    if (status) piece.copy();
    // SLOW may have the range although it has not the block: it shall say so itself.
    piece.from = status ? From::done : From::slow;
    again |= !status;
  }
  if (!same) {  // the caller's memory is still being read into
    for (Piece& piece : pieces)
      if (piece.from == From::slot) (void)piece.moved.wait();
    return false;
  }
  for (Piece& piece : pieces) {
    if (piece.from == From::memory) piece.copy();
    if (piece.from == From::other) {
      const auto block = piece.fetch->future.wait();
      if (block) {
        piece.block = *block;
        piece.copy();
      }
      piece.from = block ? From::done : From::slow;
      again |= !block;
    }
    if (piece.from != From::slot) continue;
    again |= !came_from_slot(piece, piece.moved.wait());
  }
  if (!slow) return slow.error();
  if (!again) return true;
  STOKER_TRY(direct(object, pieces, options));
  const auto now = object_now(object.key);
  return now && now->tag == object.tag;
}

// Whether the bytes are those of the block.
bool CachedStore::came_from_slot(Piece& piece, const Status& moved) {
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - piece.begun);
  piece.slots.reset();
  MutexLock lock(mutex_);
  const bool same = piece.life == life_ && generation_[piece.slot] == piece.generation;
  STOKER_CHECK(!same || (slots_ && policy_));
  if (same && !moved) failed(piece.id, moved.error());
  if (same && moved) {
    if (took > options_.late) {
      failed(piece.id,
             fail(Code::io, "the fast store took {} ms to read a block, too long", took.count()));
    } else {
      errors_ = 0;
      if (++good_ == kGoodReads) probes_ = 0;
    }
    counts_.hit_bytes += piece.into.size;
    if (piece.block) {
      piece.copy();
      // Not what was forgotten meanwhile: then no slot is its own any more.
      const auto place = places_.find(piece.id);
      if (place != places_.end() && place->second.slot == piece.slot) keep(piece.block);
    }
    return true;
  }
  piece.block.reset();
  piece.from = Piece::From::slow;
  return false;
}

// Its memory is reserved before anything moves. Null: there is none.
BlockPtr CachedStore::make_block(const BlockId& id, size_t bytes) {
  auto place = in_memory_.take(1, "a block of a cached store");
  if (!place) return nullptr;
  auto buffer = memory_->take(options_.block_bytes);  // of one size all, so that they always fit
  if (!buffer) return nullptr;
  return std::make_shared<Block>(id, std::move(*place), std::move(*buffer), bytes);
}

void CachedStore::keep(const BlockPtr& block) {
  if (!memory_policy_ || memory_policy_->holds(block->id)) return;
  const auto next = followers_.next(block->id);
  if (!memory_policy_->admits(next)) return;
  if (const auto evicted = memory_policy_->add(block->id, next))
    STOKER_CHECK(kept_.erase(*evicted) == 1);
  STOKER_CHECK(kept_.emplace(block->id, block).second && kept_.size() == memory_policy_->size());
}

bool CachedStore::from_memory(Piece& piece) {
  if (const auto kept = kept_.find(piece.id); kept != kept_.end()) {
    STOKER_CHECK(memory_policy_ && memory_policy_->holds(piece.id));
    memory_policy_->hit(piece.id);
    piece.block = kept->second;
  } else if (const auto gathered = gathered_.find(piece.id); gathered != gathered_.end()) {
    piece.block = gathered->second.block;
  } else {
    return false;
  }
  if (policy_ && policy_->holds(piece.id)) policy_->hit(piece.id);
  piece.from = Piece::From::memory;
  counts_.memory_hit_bytes += piece.into.size;
  return true;
}

// What was fetched ahead of this read.
bool CachedStore::from_ahead(Piece& piece) {
  const PrefetchPtr ahead = ahead_.covering(piece.id, piece.at, piece.into.size);
  if (!ahead) return false;
  ahead_.read(*ahead, piece.into.size);
  wake_ahead();
  if (!ahead->part) return false;  // it lies where blocks lie
  // The whole block came first, for a reader of what lies beside it.
  if (!ahead->arrived && (kept_.contains(piece.id) || gathered_.contains(piece.id))) return false;
  piece.begin = ahead->begin;
  if (ahead->arrived) {
    piece.from = Piece::From::memory;
    piece.block = ahead->part;
    counts_.memory_hit_bytes += piece.into.size;
  } else {
    piece.from = Piece::From::other;
    piece.fetch = ahead->fetch;
    counts_.merged_bytes += piece.into.size;
  }
  return true;
}

// A read of a plan that has to wait for SLOW finds that one looks not far enough ahead.
void CachedStore::choose(std::string_view key, Piece& piece) {
  using From = Piece::From;
  count_epochs(piece);
  followers_.pass(key, piece.offset, piece.into.size);
  followers_.read(piece.id, {policy_.get(), memory_policy_.get()});
  pick(piece);
  if (!ahead_.plans(followers_, piece.id)) return;
  const bool waits =
      piece.from == From::slow || piece.from == From::fetch || piece.from == From::other;
  if (waits) {
    ++counts_.stalls;
    ahead_.stalled();
  }
  if (waits || ++planned_reads_ >= kPlannedReads) wake_ahead();
}

std::shared_ptr<Fetch> CachedStore::begin_fetch(const BlockId& id) {
  auto fetch = std::make_shared<Fetch>();
  fetch->future = fetch->done.future();
  fetch->life = life_;
  STOKER_CHECK(fetches_.emplace(id, fetch).second);
  return fetch;
}

void CachedStore::pick(Piece& piece) {
  using From = Piece::From;
  if (from_ahead(piece) || from_memory(piece)) return;
  if (const auto fetch = fetches_.find(piece.id); fetch != fetches_.end()) {
    piece.from = From::other;
    piece.fetch = fetch->second;
    if (policy_ && policy_->holds(piece.id)) policy_->hit(piece.id);
    counts_.merged_bytes += piece.into.size;
    return;
  }
  if (!slots_) return;
  STOKER_CHECK(policy_ != nullptr);
  piece.life = life_;
  const std::optional<uint64_t> next = followers_.next(piece.id);
  if (policy_->holds(piece.id)) {
    policy_->hit(piece.id);
    const Place& place = places_.at(piece.id);
    piece.from = From::slot;
    STOKER_CHECK(place.slot < room_.slots);
    piece.slots = slots_;
    piece.slot = place.slot;
    piece.generation = generation_[place.slot];
    // A small part of a block that nobody is known to want again is not worth reading all of it.
    if (memory_policy_ && (next || 2 * piece.into.size >= piece.block_bytes) &&
        memory_policy_->admits(next))
      piece.block = make_block(piece.id, piece.block_bytes);
    return;
  }
  if (!policy_->admits(next)) return;
  const BlockPtr block = make_block(piece.id, piece.block_bytes);
  if (!block) return;
  if (const auto evicted = policy_->add(piece.id, next)) forget_block(*evicted);
  piece.from = From::fetch;
  piece.block = block;
  piece.fetch = begin_fetch(piece.id);
}

// What is still on its way counts in the next epoch.
void CachedStore::count_epochs(const Piece& piece) {
  for (auto& [name, epoch] : epochs_) {
    if (!epoch.follower->names(piece.id)) continue;
    if (epoch.read_bytes >= epoch.item_bytes) {
      // What was fetched ahead and not read is of the epoch that begins.
      const uint64_t fetched = counts_.fetched_bytes - ahead_.unread_bytes(*epoch.follower);
      counts_.epoch_fetched_bytes = fetched - std::min(fetched, epoch.fetched_before);
      counts_.epoch_bound_bytes =
          epoch.distinct_bytes - std::min(epoch.distinct_bytes, epoch.kept_bytes);
      ++counts_.epochs;
      epoch.read_bytes = 0;
      epoch.fetched_before = fetched;
      epoch.kept_bytes = counts_.usable_bytes;
    }
    epoch.read_bytes += piece.into.size;
  }
}

// FAST could not give a block that it holds.
void CachedStore::failed(const BlockId& id, const Error& error) {
  if (error.code == Code::over_budget) return;  // says nothing of the disk
  if (error.code == Code::corruption) {
    ++counts_.damaged_blocks;
    policy_->remove(id);
    forget_block(id);
  } else if (++errors_ == kErrorsMax) {
    turn_off(error);
  }
}

// The block came, or failed to come: it is gathered if it is wanted.
void CachedStore::gather(Piece& piece, const Status& status) {
  if (const auto at = fetches_.find(piece.id); at != fetches_.end() && at->second == piece.fetch) {
    fetches_.erase(at);
    if (piece.fetch->life == life_ && slots_) {
      if (!status) policy_->remove(piece.id);
      if (policy_->holds(piece.id)) {
        STOKER_CHECK(!places_.contains(piece.id));
        STOKER_CHECK(gathered_.emplace(piece.id, Gathered{piece.block, numbers_}).second);
        next_.emplace(numbers_++, piece.block);
        STOKER_CHECK(next_.size() <= gathered_.size());
        counts_.admitted_bytes += piece.block_bytes;
        keep(piece.block);
        if (next_.size() >= batch()) wake_.notify_one();
      }
    }
  }
  if (status) counts_.fetched_bytes += piece.block_bytes;
}

// Who waits for it is told.
void CachedStore::tell(const Piece& piece, const Status& status) {
  STOKER_CHECK(piece.fetch != nullptr);
  if (status) {
    piece.fetch->done.complete(Result<BlockPtr>(piece.block));
  } else {
    piece.fetch->done.complete(status.error());
  }
}

void CachedStore::fetched(Piece& piece, const Status& status) {
  {
    MutexLock lock(mutex_);
    gather(piece, status);
  }
  tell(piece, status);
}

// Reads from SLOW what is neither kept nor fetched whole, neighbours in one piece.
Status CachedStore::direct(const ObjectInfo& object, std::vector<Piece>& pieces,
                           const ReadOptions& options) {
  std::vector<Future<void>> reads;
  uint64_t bytes = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].from != Piece::From::slow) continue;
    Slice into = pieces[i].into;
    const uint64_t offset = pieces[i].offset;
    for (; i + 1 < pieces.size() && pieces[i + 1].from == Piece::From::slow; ++i)
      into.size += pieces[i + 1].into.size;
    bytes += into.size;
    reads.push_back(slow_->read(object.key, offset, into, options));
  }
  Status first;
  for (const auto& each : reads) {
    const Status status = each.wait();
    if (first && !status) first = status;
  }
  if (!first) return first;
  for (Piece& piece : pieces)
    if (piece.from == Piece::From::slow) piece.from = Piece::From::done;
  MutexLock lock(mutex_);
  counts_.fetched_bytes += bytes;
  return {};
}

}  // namespace stoker::cached
