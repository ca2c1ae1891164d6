#include "stoker/store/coded/transaction.h"

#include <algorithm>
#include <cstring>

namespace stoker::coded {
namespace {

constexpr const char* kWhere = "store/coded/transaction";

Error no_object(std::string_view key) {
  return make_error(Code::not_found, "there is no object '" + std::string(key) + "'", kWhere);
}

}  // namespace

Result<std::unique_ptr<Transaction>> CodedStore::begin() {
  std::lock_guard lock(mutex_);
  if (refused_) return *refused_;
  return std::unique_ptr<Transaction>(new StagedTransaction(*this));
}

StagedTransaction::~StagedTransaction() {
  std::lock_guard lock(state_->mutex);
  if (state_->done) return;  // the writer gives up what it owned
  std::lock_guard store_lock(store_.mutex_);
  for (const auto& [key, object] : state_->objects) store_.owned_.erase(key);
}

Result<StagedObject*> StagedTransaction::own(std::string_view key) {
  if (state_->done)
    return make_error(Code::invalid_argument, "the transaction is already committed: begin another",
                      kWhere);
  if (key.empty() || key.size() > kKeyMax)
    return make_error(Code::invalid_argument, "an object's name has 1 to 1024 bytes", kWhere);
  if (const auto at = state_->objects.find(key); at != state_->objects.end()) return &at->second;
  std::lock_guard lock(store_.mutex_);
  if (store_.refused_) return *store_.refused_;
  if (!store_.owned_.emplace(key).second) {
    return make_error(Code::busy,
                      "another open transaction has changed '" + std::string(key) +
                          "': wait until it is committed or abandoned",
                      kWhere);
  }
  StagedObject staged;
  staged.base = store_.table_.find(key);
  if (staged.base) {
    staged.exists = true;
    staged.bytes = staged.kept = staged.base->bytes;
    staged.chunk_bytes = staged.base->chunk_bytes;
    staged.expected = store_.classes_.of(class_id(key));
  }
  return &state_->objects.emplace(key, std::move(staged)).first->second;
}

Status StagedTransaction::resize(std::string_view key, uint64_t bytes, uint32_t chunk_bytes) {
  std::lock_guard lock(state_->mutex);
  if (chunk_bytes != 0 &&
      (chunk_bytes % kBlock != 0 || chunk_bytes < 64 * kKiB || chunk_bytes > 8 * kMiB)) {
    return make_error(Code::invalid_argument,
                      "a chunk is a multiple of 4 KiB from 64 KiB to 8 MiB, not " +
                          std::to_string(chunk_bytes) + " bytes",
                      kWhere);
  }
  if (bytes > kObjectBytesMax)
    return make_error(Code::invalid_argument,
                      "an object of a coded store has at most " + human_bytes(kObjectBytesMax),
                      kWhere);
  STOKER_ASSIGN(StagedObject * object, own(key));
  if (object->exists && chunk_bytes != 0 && chunk_bytes != object->chunk_bytes) {
    return make_error(Code::invalid_argument,
                      "'" + std::string(key) + "' has chunks of " +
                          std::to_string(object->chunk_bytes) +
                          " bytes and keeps them; remove it first",
                      kWhere);
  }
  if (!object->exists) {
    object->exists = object->made = true;
    object->bytes = object->kept = 0;
    object->announced = bytes;
    object->chunk_bytes = chunk_bytes != 0 ? chunk_bytes : store_.shape_.object_chunk_bytes;
    std::lock_guard store_lock(store_.mutex_);
    object->expected = store_.classes_.at_creation({class_volume(key), key, bytes});
  }
  const uint64_t before = object->bytes;
  if (bytes < before) {
    const size_t stripes =
        (bytes + store_.shape_.stripe_bytes() - 1) / store_.shape_.stripe_bytes();
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
  const uint64_t stripe_bytes = store_.shape_.stripe_bytes();
  const size_t index = from / stripe_bytes;
  const auto staged = object.stripes.find(index);
  const bool holds_bytes =
      staged != object.stripes.end() || object.base_stripe(index, stripe_bytes);
  if (from % stripe_bytes == 0 || !holds_bytes) return {};
  const uint64_t end = std::min(to, (index + 1) * stripe_bytes);
  std::vector<std::byte> zeros(std::min<uint64_t>(end - from, kMiB));
  for (uint64_t at = from; at < end;) {
    const size_t piece = std::min<uint64_t>(zeros.size(), end - at);
    STOKER_TRY(write_locked(key, object, at, {zeros.data(), piece, -1}, Priority::write_back));
    at += piece;
  }
  return {};
}

Status StagedTransaction::require(std::string_view key, std::string_view tag) {
  std::lock_guard lock(state_->mutex);
  if (state_->done)
    return make_error(Code::invalid_argument, "the transaction is already committed: begin another",
                      kWhere);
  state_->required.insert_or_assign(std::string(key), std::string(tag));
  return {};
}

Future<void> StagedTransaction::write(std::string_view key, uint64_t offset, Slice from,
                                      Priority priority) {
  std::lock_guard lock(state_->mutex);
  const auto status = [&]() -> Status {
    STOKER_ASSIGN(StagedObject * object, own(key));
    if (!object->exists) return no_object(key);
    if (offset > object->bytes || from.size > object->bytes - offset) {
      return make_error(Code::invalid_argument,
                        "bytes " + std::to_string(offset) + " to " +
                            std::to_string(offset + from.size) + " are beyond the end of '" +
                            std::string(key) + "', which has " + std::to_string(object->bytes) +
                            "; resize it first",
                        kWhere);
    }
    object->wrote(offset, from.size);
    return write_locked(key, *object, offset, from, priority);
  }();
  if (!status && !state_->failed && !state_->done) state_->failed = status.error();
  return status;
}

Result<StagedStripe*> StagedTransaction::stage_stripe(StagedObject& object, size_t index) {
  if (const auto at = object.stripes.find(index); at != object.stripes.end()) return &at->second;
  StagedStripe stripe;
  stripe.base = object.base_stripe(index, store_.shape_.stripe_bytes());
  if (!stripe.base) {
    STOKER_ASSIGN(stripe.fresh, store_.make_stripe(object.expected));
  }
  return &object.stripes.emplace(index, std::move(stripe)).first->second;
}

Status StagedTransaction::write_locked(std::string_view key, StagedObject& object, uint64_t offset,
                                       Slice from, Priority priority) {
  const Shape& shape = store_.shape_;
  for (size_t moved = 0; moved < from.size;) {
    const uint64_t at = offset + moved;
    const size_t index = at / shape.stripe_bytes();
    const uint64_t in_stripe = at % shape.stripe_bytes();
    const size_t piece = std::min<uint64_t>(kBlock - at % kBlock, from.size - moved);
    STOKER_ASSIGN(StagedStripe * stripe, stage_stripe(object, index));
    const size_t before = stripe->blocks;
    if (const Status staged =
            stage_block(object, *stripe, index, in_stripe, from.sub(moved, piece), priority);
        !staged)
      return staged.error().with("'" + std::string(key) + "'");
    if (!stripe->fresh) {
      state_->log_bytes += (stripe->blocks - before) * kBlock;
      // Most of it is new, or the log would be flooded: the stripe is written anew. (The commit may
      // do so with others; they have their room in the log.)
      if (2 * stripe->blocks > shape.k * shape.rows() ||
          state_->log_bytes > shape.segment_bytes / 4) {
        STOKER_ASSIGN(stripe->fresh, store_.make_stripe(object.expected));
        state_->log_bytes -= stripe->blocks * kBlock;
      }
    }
    moved += piece;
  }
  return {};
}

// At most one block. A part of one is merged with what was there.
Status StagedTransaction::stage_block(const StagedObject& object, StagedStripe& stripe,
                                      size_t index, uint64_t in_stripe, Slice from,
                                      Priority priority) {
  const Shape& shape = store_.shape_;
  StagedChunk& chunk = stripe.chunks[in_stripe / shape.chunk_bytes];
  if (chunk.rows.empty()) {
    chunk.bytes = AlignedBytes(shape.chunk_bytes);
    chunk.rows.resize(shape.rows());
  }
  const size_t in_chunk = in_stripe % shape.chunk_bytes;
  const size_t row = in_chunk / kBlock;
  std::byte* block = chunk.bytes.data() + row * kBlock;
  if (!chunk.rows[row]) {
    if (state_->grants.empty() || stripe.blocks % 256 == 0) {
      STOKER_ASSIGN(Grant grant, store_.runtime_.budget.take(
                                     std::min<uint64_t>(256 * kBlock, shape.stripe_bytes()),
                                     "what a transaction of a coded store has written"));
      state_->grants.push_back(std::move(grant));
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
  const uint64_t at = index * store_.shape_.stripe_bytes() + block * kBlock;
  if (at >= object.kept) return {};
  STOKER_TRY(store_.read_now("", object.base, at, {into, kBlock, -1}, priority));
  // Bytes behind the end have no meaning.
  if (object.kept - at < kBlock)
    std::memset(into + (object.kept - at), 0, kBlock - (object.kept - at));
  return {};
}

Status StagedTransaction::remove(std::string_view key) {
  std::lock_guard lock(state_->mutex);
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
  std::lock_guard lock(state_->mutex);
  STOKER_ASSIGN(StagedObject * object, own(key));
  if (!object->exists) return no_object(key);
  object->expected = expected;
  object->stated = true;
  return {};
}

Future<void> StagedTransaction::read(std::string_view key, uint64_t offset, Slice into,
                                     ReadOptions options) {
  if (!options.snapshot.empty()) return store_.read(key, offset, into, options);
  std::lock_guard lock(state_->mutex);
  const auto at = state_->objects.find(key);
  if (at == state_->objects.end()) return store_.read(key, offset, into, options);
  const StagedObject& object = at->second;
  if (!object.exists) return no_object(key);
  if (offset > object.bytes || into.size > object.bytes - offset) {
    return make_error(Code::invalid_argument,
                      "bytes " + std::to_string(offset) + " to " +
                          std::to_string(offset + into.size) + " are beyond the end of '" +
                          std::string(key) + "', which has " + std::to_string(object.bytes),
                      kWhere);
  }
  return read_locked(key, object, offset, into, options.priority);
}

// The committed bytes that the transaction kept, then over them its own.
Status StagedTransaction::read_locked(std::string_view key, const StagedObject& object,
                                      uint64_t offset, Slice into, Priority priority) {
  const Shape& shape = store_.shape_;
  const uint64_t kept = object.base && !object.made && object.kept > offset
                            ? std::min<uint64_t>(object.kept - offset, into.size)
                            : 0;
  if (kept > 0) STOKER_TRY(store_.read_now(key, object.base, offset, into.sub(0, kept), priority));
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
    std::lock_guard lock(state_->mutex);
    if (state_->done)
      return make_error(Code::invalid_argument,
                        "the transaction is already committed: begin another", kWhere);
    state_->done = true;
    failed = state_->failed;
    std::lock_guard store_lock(store_.mutex_);
    if (!failed && store_.refused_) failed = store_.refused_;
    if (failed) {
      for (const auto& [key, object] : state_->objects) store_.owned_.erase(key);
    }
  }
  if (failed) return *failed;
  CodedStore::Request request;
  request.state = state_;
  Future<Version> future = request.committed.future();
  store_.used();
  std::lock_guard lock(store_.queue_mutex_);
  store_.queue_.push_back(std::move(request));
  store_.queued_.notify_all();
  return future;
}

}  // namespace stoker::coded
