// Reserves: room in the logs for hot stripes, for each as much as it is measured to be updated
// with.
//
// Updates are counted in windows. A stripe that took a unit or more in two windows in a row is
// given what it takes in four, up to a limit, and more when it takes more. One that took less than
// a quarter of a unit in four windows in a row keeps half of what it has, in the end nothing.
#pragma once

#include <cstdint>
#include <map>

namespace stoker::curm {

class Reserves {
 public:
  struct Limits {
    uint64_t window_bytes = 0;  // of updates, of all stripes
    uint64_t unit_bytes = 0, stripe_bytes = 0;
  };
  explicit Reserves(const Limits& limits) : limits_(limits) {}

  // An update of the stripe. One that may not have a reserve only lets time go by.
  void take(uint64_t stripe, uint64_t bytes, bool may_have);

  uint64_t bytes(uint64_t stripe) const;
  uint64_t bytes() const { return bytes_; }
  uint64_t peak_bytes() const { return peak_; }
  template <typename Visit>
  void each(Visit visit) const {  // those that there are: stripe, bytes
    for (const auto& [stripe, room] : rooms_) {
      if (room.size != 0) visit(stripe, room.size);
    }
  }

 private:
  struct Room {
    uint64_t size = 0, taken = 0;  // taken: in this window
    int hot = 0, calm = 0;         // windows in a row
  };
  void close_window();
  void measure(Room& room);
  void resize(Room& room, uint64_t size);

  const Limits limits_;
  std::map<uint64_t, Room> rooms_;  // of stripes that have one, or may be about to
  uint64_t window_ = 0, bytes_ = 0, peak_ = 0;
};

}  // namespace stoker::curm
