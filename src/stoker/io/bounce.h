// Bounce: the one path for memory that is not aligned. A few lanes of aligned memory carry such an
// Op piece by piece.
//
// Owned by the Loop and used on its thread only. A piece is an Op of the lane's own that goes to
// the engine like any other. The copies run on the Loop's thread, 256 KiB at a time, so a caller
// that cares about speed brings aligned memory.
#pragma once

#include <array>
#include <cstddef>

#include "stoker/io/op.h"
#include "stoker/io/op_list.h"
#include "stoker/memory/budget.h"

namespace stoker {

class Bounce {
 public:
  static constexpr size_t kLanes = 4;
  static constexpr size_t kLaneBytes = 256 << 10;

  Bounce() = default;
  ~Bounce();
  Bounce(const Bounce&) = delete;
  Bounce& operator=(const Bounce&) = delete;

  // Reserves the lanes' memory (touched only when used), drawn on `budget` if there is one.
  Status reserve(Budget* budget);

  static bool needed(const Op& op);
  // Takes the op over; its done() runs once all pieces are through. Not while full(), so that the
  // Scheduler's order holds.
  void add(Op& op);
  bool full() const { return ops_ == 2 * kLanes; }
  bool idle() const { return ops_ == 0; }
  // The next piece to hand to the engine, or null: nothing waits, or all lanes are on their way.
  Op* next_piece();
  // The piece will never be done by its disk: its lane gets other memory. False: there is none.
  static bool keep_back(Op& piece);
  static bool is_piece(const Op& op) { return op.done == &Bounce::piece_done; }

 private:
  struct Lane {
    Op piece;
    Op* op = nullptr;  // whom it serves; null: free
    std::byte* memory = nullptr;
    Bounce* owner = nullptr;
  };
  static void piece_done(Op& piece) noexcept;
  static std::byte* map_lane();
  static void prepare(Lane& lane);
  void finish(Op& op);

  std::array<Lane, kLanes> lanes_;
  size_t lanes_busy_ = 0;
  size_t ops_ = 0;  // taken over and not finished
  // for a lane: new ones, and each again after every piece, so that a large op does not block a
  // small one
  OpList waiting_;
  Grant grant_;
};

}  // namespace stoker
