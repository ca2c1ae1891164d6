// LocalStore: parts of chunks. The worker reads and verifies the old chunk once, lays the parts
// over it in memory, and writes it to a fresh extent when the chunk is sealed.
#include <algorithm>
#include <cstring>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"
#include "stoker/store/local/local_store.h"

namespace stoker::local {
namespace {

constexpr size_t kOpenPartials = 4;  // of a transaction: each holds a chunk in memory

}  // namespace

// `promise` is taken when the status is good, and completes when `from` was copied;
// else nothing has changed.
Status LocalStore::write_partial(const StatePtr& state, StagedObject& object, std::string_view key,
                                 uint32_t index, uint32_t at, Slice from, Promise<void>& promise) {
  STOKER_CHECK(state->phase == TransactionState::Phase::open);
  STOKER_CHECK(at + from.size <= object.length_of(index));
  auto& place = object.chunks[index];
  const bool open =
      place && place->partial && !place->partial->sealed && at + from.size <= place->partial->bytes;
  if (!open) {
    auto node = std::make_shared<StagedChunk>();
    node->partial = std::make_unique<Partial>();
    Partial& partial = *node->partial;
    partial.key = key;
    partial.index = index;
    partial.bytes = object.length_of(index);
    ByVolume given{};
    const auto extent =
        allocate(object, partial.bytes, object.bytes - object.chunk_at(index), given);
    if (!extent) {
      if (!place) object.chunks.erase(index);
      return extent.error();
    }
    node->chunk.place = extent->place;
    node->chunk.stored = node->chunk.valid = partial.bytes;
    state->touched |= uint64_t{1} << volume_of(extent->place);
    if (place) {
      if (place->partial && !place->partial->sealed) seal(state, place);
      partial.base_node = place;  // dropped once it was read
    } else {
      partial.base = base_chunk(object, key, index);
    }
    place = node;
    state->partials.push_back(node);
    seal_some(state);
  }
  const std::shared_ptr<StagedChunk> node = object.chunks[index];
  STOKER_CHECK(node->partial && !node->partial->sealed);
  node->partial->patches.push_back({at, from, std::move(promise)});
  schedule(state, node);
  return {};
}

// The oldest open partials go to disk: all but a few, which take at most half of
// what the budget would have left without them. Reads and writes of others need memory too.
void LocalStore::seal_some(const StatePtr& state) {
  auto& open = state->partials;
  uint64_t bytes = 0, granted = 0;
  for (const auto& node : open) {
    bytes += node->partial->bytes;
    if (node->partial->loaded) granted += node->partial->bytes;
  }
  STOKER_CHECK(runtime_.budget.used() <= runtime_.budget.cap());
  const uint64_t most = (runtime_.budget.cap() - runtime_.budget.used() + granted) / 2;
  while (open.size() > 1 && (open.size() > kOpenPartials || bytes > most)) {
    bytes -= open.front()->partial->bytes;
    seal(state, std::shared_ptr<StagedChunk>(open.front()));
  }
}

// Takes no more parts and goes to disk.
void LocalStore::seal(const StatePtr& state, const std::shared_ptr<StagedChunk>& node) {
  STOKER_CHECK(node->partial && !node->partial->sealed && !node->dropped);
  node->partial->sealed = true;
  ++state->pending;
  STOKER_CHECK(std::erase(state->partials, node) == 1);
  schedule(state, node);
}

void LocalStore::schedule(const StatePtr& state, const std::shared_ptr<StagedChunk>& node) {
  if (std::exchange(node->partial->scheduled, true)) return;
  ++in_flight_;
  worker_.run([this, state, node] { work_on(state, node); });
}

void LocalStore::work_on(const StatePtr& state, const std::shared_ptr<StagedChunk>& node) {
  STOKER_CHECK(worker_.here() && node->partial);
  if (wait_for_base(state, node)) return;
  Status status = lay_over(*node);
  bool wanted = false;
  {
    MutexLock lock(mutex_);
    Partial& partial = *node->partial;
    STOKER_CHECK(partial.scheduled && node->state == StagedChunk::State::pending);
    if (status && !node->dropped && !partial.patches.empty()) {  // more came meanwhile
      worker_.run([this, state, node] { work_on(state, node); });
      return;
    }
    if (status && !node->dropped && !partial.sealed) {  // stays open
      partial.scheduled = false;
      ended();
      return;
    }
    wanted = !node->dropped;
  }
  if (status && wanted) status = write_out(*node);
  end_partial(state, node, status);
}

// True: the staged chunk under this one is still being written; the worker comes back when it is
// done.
bool LocalStore::wait_for_base(const StatePtr& state, const std::shared_ptr<StagedChunk>& node) {
  MutexLock lock(mutex_);
  const auto& base = node->partial->base_node;
  if (node->partial->loaded || !base || base->state != StagedChunk::State::pending) return false;
  base->waiters.push_back(
      [this, state, node] { worker_.run([this, state, node] { work_on(state, node); }); });
  return true;
}

// Brings the old bytes and copies the parts that came since.
Status LocalStore::lay_over(StagedChunk& node) {
  Partial& partial = *node.partial;
  std::vector<Partial::Patch> patches;
  bool needed = true;
  {
    MutexLock lock(mutex_);
    patches.swap(partial.patches);
    needed = !node.dropped;
  }
  Status status;
  if (needed && !partial.loaded) status = load_partial(partial);
  for (Partial::Patch& patch : patches) {
    if (needed && status) {
      STOKER_CHECK(partial.loaded && patch.at + patch.from.size <= partial.bytes);
      std::memcpy(partial.buffer.data() + patch.at, patch.from.data, patch.from.size);
    }
    patch.promise.complete(status);
  }
  return status;
}

Status LocalStore::load_partial(Partial& partial) {
  Chunk base = partial.base;
  {
    MutexLock lock(mutex_);
    STOKER_CHECK(!partial.loaded);
    if (partial.base_node) {
      STOKER_CHECK(partial.base_node->state != StagedChunk::State::pending);
      if (partial.base_node->state == StagedChunk::State::failed)
        return fail(Code::io,
                    "an earlier write of chunk {} of '{}' failed; begin the transaction again",
                    partial.index, partial.key);
      base = partial.base_node->chunk;
    }
  }
  const size_t bytes = align_up(std::max(partial.bytes, base.sparse() ? 0 : base.stored), kBlock);
  STOKER_ASSIGN(partial.grant,
                runtime_.budget.take(bytes, "writing a part of a chunk of '" + partial.key + "'"));
  partial.buffer = AlignedBytes(bytes);
  if (base.sparse()) {
    std::memset(partial.buffer.data(), 0, bytes);
  } else {
    STOKER_TRY(read_chunk(partial.key, partial.index, base, partial.buffer.slice()));
  }
  MutexLock lock(mutex_);
  partial.loaded = true;
  if (partial.base_node) drop_node(std::exchange(partial.base_node, nullptr));
  return {};
}

Status LocalStore::write_out(StagedChunk& node) {
  const Partial& partial = *node.partial;
  STOKER_CHECK(partial.loaded && partial.bytes <= partial.buffer.size());
  std::memset(partial.buffer.data() + partial.bytes, 0, partial.buffer.size() - partial.bytes);
  const uint32_t crc = crc32c(partial.buffer.data(), partial.bytes);
  const Extent extent = node.chunk.extent();
  const size_t volume = volume_of(extent.place), bytes = extent.blocks * kBlock;
  IoBatch batch(runtime_.loop, Priority::write_back);
  batch.write(volumes_[volume].file.id, block_of(extent.place) * kBlock,
              partial.buffer.slice().sub(0, bytes));
  loads_[volume].begin(bytes);
  const Clock& clock = runtime_.loop.clock();
  const uint64_t from_ns = clock.now_ns();
  const Status status = batch.run();
  if (status)
    loads_[volume].end(bytes, from_ns, clock.now_ns(), false);
  else
    loads_[volume].take_back(bytes);
  if (!status)
    return status.error().with("writing chunk " + std::to_string(partial.index) + " of '" +
                               partial.key + "'");
  MutexLock lock(mutex_);
  node.chunk.crc = crc;
  return {};
}

void LocalStore::end_partial(const StatePtr& state, const std::shared_ptr<StagedChunk>& node,
                             const Status& status) {
  Jobs run;
  std::vector<Partial::Patch> late;
  {
    MutexLock lock(mutex_);
    Partial& partial = *node->partial;
    late.swap(partial.patches);
    if (partial.base_node) drop_node(partial.base_node);
    std::erase(state->partials, node);
    const bool sealed = partial.sealed;
    settle_node(*node, status, run);
    if (sealed) {
      write_settled(state, status);
    } else if (!status && !state->error) {
      state->error = status.error();
    }
  }
  for (Partial::Patch& patch : late) patch.promise.complete(status);
  for (auto& job : run) job();
  MutexLock lock(mutex_);
  ended();
}

}  // namespace stoker::local
