#include "stoker/store/coded/write/transaction.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/store/chunk_size.h"

namespace stoker::coded {
namespace {

// Stripes on their way have an eighth of the cap at most, or one of them has more.
constexpr uint64_t kEarlyShare = 8;
constexpr uint64_t kEarlyBytes = 64 * kMiB;
constexpr size_t kGrantBlocks = 256;

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
  if (!state_->under_way.empty()) abandon();
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
  return stripe == object.stripes.end() ||
         !stripe->second.has(in_stripe / shape.chunk_bytes, in_stripe % shape.chunk_bytes / kBlock);
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
    STOKER_TRY(read_halves(key, *object, offset, from.size, priority));
    for (size_t moved = 0; moved < from.size;) {
      const uint64_t at = offset + moved;
      const size_t piece =
          std::min<uint64_t>(shape_.stripe_bytes() - at % shape_.stripe_bytes(), from.size - moved);
      STOKER_TRY(write_locked(key, *object, at, from.sub(moved, piece), priority));
      start_full(*object, at + piece);
      moved += piece;
    }
    return {};
  }();
  halves_.size = 0;
  if (!status && !state_->failed && !state_->done) state_->failed = status.error();
  return status;
}

// What was removed again may be on its way to its slots.
Result<StripePtr> StagedTransaction::make_stripe(Class expected) {
  auto stripe = map_.make_stripe(expected);
  if (stripe || state_->under_way.empty()) return stripe;
  while (!state_->under_way.empty()) finish_oldest();
  return map_.make_stripe(expected);
}

Result<StagedStripe*> StagedTransaction::stage_stripe(StagedObject& object, size_t index) {
  if (const auto at = object.stripes.find(index); at != object.stripes.end()) return &at->second;
  StagedStripe stripe;
  stripe.base = object.base_stripe(index, shape_.stripe_bytes());
  if (!stripe.base) {
    STOKER_ASSIGN(stripe.fresh, make_stripe(object.expected));
  }
  return &object.stripes.emplace(index, std::move(stripe)).first->second;
}

Status StagedTransaction::write_locked(std::string_view key, StagedObject& object, uint64_t offset,
                                       Slice from, Priority priority) {
  const Shape& shape = shape_;
  for (size_t moved = 0; moved < from.size;) {
    const uint64_t at = offset + moved;
    const size_t index = at / shape.stripe_bytes();
    const uint64_t in_stripe = at % shape.stripe_bytes();
    const size_t piece =
        std::min<uint64_t>(shape.chunk_bytes - at % shape.chunk_bytes, from.size - moved);
    STOKER_ASSIGN(StagedStripe * stripe, stage_stripe(object, index));
    const size_t before = stripe->blocks;
    if (const Status staged =
            stage(object, *stripe, index, in_stripe, from.sub(moved, piece), priority);
        !staged)
      return staged.error().with("'" + std::string(key) + "'");
    STOKER_CHECK(stripe->blocks >= before && stripe->blocks <= shape.k * shape.rows());
    if (!stripe->fresh) {
      state_->log_bytes += (stripe->blocks - before) * kBlock;
      // Most of it is new, or the log would be flooded: the stripe is written anew. (The commit may
      // do so with others; they have their room in the log.)
      if (2 * stripe->blocks > shape.k * shape.rows() ||
          state_->log_bytes > shape.segment_bytes / 4) {
        STOKER_ASSIGN(stripe->fresh, make_stripe(object.expected));
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

// Of the stripe in which a write ended here. Once: what is written over and over is not worth it.
// Not before its last block has come to its end.
void StagedTransaction::start_full(StagedObject& object, uint64_t end) {
  const auto staged = object.stripes.find((end - 1) / shape_.stripe_bytes());
  if (staged == object.stripes.end() || end % kBlock != 0) return;
  StagedStripe& stripe = staged->second;
  if (stripe.fresh && stripe.blocks == shape_.k * shape_.rows() &&
      !std::exchange(stripe.early_begun, true))
    start_early(stripe);
}

// All of the stripe is there: its blocks need not wait for the commit, nor stay in memory until
// then. So whoever writes more than the disks take waits here for the oldest on its way.
void StagedTransaction::start_early(StagedStripe& stripe) {
  const Budget& budget = parts_.budget;
  const uint64_t parity = EarlyStripe::parity_bytes(shape_);
  auto& under_way = state_->under_way;
  std::erase_if(under_way, [](const auto& early) { return early->settle(); });
  uint64_t held = 0;
  for (const auto& early : under_way) held += early->held_bytes();
  const uint64_t more = shape_.n() * shape_.chunk_bytes;
  while (held > 0 && held + more > std::min(kEarlyBytes, budget.cap() / kEarlyShare)) {
    held -= under_way.front()->held_bytes();
    finish_oldest();
  }
  auto for_parity = take(parity, "writing a stripe of a coded store");
  auto for_headers = take(headers_bytes(shape_), "the headers of a stripe of a coded store");
  if (!for_parity || !for_headers) return;  // it waits for the commit
  STOKER_CHECK(stripe.fresh && !stripe.early && stripe.chunks.size() == shape_.k);
  EarlyBlocks blocks;
  for (auto& [position, chunk] : stripe.chunks) blocks.chunks.push_back(std::move(chunk.bytes));
  blocks.grants = std::move(stripe.grants);
  stripe.grants.clear();
  stripe.chunks.clear();
  stripe.early = std::make_shared<EarlyStripe>(
      EarlyParts{map_, parts_.shards, reader_, parts_.code, parts_.pool, parts_.spare},
      stripe.fresh, std::move(blocks), std::move(*for_parity), std::move(*for_headers));
  under_way.push_back(stripe.early);
}

void StagedTransaction::finish_oldest() {
  state_->under_way.front()->finish();
  state_->under_way.pop_front();
}

// From the cap. What is on its way gives its memory back, and so does what was abandoned.
Result<Grant> StagedTransaction::take(uint64_t bytes, std::string_view who) {
  for (bool last = false;;) {
    auto grant = parts_.budget.take(bytes, who);
    if (grant || last) return grant;
    if (state_->under_way.empty()) {
      last = true;
      if (!map_.await_abandoned()) return grant;
    } else {
      finish_oldest();
    }
  }
}

// What is on its way, or on the disks by now, is staged again: it is about to change.
Status StagedTransaction::take_back(StagedStripe& stripe, Priority priority) {
  Grant memory;
  if (!stripe.early->in_memory()) {
    STOKER_ASSIGN(memory, take(shape_.k * shape_.chunk_bytes,
                               "a stripe of a transaction that is written once more"));
  }
  STOKER_ASSIGN(EarlyBlocks blocks, stripe.early->take_back(std::move(memory), priority));
  std::erase(state_->under_way, stripe.early);
  stripe.early.reset();
  stripe.grants = std::move(blocks.grants);
  for (size_t c = 0; c < shape_.k; ++c)
    stripe.chunks[c] = {std::move(blocks.chunks[c]), std::vector<bool>(shape_.rows(), true)};
  return {};
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

// Inside of one chunk. A part of a block is merged with what was there.
Status StagedTransaction::stage(const StagedObject& object, StagedStripe& stripe, size_t index,
                                uint64_t in_stripe, Slice from, Priority priority) {
  const Shape& shape = shape_;
  const size_t in_chunk = in_stripe % shape.chunk_bytes;
  const size_t end = in_chunk + from.size;
  STOKER_CHECK(in_stripe < shape.stripe_bytes() && end <= shape.chunk_bytes);
  if (stripe.early) STOKER_TRY(take_back(stripe, priority));
  StagedChunk& chunk =
      stage_chunk(stripe, in_stripe / shape.chunk_bytes, from.size == shape.chunk_bytes);
  Status status;
  size_t staged = in_chunk;  // up to here its blocks have their room
  while (staged < end) {
    const size_t row = staged / kBlock;
    const size_t next = std::min((row + 1) * kBlock, end);
    if (!chunk.rows[row]) {
      status = room_for_block(stripe);
      if (status && next - staged < kBlock)
        status =
            old_block(object, stripe, index, in_stripe / shape.chunk_bytes * shape.rows() + row,
                      chunk.bytes.data() + row * kBlock, priority);
      if (!status) break;
      chunk.rows[row] = true;
      ++stripe.blocks;
    }
    staged = next;
  }
  if (staged > in_chunk) std::memcpy(chunk.bytes.data() + in_chunk, from.data, staged - in_chunk);
  return status;
}

Status StagedTransaction::room_for_block(StagedStripe& stripe) {
  if (stripe.blocks % kGrantBlocks != 0) return {};
  STOKER_ASSIGN(Grant grant, take(std::min<uint64_t>(kGrantBlocks * kBlock, shape_.stripe_bytes()),
                                  "what a transaction of a coded store has written"));
  stripe.grants.push_back(std::move(grant));
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
  StagedObject& object = at->second;
  if (!object.exists) return no_object(key);
  if (offset > object.bytes || into.size > object.bytes - offset) {
    return fail(Code::invalid_argument, "bytes {} to {} are beyond the end of '{}', which has {}",
                offset, offset + into.size, key, object.bytes);
  }
  return read_locked(key, object, offset, into, options.priority);
}

// The committed bytes that the transaction kept, then over them its own.
Status StagedTransaction::read_locked(std::string_view key, StagedObject& object, uint64_t offset,
                                      Slice into, Priority priority) {
  const Shape& shape = shape_;
  const uint64_t kept = object.base && !object.made && object.kept > offset
                            ? std::min<uint64_t>(object.kept - offset, into.size)
                            : 0;
  if (kept > 0) STOKER_TRY(reader_.read(key, object.base, offset, into.sub(0, kept), priority));
  if (into.size > kept) std::memset(into.data + kept, 0, into.size - kept);
  for (uint64_t at = offset; at < offset + into.size;) {
    const uint64_t in_stripe = at % shape.stripe_bytes();
    const size_t piece =
        std::min<uint64_t>(shape.chunk_bytes - at % shape.chunk_bytes, offset + into.size - at);
    const auto stripe = object.stripes.find(at / shape.stripe_bytes());
    if (stripe != object.stripes.end())
      STOKER_TRY(read_staged(stripe->second, in_stripe, into.sub(at - offset, piece), priority));
    at += piece;
  }
  return {};
}

// Inside of one chunk, over what is there: what is staged of it.
Status StagedTransaction::read_staged(StagedStripe& stripe, uint64_t in_stripe, Slice into,
                                      Priority priority) {
  const size_t position = in_stripe / shape_.chunk_bytes;
  const size_t in_chunk = in_stripe % shape_.chunk_bytes;
  const size_t end = in_chunk + into.size;
  if (stripe.early) {
    const size_t first = in_chunk / kBlock;
    const size_t count = align_up(end, kBlock) / kBlock - first;
    STOKER_ASSIGN(const Grant memory,
                  take(count * kBlock, "reading what a transaction has written"));
    const SparePiece blocks = parts_.spare.take(count * kBlock);
    STOKER_TRY(stripe.early->read(position, first, count, blocks.data(), priority));
    std::memcpy(into.data, blocks.data() + in_chunk % kBlock, into.size);
    return {};
  }
  if (stripe.stands) {
    const auto alone = std::make_shared<Object>();
    alone->bytes = shape_.stripe_bytes();
    alone->chunk_bytes = shape_.chunk_bytes;
    alone->stripes.push_back(stripe.fresh);
    return reader_.read("", alone, in_stripe, into, priority);
  }
  const auto chunk = stripe.chunks.find(position);
  if (chunk == stripe.chunks.end()) return {};
  for (size_t at = in_chunk; at < end;) {
    const size_t piece = std::min<size_t>(kBlock - at % kBlock, end - at);
    if (chunk->second.rows[at / kBlock])
      std::memcpy(into.data + (at - in_chunk), chunk->second.bytes.data() + at, piece);
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
