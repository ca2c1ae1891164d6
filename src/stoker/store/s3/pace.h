// Pace: how many requests are in flight at once, and which are worth a second one beside them. It
// learns from the waits for first bytes and from what the server says. Knows no clock, no thread
// and no request: the Client tells it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace stoker::s3 {

class Pace {
 public:
  // Whether one more may be in flight beside so many; the first always may.
  bool admits(size_t in_flight) const {
    return in_flight == 0 || static_cast<double>(in_flight) < window_;
  }
  void well(uint64_t now_ns);     // a request was done
  void refused(uint64_t now_ns);  // the server wants fewer, or no answer came

  // The first byte came after so long; of requests that could be hedged.
  void waited(uint64_t wait_ns);
  // A request that could be hedged begins. The 95th percentile of waits; nothing while too few are
  // known.
  std::optional<uint64_t> usual_ns();
  // A second request, if one in fifty is not used up.
  bool take_hedge();

 private:
  bool crowded() const;

  double window_ = 16;  // requests in flight
  uint64_t cut_at_ns_ = 0;
  std::vector<uint64_t> waits_ns_;  // the last ones, in a ring
  size_t next_wait_ = 0;
  uint64_t recent_wait_ns_ = 0;  // a mean in which the last ones weigh most
  double hedges_ = 0;            // that may begin: each request adds its share
};

}  // namespace stoker::s3
