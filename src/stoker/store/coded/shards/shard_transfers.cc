#include "stoker/store/coded/shards/shard_transfers.h"

#include <array>
#include <chrono>
#include <deque>
#include <thread>
#include <utility>

#include "stoker/base/check.h"

namespace stoker::coded {

// Owned by whoever waits, and by itself as long as anything is under way.
struct ShardTransfers::State {
  struct Each {
    State* state = nullptr;
    size_t shard = 0, index = 0;
    bool write = false;
    ShardRead read = {};
    ShardPut put = {};
    const Status& status() const { return write ? put.status : read.status; }
  };
  Stragglers* stragglers = nullptr;  // of the Shards, which wait for them before they go
  std::shared_ptr<const void> memory;
  std::deque<Each> each;  // do not move

  Mutex mutex;
  CondVar changed;
  std::vector<size_t> ended GUARDED_BY(mutex);  // and not told; has room for all
  std::array<size_t, kShardsMax> under_way GUARDED_BY(mutex){};
  size_t left GUARDED_BY(mutex) = 0;              // of these
  bool behind GUARDED_BY(mutex) = false;          // nobody waits for them
  std::shared_ptr<State> self GUARDED_BY(mutex);  // while any is left
};

ShardTransfers::ShardTransfers(Shards& shards, Priority priority,
                               std::shared_ptr<const void> memory)
    : shards_(shards), priority_(priority), state_(std::make_shared<State>()) {
  state_->stragglers = &shards.stragglers();
  state_->memory = std::move(memory);
}

ShardTransfers::~ShardTransfers() {
  State& state = *state_;
  std::shared_ptr<const void> memory;  // outlives the lock
  MutexLock lock(state.mutex);
  if (!state.memory)
    state.changed.wait(lock, [&]() REQUIRES(state.mutex) { return state.left == 0; });
  state.behind = state.left > 0;
  // the Loop may hold the state for a moment yet: not what is to be used again
  if (!state.behind) memory = std::move(state.memory);
  for (size_t shard = 0; shard < state.under_way.size(); ++shard) {
    if (state.under_way[shard] > 0) state.stragglers->left(shard);
  }
}

size_t ShardTransfers::add(bool write, size_t shard, uint64_t offset, Slice bytes) {
  STOKER_CHECK(shards_[shard].present() && ended() && !(write && state_->memory));
  State::Each& each = state_->each.emplace_back();
  each.state = state_.get();
  each.shard = shard;
  each.index = state_->each.size() - 1;
  each.write = write;
  if (write) {
    each.put.priority = priority_;
    each.put.fence = shards_.fence();
    each.put.waves = {{{offset, bytes}}};
    each.put.done = &ShardTransfers::on_done<ShardPut>;
    each.put.context = &each;
  } else {
    each.read.priority = priority_;
    each.read.offset = offset;
    each.read.into = bytes;
    each.read.done = &ShardTransfers::on_done<ShardRead>;
    each.read.context = &each;
  }
  return each.index;
}

bool ShardTransfers::empty() const { return state_->each.empty(); }

void ShardTransfers::start() {
  State& state = *state_;
  if (state.each.empty()) return;
  {
    const MutexLock lock(state.mutex);
    STOKER_CHECK(state.left == 0 && !state.self);
    state.ended.reserve(state.each.size());
    for (const State::Each& each : state.each) ++state.under_way[each.shard];
    state.left = state.each.size();
    state.self = state_;
  }
  Plug plug(shards_.loop());
  for (State::Each& each : state.each) {
    Shard& shard = *shards_[each.shard].shard;
    if (each.write) {
      shard.put(each.put, plug);
    } else {
      shard.read(each.read, plug);
    }
  }
}

template <typename Request>
void ShardTransfers::on_done(Request& request) noexcept {
  const auto& each = *static_cast<State::Each*>(request.context);
  ended(*each.state, each.index);
}

// On a thread of the shard's. The last one takes the memory with it if nobody waits: that frees a
// piece of the heap and gives a grant back, and waits for nothing.
void ShardTransfers::ended(State& state, size_t index) noexcept {
  Stragglers* const stragglers = state.stragglers;
  const size_t shard = state.each[index].shard;
  bool came = false;
  std::shared_ptr<State> last;  // outlives the lock
  {
    const MutexLock lock(state.mutex);
    STOKER_CHECK(state.left > 0 && state.under_way[shard] > 0);
    state.ended.push_back(index);
    came = --state.under_way[shard] == 0 && state.behind;
    if (--state.left == 0) last = std::move(state.self);
    state.changed.notify_all();
  }
  last.reset();  // before it is told that it came: whoever waits for that wants the memory
  if (came) stragglers->came(shard);
}

std::vector<size_t> ShardTransfers::next() {
  State& state = *state_;
  MutexLock lock(state.mutex);
  state.changed.wait(
      lock, [&]() REQUIRES(state.mutex) { return !state.ended.empty() || state.left == 0; });
  std::vector<size_t> told(state.ended.begin(), state.ended.end());
  state.ended.clear();
  return told;
}

bool ShardTransfers::ended() const {
  const MutexLock lock(state_->mutex);
  return state_->left == 0;
}

const Status& ShardTransfers::result(size_t index) const {
  STOKER_CHECK(index < state_->each.size());
  return state_->each[index].status();
}

std::string ShardTransfers::finish() {
  State& state = *state_;
  {
    MutexLock lock(state.mutex);
    state.changed.wait(lock, [&]() REQUIRES(state.mutex) { return state.left == 0; });
  }
  for (const State::Each& each : state.each) {
    if (!each.status() && each.status().error().code == Code::conflict) shards_.note_outdone();
  }
  for (const State::Each& each : state.each) {
    if (!each.status())
      return "'" + shards_[each.shard].path + "': " + each.status().error().message();
  }
  return {};
}

void Stragglers::left(size_t shard) {
  STOKER_CHECK(shard < kShardsMax);
  const MutexLock lock(mutex_);
  ++batches_[shard];
  ++all_;
}

void Stragglers::came(size_t shard) {
  // held while notifying: the waiter may destroy us as soon as it has the lock
  const MutexLock lock(mutex_);
  STOKER_CHECK(batches_[shard] > 0 && all_ > 0);
  --batches_[shard];
  --all_;
  ++arrivals_;
  came_.notify_all();
}

ShardSet Stragglers::lagging() const {
  const MutexLock lock(mutex_);
  ShardSet set = 0;
  for (size_t shard = 0; shard < batches_.size(); ++shard)
    set |= batches_[shard] > 1 ? shard_bit(shard) : 0;
  return set;
}

bool Stragglers::await() {
  MutexLock lock(mutex_);
  if (all_ == 0) return false;
  came_.wait(lock, [this, before = arrivals_]() REQUIRES(mutex_) { return arrivals_ != before; });
  return true;
}

}  // namespace stoker::coded
