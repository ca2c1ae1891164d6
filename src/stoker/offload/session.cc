#include "stoker/offload/session.h"

#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/base/check.h"

namespace stoker::offload {
namespace {

Error bad(const std::string& what) { return fail(Code::invalid_argument, "{}", what); }

std::string wrong_size(const BlockLayout& layout, size_t given) {
  return "the weights of block " + layout.name() + " have " +
         std::to_string(layout.plane_bytes(Plane::weight)) + " bytes, but the memory given has " +
         std::to_string(given);
}

Status check_segment(const BlockLayout& layout, const Segment& segment, uint64_t free_from) {
  const std::string who =
      "parameter " + std::to_string(segment.parameter) + " of block " + layout.name();
  if (segment.count == 0 || segment.grad == nullptr) return bad(who + " has no gradient");
  if (segment.offset < free_from)
    return bad(who + " overlaps the one before, or the segments are not sorted");
  if (segment.offset > layout.elements() || segment.count > layout.elements() - segment.offset)
    return bad(who + " reaches beyond the block");
  if (layout.moments() == optim::MomentType::q8 && segment.offset % optim::kMomentGroup != 0) {
    return bad(who +
               " begins inside a group of 8-bit moments: give each parameter an offset that is a "
               "multiple of " +
               std::to_string(optim::kMomentGroup));
  }
  if ((optim::uses_m(segment.hyper) && !layout.has(Plane::m)) ||
      (optim::uses_v(segment.hyper) && !layout.has(Plane::v))) {
    return bad(who + " needs optimizer state that the block was declared without");
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Session>> Session::make(Store& store, const Runtime& runtime, Arena& arena,
                                               SessionOptions options) {
  const Features features = store.features();
  if (features.atomic != AtomicUnit::transaction || !features.update) {
    return fail(
        Code::unsupported,
        "training needs a store with transactions and updates in place, such as local: or memory:");
  }
  if (options.tiles == 0) return bad("a session needs at least one tile memory");
  // checks tile_elements
  STOKER_TRY(BlockLayout::make({.name = "tile", .elements = 1, .moments = options.moments},
                               options.tile_elements));
  std::vector<Buffer> memory;
  for (uint32_t i = 0; i < options.tiles; ++i) {
    auto buffer = arena.take(tile_memory_bytes(options.tile_elements, options.moments));
    if (!buffer)
      return buffer.error().with("tile memory " + std::to_string(i + 1) + " of " +
                                 std::to_string(options.tiles));
    memory.push_back(std::move(*buffer));
  }
  std::unique_ptr<Session> session(new Session(store, runtime, arena, options));
  session->updater_ = std::make_unique<Updater>(store, runtime.pool, session->traffic_,
                                                std::move(memory), options.seed);
  return session;
}

Session::~Session() {
  updater_->close();
  MutexLock lock(mutex_);
  idle_.wait(lock, [this]() REQUIRES(mutex_) { return transfers_ == 0; });
}

void Session::begin_transfer() {
  MutexLock lock(mutex_);
  ++transfers_;
}

void Session::end_transfer() {
  MutexLock lock(mutex_);
  STOKER_CHECK(transfers_ > 0);
  if (--transfers_ == 0) idle_.notify_all();
}

Result<BlockId> Session::add_block(BlockSpec spec) {
  spec.moments = options_.moments;
  STOKER_ASSIGN(BlockLayout layout, BlockLayout::make(std::move(spec), options_.tile_elements));
  MutexLock lock(mutex_);
  for (const auto& block : blocks_) {
    if (block->layout.name() == layout.name())
      return bad("there is a block " + layout.name() + " already");
  }
  blocks_.push_back(std::make_unique<Block>(std::move(layout)));
  return static_cast<BlockId>(blocks_.size() - 1);
}

Result<Block*> Session::find(BlockId block) const {
  MutexLock lock(mutex_);
  if (block >= blocks_.size())
    return bad("there is no block " + std::to_string(block) + " in this session");
  return blocks_[block].get();
}

Result<const BlockLayout*> Session::layout(BlockId block) const {
  STOKER_ASSIGN(const Block* found, find(block));
  return &found->layout;
}

Future<void> Session::fetch_weights(BlockId block, Slice into, Priority priority,
                                    StepTransaction* source) {
  const auto found = find(block);
  if (!found) return found.error();
  const BlockLayout& layout = (*found)->layout;
  if (into.size != layout.plane_bytes(Plane::weight)) return bad(wrong_size(layout, into.size));
  // Dated, and so ahead of the optimizer state, which is read earlier than it is needed.
  const ReadOptions options{.priority = priority, .deadline_ns = Clock::real().now_ns()};
  const std::string key = layout.key(Plane::weight);
  begin_transfer();
  const auto read = source != nullptr ? source->raw().read(key, 0, into, options)
                                      : store_.read(key, 0, into, options);
  return read.then([this, bytes = into.size, name = layout.name()](const Status& status) -> Status {
    Status result = status;
    if (status) {
      traffic_.read(Plane::weight, bytes);
    } else {
      result = status.error().with("block " + name + ", fetching weights");
    }
    end_transfer();
    return result;
  });
}

Future<void> Session::store_weights(BlockId block, Slice from, StepTransaction& transaction) {
  const auto found = find(block);
  if (!found) return found.error();
  const BlockLayout& layout = (*found)->layout;
  if (from.size != layout.plane_bytes(Plane::weight)) return bad(wrong_size(layout, from.size));
  begin_transfer();
  return transaction.raw()
      .write(layout.key(Plane::weight), 0, from)
      .then([this, bytes = from.size](const Status& status) -> Status {
        if (status) traffic_.wrote(Plane::weight, bytes);
        end_transfer();
        return status;
      });
}

Status Session::check(const BlockLayout& layout, const UpdateRequest& request) const {
  if (layout.frozen())
    return bad("block " + layout.name() + " is frozen: it has no state to update");
  if (!request.transaction) return bad("an update needs a transaction to write to");
  for (const Slice& plane : {request.weight_in, request.weight_out}) {
    if (plane.data != nullptr && plane.size != layout.plane_bytes(Plane::weight)) {
      return bad(wrong_size(layout, plane.size));
    }
  }
  uint64_t free_from = 0;
  for (const Segment& segment : request.segments) {
    STOKER_TRY(check_segment(layout, segment, free_from));
    free_from = segment.offset + segment.count;
  }
  return {};
}

Result<std::shared_ptr<UpdateJob>> Session::update(BlockId block, UpdateRequest request) {
  STOKER_ASSIGN(Block * found, find(block));
  STOKER_TRY(check(found->layout, request));
  STOKER_TRY(request.transaction->begin_job());
  if (request.source) request.source->jobs()->hold();
  return updater_->start(*found, std::move(request));
}

Result<size_t> Session::prefetch_state(BlockId block,
                                       const std::shared_ptr<StepTransaction>& source,
                                       bool weights) {
  STOKER_ASSIGN(Block * found, find(block));
  if (found->layout.frozen())
    return bad("block " + found->layout.name() + " is frozen: it has no state");
  return updater_->prefetch(*found, source, weights);
}

Status Session::retain(BlockId block) {
  STOKER_ASSIGN(Block * found, find(block));
  const uint64_t bytes = found->layout.state_bytes();
  if (bytes == 0) return bad("block " + found->layout.name() + " has no state to keep");
  STOKER_ASSIGN(Buffer memory, arena_.take(bytes));
  if (!updater_->retain(*found, std::move(memory))) {
    return fail(Code::busy,
                "block {} is being updated, or its state is kept already; wait for its update",
                found->layout.name());
  }
  MutexLock lock(mutex_);
  retained_bytes_ += bytes;
  return {};
}

Status Session::release(BlockId block) {
  STOKER_ASSIGN(Block * found, find(block));
  if (!updater_->release(*found)) {
    return fail(Code::busy,
                "block {} is being updated, or its state is not kept; wait for its update",
                found->layout.name());
  }
  MutexLock lock(mutex_);
  STOKER_CHECK(retained_bytes_ >= found->layout.state_bytes());
  retained_bytes_ -= found->layout.state_bytes();
  return {};
}

Status Session::invalidate(BlockId block) {
  STOKER_ASSIGN(Block * found, find(block));
  updater_->invalidate(*found);
  return {};
}

uint64_t Session::retained_bytes() const {
  MutexLock lock(mutex_);
  return retained_bytes_;
}

}  // namespace stoker::offload
