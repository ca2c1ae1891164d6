// Cases that no walk over the steps of a play comes to: what tore in one way on all disks, and what
// was damaged beside a crash.
#pragma once

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "stoker/testing/recording.h"

namespace stoker {

// A play on a coded store, as it was recorded.
struct Recorded {
  Images before, after;
  Timeline timeline = {std::make_shared<const Point>()};
  Admissible admissible;
  std::vector<SimEvent> events;
};

struct MadeCases {
  uint64_t states = 0;  // that differ in more than in which bit was hit
  // The i-th of them; behind the last comes the first.
  std::function<CrashCase(uint64_t i, std::mt19937_64& random)> make;
};

// `run` outlives the cases; `paths` are those of the shards. An error: the play has nothing of the
// kind.

// After the play, and no crash: of each header page the copy that counts has a bit flipped.
Result<MadeCases> rotten_pages(const Recorded& run, const std::vector<std::string>& paths);

// After the play, and no crash: a record that a later frame tells of has a bit flipped in all logs
// that have it. That is more than may be; nothing older may be shown for it.
Result<MadeCases> gone_records(const Recorded& run, const std::vector<std::string>& paths);

// A fold overwrites blocks in place on D and all P: each of these writes torn after the same number
// of sectors, one of them whole or not.
Result<MadeCases> torn_applies(const Recorded& run, const std::vector<std::string>& paths);

// A fold is decided, and one parity has lost what it had staged: its blocks and its entries, which
// fit each other, are of other versions than the others'. Four things keep that from being decoded
// from: opening rebuilds it; it is no source (RawHeaders::merge); the CRC of a block that was
// overwritten is not the one that its entry tells; and that of what is decoded is compared. Here
// its blocks are all old, so that the third has no say; the others' are new or old.
Result<MadeCases> lost_stages(const Recorded& run, const std::vector<std::string>& paths);

}  // namespace stoker
