// Flights: what the engine has in its hands, in ops that belong to the Loop, so that a caller can
// be answered before its disk is.
//
// A transfer cannot be taken back from the kernel. When a disk stops answering, the Loop gives a
// flight up: the caller's Op ends with an error, and the flight stays behind, an orphan, until the
// engine completes it, if it ever does. Used on the Loop's thread only.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "stoker/io/op.h"

namespace stoker {

class Flights {
 public:
  // At most `size` at a time, orphans included.
  explicit Flights(size_t size) : flights_(size) {
    free_.reserve(size);
    for (Flight& flight : flights_) free_.push_back(&flight);
  }

  bool room() const { return !free_.empty(); }
  size_t orphans() const { return orphans_; }

  // The op for the engine: the same transfer as the caller's. Its done() must call landed().
  Op& launch(Op& caller, void (*done)(Op&) noexcept, void* holder) {
    Flight& flight = *free_.back();
    free_.pop_back();
    flight.op = caller;
    flight.op.done = done;
    flight.op.holder = holder;
    flight.op.context = &flight;
    flight.caller = &caller;
    return flight.op;
  }

  // Its engine is done with it. The caller's Op with the outcome, or null if that was given up long
  // ago.
  Op* landed(Op& op) {
    Flight& flight = *static_cast<Flight*>(op.context);
    Op* caller = flight.caller;
    if (caller != nullptr) {
      caller->result = std::move(op.result);
    } else {
      --orphans_;
    }
    flight.caller = nullptr;
    free_.push_back(&flight);
    return caller;
  }

  // Whom the flight serves.
  static Op& caller(const Op& op) { return *static_cast<Flight*>(op.context)->caller; }

  // Leaves the flight behind; its caller's Op is then to be ended.
  void orphan(Op& op) {
    ++orphans_;
    static_cast<Flight*>(op.context)->caller = nullptr;
  }

  // Each flight whose caller still waits; `visit` may orphan it.
  template <typename Visit>
  void each(Visit visit) {
    for (Flight& flight : flights_) {
      if (flight.caller != nullptr) visit(flight.op);
    }
  }

 private:
  struct Flight {
    Op op;
    Op* caller = nullptr;
  };
  std::vector<Flight> flights_;  // never moves
  std::vector<Flight*> free_;
  size_t orphans_ = 0;
};

}  // namespace stoker
