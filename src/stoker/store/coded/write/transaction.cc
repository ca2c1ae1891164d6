#include "stoker/store/coded/write/transaction.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/store/chunk_size.h"

namespace stoker::coded {
namespace {

constexpr uint64_t kEarlyShare = 8;  // of the cap: an eighth of it
constexpr uint64_t kEarlyBytes = 64 * kMiB;

Error no_object(std::string_view key) {
  return fail(Code::not_found, "there is no object '{}'", key);
}

}  // namespace

StagedTransaction::~StagedTransaction() {
  {
    MutexLock lock(state_->mutex);
    if (state_->done) return;  // the writer gives up what it owned
    const auto map = map_.lock();
    for (const auto& [key, object] : state_->objects) STOKER_CHECK(map->owned.erase(key) == 1);
  }
  // Who abandons it does not wait for what is on its way.
  if (state_->early_bytes > 0) abandon();
}

// Its memory and its slots are free when what is on its way has ended.
void StagedTransaction::abandon() {
  ++map_.lock()->abandoned;
  parts_.readers.run([&map = map_, state = std::move(state_)]() mutable {
    state.reset();
    {
      const auto locked = map.lock();
      STOKER_CHECK(locked->abandoned > 0);
      --locked->abandoned;
    }
    map.changed();
  });
}

Result<StagedObject*> StagedTransaction::own(std::string_view key) {
  if (state_->done)
    return fail(Code::invalid_argument, "the transaction is already committed: begin another");
  if (key.empty() || key.size() > kKeyMax)
    return fail(Code::invalid_argument, "an object's name has 1 to {} bytes, not {}", kKeyMax,
                key.size());
  if (const auto at = state_->objects.find(key); at != state_->objects.end()) return &at->second;
  const auto map = map_.lock();
  if (map->refused) return *map->refused;
  if (!map->owned.emplace(key).second) {
    return fail(
        Code::busy,
        "another open transaction has changed '{}': wait until it is committed or abandoned", key);
  }
  StagedObject staged;
  staged.base = map->table.find(key);
  if (staged.base) {
    staged.exists = true;
    staged.bytes = staged.kept = staged.base->bytes;
    staged.chunk_bytes = staged.base->chunk_bytes;
    staged.expected = map->classes.of(class_id(key));
  }
  return &state_->objects.emplace(key, std::move(staged)).first->second;
}

Status StagedTransaction::resize(std::string_view key, uint64_t bytes, uint32_t chunk_bytes) {
  MutexLock lock(state_->mutex);
  if (chunk_bytes != 0) STOKER_TRY(check_chunk_bytes(chunk_bytes));
  if (bytes > kObjectBytesMax)
    return fail(
        Code::invalid_argument,
        "'{}' would have {}, but an object of a coded store has at most {}; split it into several",
        key, human_bytes(bytes), human_bytes(kObjectBytesMax));
  STOKER_ASSIGN(StagedObject * object, own(key));
  if (object->exists && chunk_bytes != 0 && chunk_bytes != object->chunk_bytes) {
    return fail(Code::invalid_argument,
                "'{}' has chunks of {} bytes, and their size cannot be changed; remove the object "
                "first, then write it with other chunks",
                key, object->chunk_bytes);
  }
  if (!object->exists) {
    object->exists = object->made = true;
    object->bytes = object->kept = 0;
    object->announced = bytes;
    object->chunk_bytes = chunk_bytes != 0 ? chunk_bytes : shape_.object_chunk_bytes;
    const auto map = map_.lock();
    object->expected = map->classes.at_creation({class_volume(key), key, bytes});
  }
  const uint64_t before = object->bytes;
  if (bytes < before) {
    const size_t stripes = (bytes + shape_.stripe_bytes() - 1) / shape_.stripe_bytes();
    object->stripes.erase(object->stripes.lower_bound(stripes), object->stripes.end());
    object->kept = std::min(object->kept, bytes);
  }
  object->bytes = bytes;
  if (bytes > before) {
    Status zeroed = zero_to(key, *object, before, bytes);
    if (!zeroed && !state_->failed) state_->failed = zeroed.error();
    return zeroed;
  }
  return {};
}

// What lay in the last stripe behind the end, when the object was longer, becomes zeros.
Status StagedTransaction::zero_to(std::string_view key, StagedObject& object, uint64_t from,
                                  uint64_t to) {
  const uint64_t stripe_bytes = shape_.stripe_bytes();
  const size_t index = from / stripe_bytes;
  const auto staged = object.stripes.find(index);
  const bool holds_bytes =
      staged != object.stripes.end() || object.base_stripe(index, stripe_bytes);
  if (from % stripe_bytes == 0 || !holds_bytes) return {};
  const uint64_t end = std::min(to, (index + 1) * stripe_bytes);
  static constexpr std::array<std::byte, kBlock> kZeros{};
  for (uint64_t at = from; at < end;) {
    const size_t piece = std::min<uint64_t>(kBlock - at % kBlock, end - at);
    if (!reads_as_zeros(object, index, at % stripe_bytes)) {
      // a Slice is borrowed both ways; write() reads only
      auto* const zeros = const_cast<std::byte*>(kZeros.data());
      STOKER_TRY(write_locked(key, object, at, {zeros, piece, -1}, Priority::write_back));
    }
    at += piece;
  }
  return {};
}

// Of a stripe that has no older one under it a block that is not staged.
bool StagedTransaction::reads_as_zeros(const StagedObject& object, size_t index,
                                       uint64_t in_stripe) const {
  const Shape& shape = shape_;
  if (object.base_stripe(index, shape.stripe_bytes())) return false;
  const auto stripe = object.stripes.find(index);
  if (stripe == object.stripes.end()) return true;
  const auto chunk = stripe->second.chunks.find(in_stripe / shape.chunk_bytes);
  return chunk == stripe->second.chunks.end() ||
         !chunk->second.rows[in_stripe % shape.chunk_bytes / kBlock];
}

Status StagedTransaction::require(std::string_view key, std::string_view tag) {
  MutexLock lock(state_->mutex);
  if (state_->done)
    return fail(Code::invalid_argument, "the transaction is already committed: begin another");
  state_->required.insert_or_assign(std::string(key), std::string(tag));
  return {};
}

Future<void> StagedTransaction::write(std::string_view key, uint64_t offset, Slice from,
                                      Priority priority) {
  MutexLock lock(state_->mutex);
  const auto status = [&]() -> Status {
    STOKER_ASSIGN(StagedObject * object, own(key));
    if (!object->exists) return no_object(key);
    if (offset > object->bytes || from.size > object->bytes - offset) {
      return fail(Code::invalid_argument,
                  "bytes {} to {} are beyond the end of '{}', which has {}; resize it first",
                  offset, offset + from.size, key, object->bytes);
    }
    object->wrote(offset, from.size);
    STOKER_TRY(write_locked(key, *object, offset, from, priority));
    start_full(*object, offset, from.size);
    return {};
  }();
  if (!status && !state_->failed && !state_->done) state_->failed = status.error();
  return status;
}

Result<StagedStripe*> StagedTransaction::stage_stripe(StagedObject& object, size_t index) {
  if (const auto at = object.stripes.find(index); at != object.stripes.end()) return &at->second;
  StagedStripe stripe;
  stripe.base = object.base_stripe(index, shape_.stripe_bytes());
  if (!stripe.base) {
    STOKER_ASSIGN(stripe.fresh, map_.make_stripe(object.expected));
  }
  return &object.stripes.emplace(index, std::move(stripe)).first->second;
}

Status StagedTransaction::write_locked(std::string_view key, StagedObject& object, uint64_t offset,
                                       Slice from, Priority priority) {
  const Shape& shape = shape_;
  STOKER_TRY(read_halves(key, object, offset, from.size, priority));
  for (size_t moved = 0; moved < from.size;) {
    const uint64_t at = offset + moved;
    const size_t index = at / shape.stripe_bytes();
    const uint64_t in_stripe = at % shape.stripe_bytes();
    const size_t piece = std::min<uint64_t>(kBlock - at % kBlock, from.size - moved);
    STOKER_ASSIGN(StagedStripe * stripe, stage_stripe(object, index));
    const size_t before = stripe->blocks;
    if (at % shape.chunk_bytes == 0 && from.size - moved >= shape.chunk_bytes)
      stage_chunk(*stripe, in_stripe / shape.chunk_bytes, true);
    if (const Status staged =
            stage_block(object, *stripe, index, in_stripe, from.sub(moved, piece), priority);
        !staged)
      return staged.error().with("'" + std::string(key) + "'");
    STOKER_CHECK(stripe->blocks >= before && stripe->blocks <= shape.k * shape.rows());
    if (!stripe->fresh) {
      state_->log_bytes += (stripe->blocks - before) * kBlock;
      // Most of it is new, or the log would be flooded: the stripe is written anew. (The commit may
      // do so with others; they have their room in the log.)
      if (2 * stripe->blocks > shape.k * shape.rows() ||
          state_->log_bytes > shape.segment_bytes / 4) {
        STOKER_ASSIGN(stripe->fresh, map_.make_stripe(object.expected));
        STOKER_CHECK(state_->log_bytes >= stripe->blocks * kBlock);
        state_->log_bytes -= stripe->blocks * kBlock;
      }
    }
    moved += piece;
  }
  return {};
}

// Of a write that begins in one block and ends in the next, the old content of both, by one read.
Status StagedTransaction::read_halves(std::string_view key, const StagedObject& object,
                                      uint64_t offset, size_t bytes, Priority priority) {
  halves_.size = 0;
  const uint64_t first = align_down(offset, kBlock);
  const uint64_t end = offset + bytes;
  const bool halves = offset != first && end % kBlock != 0 && end / kBlock == first / kBlock + 1;
  // What the transaction has staged counts, and what was cut is zeros.
  if (!halves || !object.base || object.made || !object.stripes.empty() ||
      first + 2 * kBlock > object.kept)
    return {};
  Slice old{halves_.blocks.data(), halves_.blocks.size(), -1};
  STOKER_TRY(reader_.read(key, object.base, first, old, priority));
  halves_ = {std::move(halves_.blocks), first, 2 * kBlock};
  return {};
}

// Once a stripe: what is written over and over is not worth it. Not before its last block has come
// to its end.
void StagedTransaction::start_full(StagedObject& object, uint64_t offset, size_t bytes) {
  const Shape& shape = shape_;
  const uint64_t end = offset + bytes;
  for (uint64_t at = align_down(offset, shape.stripe_bytes()); at < end;
       at += shape.stripe_bytes()) {
    const auto staged = object.stripes.find(at / shape.stripe_bytes());
    if (staged == object.stripes.end() || !staged->second.fresh ||
        staged->second.blocks != shape.k * shape.rows())
      continue;
    const bool whole = end >= at + shape.stripe_bytes() || end % kBlock == 0;
    if (whole && !std::exchange(staged->second.early_begun, true)) start_early(staged->second);
  }
}

// All of the stripe is there: its blocks need not wait for the commit. An eighth of the cap is for
// their parity at most, and what finds no room waits for the commit after all.
void StagedTransaction::start_early(StagedStripe& stripe) {
  const uint64_t bytes = EarlyStripe::parity_bytes(shape_);
  const Budget& budget = parts_.budget;
  if (bytes > budget.cap() / kEarlyShare) return;
  uint64_t held = 0;
  for (auto& [key, object] : state_->objects) {
    for (auto& [index, other] : object.stripes) {
      if (!other.early) continue;
      other.early->settle();
      held += other.early->held_bytes();
    }
  }
  if (held + bytes > std::min(kEarlyBytes, budget.cap() / kEarlyShare)) return;
  auto grant = parts_.budget.take(bytes, "writing a stripe of a coded store");
  if (!grant) return;
  STOKER_CHECK(stripe.fresh && !stripe.early && stripe.chunks.size() == shape_.k);
  std::vector<Slice> data;
  // a piece that was used before may be larger
  for (const auto& [position, chunk] : stripe.chunks)
    data.push_back(chunk.bytes.slice().sub(0, shape_.chunk_bytes));
  uint64_t epoch = 0;
  uint32_t positions = 0;
  {
    const auto map = map_.lock();
    epoch = map->epoch;
    for (size_t c = 0; c < shape_.n(); ++c)
      positions |= (map->live & shard_bit(stripe.fresh->shards[c])) != 0 ? uint32_t{1} << c : 0;
  }
  state_->early_bytes += bytes;
  stripe.early = std::make_unique<EarlyStripe>(
      EarlyParts{parts_.shards, parts_.code, parts_.pool, parts_.spare}, stripe.fresh,
      std::move(data), positions, epoch, std::move(*grant));
}

// `whole`: all of it is about to come.
StagedChunk& StagedTransaction::stage_chunk(StagedStripe& stripe, size_t position, bool whole) {
  StagedChunk& chunk = stripe.chunks[position];
  if (!chunk.rows.empty()) return chunk;
  chunk.bytes =
      whole ? parts_.spare.take(shape_.chunk_bytes) : parts_.spare.take_sparse(shape_.chunk_bytes);
  chunk.rows.resize(shape_.rows());
  return chunk;
}

// At most one block. A part of one is merged with what was there.
Status StagedTransaction::stage_block(const StagedObject& object, StagedStripe& stripe,
                                      size_t index, uint64_t in_stripe, Slice from,
                                      Priority priority) {
  const Shape& shape = shape_;
  STOKER_CHECK(in_stripe < shape.stripe_bytes() && in_stripe % kBlock + from.size <= kBlock);
  stripe.early.reset();  // it has what is about to change
  StagedChunk& chunk = stage_chunk(stripe, in_stripe / shape.chunk_bytes, false);
  const size_t in_chunk = in_stripe % shape.chunk_bytes;
  const size_t row = in_chunk / kBlock;
  std::byte* block = chunk.bytes.data() + row * kBlock;
  if (!chunk.rows[row]) {
    if (state_->grants.empty() || stripe.blocks % 256 == 0) {
      const auto take = [&] {
        return parts_.budget.take(std::min<uint64_t>(256 * kBlock, shape.stripe_bytes()),
                                  "what a transaction of a coded store has written");
      };
      auto grant = take();
      if (!grant && map_.await_abandoned()) grant = take();
      if (!grant) return grant.error();
      state_->grants.push_back(std::move(*grant));
    }
    if (from.size < kBlock)
      STOKER_TRY(old_block(object, stripe, index, in_stripe / kBlock, block, priority));
    chunk.rows[row] = true;
    ++stripe.blocks;
  }
  if (from.size > 0) std::memcpy(block + in_chunk % kBlock, from.data, from.size);
  return {};
}

Status StagedTransaction::old_block(const StagedObject& object, const StagedStripe& stripe,
                                    size_t index, size_t block, std::byte* into,
                                    Priority priority) {
  std::memset(into, 0, kBlock);
  if (!stripe.base) return {};
  const uint64_t at = index * shape_.stripe_bytes() + block * kBlock;
  if (at >= object.kept) return {};
  if (at >= halves_.at && at < halves_.at + halves_.size) {
    std::memcpy(into, halves_.blocks.data() + (at - halves_.at), kBlock);
    return {};
  }
  STOKER_TRY(reader_.read("", object.base, at, {into, kBlock, -1}, priority));
  // Bytes behind the end have no meaning.
  if (object.kept - at < kBlock)
    std::memset(into + (object.kept - at), 0, kBlock - (object.kept - at));
  return {};
}

Status StagedTransaction::remove(std::string_view key) {
  MutexLock lock(state_->mutex);
  STOKER_ASSIGN(StagedObject * object, own(key));
  if (!object->exists) return no_object(key);
  object->exists = false;
  object->made = true;  // if it comes again
  object->bytes = object->kept = 0;
  object->stripes.clear();
  object->expected = Class::read_write;
  object->stated = false;
  object->writes.clear();
  return {};
}

Status StagedTransaction::expect(std::string_view key, Class expected) {
  MutexLock lock(state_->mutex);
  STOKER_ASSIGN(StagedObject * object, own(key));
  if (!object->exists) return no_object(key);
  object->expected = expected;
  object->stated = true;
  return {};
}

Future<void> StagedTransaction::read(std::string_view key, uint64_t offset, Slice into,
                                     ReadOptions options) {
  if (!options.snapshot.empty()) return parts_.store.read(key, offset, into, options);
  MutexLock lock(state_->mutex);
  const auto at = state_->objects.find(key);
  if (at == state_->objects.end()) return parts_.store.read(key, offset, into, options);
  const StagedObject& object = at->second;
  if (!object.exists) return no_object(key);
  if (offset > object.bytes || into.size > object.bytes - offset) {
    return fail(Code::invalid_argument, "bytes {} to {} are beyond the end of '{}', which has {}",
                offset, offset + into.size, key, object.bytes);
  }
  return read_locked(key, object, offset, into, options.priority);
}

// The committed bytes that the transaction kept, then over them its own.
Status StagedTransaction::read_locked(std::string_view key, const StagedObject& object,
                                      uint64_t offset, Slice into, Priority priority) {
  const Shape& shape = shape_;
  const uint64_t kept = object.base && !object.made && object.kept > offset
                            ? std::min<uint64_t>(object.kept - offset, into.size)
                            : 0;
  if (kept > 0) STOKER_TRY(reader_.read(key, object.base, offset, into.sub(0, kept), priority));
  if (into.size > kept) std::memset(into.data + kept, 0, into.size - kept);
  for (uint64_t at = offset; at < offset + into.size;) {
    const size_t piece = std::min<uint64_t>(kBlock - at % kBlock, offset + into.size - at);
    const auto stripe = object.stripes.find(at / shape.stripe_bytes());
    const uint64_t in_stripe = at % shape.stripe_bytes();
    if (stripe != object.stripes.end()) {
      const auto chunk = stripe->second.chunks.find(in_stripe / shape.chunk_bytes);
      const size_t in_chunk = in_stripe % shape.chunk_bytes;
      if (chunk != stripe->second.chunks.end() && chunk->second.rows[in_chunk / kBlock])
        std::memcpy(into.data + (at - offset), chunk->second.bytes.data() + in_chunk, piece);
    }
    at += piece;
  }
  return {};
}

Future<Version> StagedTransaction::commit(Durability) {
  std::optional<Error> failed;
  {
    MutexLock lock(state_->mutex);
    if (state_->done)
      return fail(Code::invalid_argument, "the transaction is already committed: begin another");
    state_->done = true;
    failed = state_->failed;
    const auto map = map_.lock();
    if (!failed && map->refused) failed = map->refused;
    if (failed) {
      for (const auto& [key, object] : state_->objects) STOKER_CHECK(map->owned.erase(key) == 1);
    }
  }
  if (failed) return *failed;
  parts_.paces.used();
  return parts_.writer.commit(state_);
}

}  // namespace stoker::coded
