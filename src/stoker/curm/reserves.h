// Reserves: private log segments of hot stripes, whose size follows what each stripe is measured to be updated with.
//
// Updates are counted in windows. A stripe that took a unit or more in two windows in a row is given what it takes in four, up to a limit, and more when
// it takes more. One that took less than a quarter of a unit in four windows in a row gets half of what it has, in the end nothing; what
// is used is kept until the stripe is folded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

namespace stoker::curm {

class Reserves {
 public:
  struct Limits {
    uint64_t window_bytes = 4 << 20;  // of updates, of all stripes
    uint64_t unit_bytes = 64 << 10, stripe_bytes = 256 << 10;
  };
  explicit Reserves(const Limits& limits) : limits_(limits) {}

  // An update of the stripe, with its framing. Whether its records go to the stripe's own segment.
  bool take(uint64_t stripe, uint64_t bytes);
  // The stripe was folded: nothing in its segment is needed.
  void folded(uint64_t stripe);

  uint64_t bytes(uint64_t stripe) const;
  uint64_t bytes() const { return bytes_; }
  uint64_t peak_bytes() const { return peak_; }

 private:
  struct Segment {
    uint64_t size = 0, used = 0, taken = 0;  // taken: in this window
    int hot = 0, calm = 0;                   // windows in a row
  };
  void close_window();
  void resize(Segment& segment, uint64_t size);

  const Limits limits_;
  std::map<uint64_t, Segment> segments_;
  uint64_t window_ = 0, bytes_ = 0, peak_ = 0;
};

}  // namespace stoker::curm
