#include "curm/generator.h"

#include <algorithm>

#include "curm/random.h"

namespace stoker::curm {
namespace {

constexpr uint64_t K = 1024, M = K * K;
constexpr uint64_t kSmall = 16 * K;
constexpr uint64_t kHotRegions = 8;
constexpr int kTries = 4;  // for a repeat that is wanted

constexpr std::array kProfiles = {
    Profile{"rsrch",
            "a research server's volume: small writes, many repeated within days",
            13'780,
            0.997,
            0.44,
            0.02,
            60,
            9'000,
            0.02,
            {4 * K, 4 * K, 4 * K, 4 * K, 12 * K, 36 * K, 64 * K, 64 * K},
            3'000 * M,
            4 * K},
    Profile{"hm",
            "hardware monitoring: writes of 8 KiB, in rounds",
            13'069,
            1,
            0.15,
            0.05,
            2'500,
            4'500,
            0.9,
            {8 * K, 8 * K, 8 * K, 8 * K, 8 * K, 16 * K, 64 * K, 64 * K},
            900 * M,
            4 * K},
    Profile{"wdev",
            "a test web server's metadata: few places, rewritten all the time",
            682,
            0.984,
            0.1,
            0,
            5,
            19,
            1,
            {4 * K, 4 * K, 4 * K, 4 * K, 4 * K, 4 * K, 8 * K, 8 * K},
            4 * M,
            64 * K},
    Profile{"mds",
            "a media server: small writes, hot log blocks",
            1'000,
            1,
            0.25,
            0.1,
            3,
            110,
            0.3,
            {1 * K, 4 * K, 4 * K, 4 * K, 8 * K, 8 * K, 16 * K, 20 * K},
            1'200 * M,
            4 * K},
    Profile{"vm",
            "a virtual machine's disk: reads and writes, long sequential runs that come again",
            113'872,
            0.587,
            0.25,
            0.75,
            16'000,
            35'000,
            0.95,
            {512, 2 * K, 4 * K, 40 * K, 64 * K, 64 * K, 64 * K, 68 * K},
            16'000 * M,
            60 * K},
    // Not fitted to a trace: what the benchmark of that name does to a volume.
    Profile{"postmark",
            "a mail server's volume: small files made, appended to and removed all over it",
            60'000,
            0.7,
            0.7,
            0.3,
            500,
            14'000,
            1,
            {4 * K, 4 * K, 4 * K, 8 * K, 8 * K, 12 * K, 12 * K, 16 * K},
            2'000 * M,
            8 * K,
            0},
    Profile{"oltp",
            "a database's tables: pages of 8 KiB at random places, hardly ever the same",
            30'000,
            0.7,
            0.97,
            0,
            500,
            21'000,
            1,
            {8 * K, 8 * K, 8 * K, 8 * K, 8 * K, 8 * K, 8 * K, 8 * K},
            16'000 * M,
            8 * K,
            0},
};

}  // namespace

std::span<const Profile> profiles() { return kProfiles; }

const Profile* find_profile(std::string_view name) {
  const auto found = std::find_if(kProfiles.begin(), kProfiles.end(),
                                  [name](const Profile& profile) { return profile.name == name; });
  return found == kProfiles.end() ? nullptr : &*found;
}

Trace generate(const Profile& profile, uint64_t seed, uint64_t requests) {
  Random random(seed);
  Trace trace;
  trace.name = profile.name;
  trace.format = "msr";
  trace.objects = {"0"};
  std::vector<Request> writes;
  Request last;
  uint64_t time_us = 0;
  const auto place = [&] {
    const uint64_t region = std::min<uint64_t>(16 * M, profile.span_bytes / kHotRegions);
    const uint64_t at =
        random.chance(profile.hot_share)
            ? random.below(kHotRegions) * (profile.span_bytes / kHotRegions) + random.below(region)
            : random.below(profile.span_bytes);
    return at / 512 * 512;
  };
  for (uint64_t i = requests == 0 ? profile.requests : requests; i > 0; --i) {
    time_us += random.log_uniform(10, 10'000'000);
    Request request{time_us, 0, random.chance(profile.write_share), 0, 0};
    if (!request.write) {
      request.bytes = profile.read_bytes;
      request.offset = writes.empty() || random.chance(0.5)
                           ? place()
                           : writes[random.below(writes.size())].offset;
      trace.requests.push_back(request);
      continue;
    }
    bool repeats = false;
    if (!writes.empty() && !random.chance(profile.new_share)) {
      for (int attempt = 0; attempt < kTries && !repeats; ++attempt) {
        const uint64_t back = random.log_uniform(profile.back_min, profile.back_max);
        if (back > writes.size()) continue;  // nothing is that old yet
        const Request& earlier = writes[writes.size() - back];
        repeats = earlier.bytes <= kSmall || random.chance(profile.large_repeat);
        if (!repeats) continue;
        request.offset = earlier.offset;
        request.bytes = earlier.bytes;
      }
    }
    if (!repeats) {
      request.bytes = profile.sizes[random.below(profile.sizes.size())];
      request.offset = last.bytes != 0 && random.chance(profile.sequential_share)
                           ? last.offset + last.bytes
                           : place();
      last = request;
    }
    writes.push_back(request);
    trace.requests.push_back(request);
  }
  return trace;
}

}  // namespace stoker::curm
