// A seeded generator of traces, fitted to statistics of public block traces (which carry no licence
// and are not shipped): shares of writes, sizes, how often and after how long writes repeat earlier
// ones, how much is sequential, how wide they spread.
#pragma once

#include <array>
#include <span>
#include <string_view>

#include "curm/trace.h"

namespace stoker::curm {

struct Profile {
  std::string_view name, like;
  uint64_t requests;
  double write_share;
  double new_share;               // of writes: somewhere new; others repeat an earlier write
  double sequential_share;        // of new ones: where the last new one ended
  uint64_t back_min, back_max;    // how many writes ago that was, log-uniform
  double large_repeat;            // chance that a repeat of a write beyond 16 KiB is taken
  std::array<uint64_t, 8> sizes;  // of new writes, equally likely
  uint64_t span_bytes;            // where they lie, and a few hot regions in it
  uint64_t read_bytes;            // of a read
  double hot_share = 0.5;         // of new writes: in the hot regions
};

// rsrch, hm, wdev, mds, vm, postmark, oltp.
std::span<const Profile> profiles();
// Null for a name that is none of them.
const Profile* find_profile(std::string_view name);
// The same for the same seed, everywhere. 0 requests: as many as the profile says.
Trace generate(const Profile& profile, uint64_t seed, uint64_t requests = 0);
// Named files that are made, used and removed, in folders; a made-up population
// (files_generator.cc). 0 requests: 40,000.
Trace generate_files(uint64_t seed, uint64_t requests = 0);

}  // namespace stoker::curm
