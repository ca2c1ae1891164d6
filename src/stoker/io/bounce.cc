#include "stoker/io/bounce.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "stoker/base/bytes.h"

namespace stoker {

Bounce::~Bounce() {
  for (Lane& lane : lanes_) {
    if (lane.memory != nullptr) munmap(lane.memory, kLaneBytes);
  }
}

std::byte* Bounce::map_lane() {
  void* at = mmap(nullptr, kLaneBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
}

Status Bounce::reserve(Budget* budget) {
  if (budget != nullptr) {
    STOKER_ASSIGN(grant_, budget->take(kLanes * kLaneBytes, "the bounce memory of the I/O loop"));
  }
  for (Lane& lane : lanes_) {
    lane.owner = this;
    lane.memory = map_lane();
    if (lane.memory == nullptr)
      return fail(errno, "cannot allocate the bounce buffers of the I/O loop");
  }
  return {};
}

bool Bounce::needed(const Op& op) {
  return (op.kind == Op::Kind::read || op.kind == Op::Kind::write) &&
         !is_aligned(reinterpret_cast<uintptr_t>(op.bytes.data), kIoAlign);
}

void Bounce::add(Op& op) {
  ++ops_;
  op.moved = 0;
  waiting_.push(op);
}

Op* Bounce::next_piece() {
  if (waiting_.empty() || lanes_busy_ == kLanes) return nullptr;
  Lane& lane = *std::find_if(lanes_.begin(), lanes_.end(),
                             [](const Lane& each) { return each.op == nullptr; });
  lane.op = waiting_.pop();
  ++lanes_busy_;
  prepare(lane);
  return &lane.piece;
}

bool Bounce::keep_back(Op& piece) {
  std::byte* fresh = map_lane();
  // the old memory stays mapped until the process ends
  if (fresh != nullptr) static_cast<Lane*>(piece.context)->memory = fresh;
  return fresh != nullptr;
}

// The piece that starts at op.moved. An offset or size off the alignment is left to the engine to
// refuse.
void Bounce::prepare(Lane& lane) {
  const Op& op = *lane.op;
  lane.piece = Op{};
  lane.piece.kind = op.kind;
  lane.piece.priority = op.priority;
  lane.piece.file = op.file;
  lane.piece.offset = op.offset + op.moved;
  lane.piece.bytes = Slice{lane.memory, std::min(op.bytes.size - op.moved, kLaneBytes), -1};
  lane.piece.done = &Bounce::piece_done;
  lane.piece.context = &lane;
  if (op.kind == Op::Kind::write)
    std::memcpy(lane.memory, op.bytes.data + op.moved, lane.piece.bytes.size);
}

void Bounce::piece_done(Op& piece) noexcept {
  Lane& lane = *static_cast<Lane*>(piece.context);
  Bounce& self = *lane.owner;
  Op& op = *std::exchange(lane.op, nullptr);
  --self.lanes_busy_;
  if (!piece.result) {
    op.result = piece.result.error();
    return self.finish(op);
  }
  if (op.kind == Op::Kind::read)
    std::memcpy(op.bytes.data + op.moved, lane.memory, piece.bytes.size);
  op.moved += piece.bytes.size;
  if (op.moved < op.bytes.size) return self.waiting_.push(op);
  op.result = op.bytes.size;
  self.finish(op);
}

void Bounce::finish(Op& op) {
  --ops_;
  op.done(op);  // may destroy or resubmit the op
}

}  // namespace stoker
