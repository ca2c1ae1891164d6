#include "stoker/store/coded/upkeep/background.h"

#include <algorithm>
#include <string>

namespace stoker::coded {
namespace {

// rows that are folded for each block that is logged, where the log is nearly full
constexpr uint64_t kRowsABlock = 2;
// folds move so much more than an image of the table, or than a segment has, before one is written
constexpr uint64_t kFoldsAnImage = 4;
constexpr uint64_t kSegmentsAnImage = 2;

}  // namespace

// Who lacks a shard must not wait for it until nobody writes any more, and who writes must not find
// a full log: so it also goes on between commits.
bool Background::step(bool idle, uint64_t logged) {
  if (map_.refused()) return false;
  bool worked = false;
  if (paces_.repair.wait_ns() == 0) {
    const auto repaired = resync_.step();
    worked = repaired && *repaired;
    if (!repaired) repair_trouble_.met(repaired.error());
    if (worked) repair_trouble_.over("a piece of a chunk was rebuilt");
  }
  worked = relieve_log(logged) || worked;
  if (worked) return true;
  if (idle && 2 * logs_.free_segments() >= shape_.segments && paces_.fold.wait_ns() == 0) {
    const auto folded = fold_watched({.stripes = 1, .rows = kRowsAStep, .spare = true});
    if (folded && *folded > 0) return true;
  }
  return scrubber_.patrol_step();
}

// A log of which half is in use: a piece of it is folded, or an image of the table makes
// superfluous what is. No more is folded than has to be.
bool Background::relieve_log(uint64_t logged) {
  const size_t free = logs_.free_segments();
  // The rate holds as long as there is room for what comes meanwhile. Then each batch waits for one
  // step, as long as the batch is, or one of them would wait for all that is missing.
  const bool pressed = free <= LogSet::kReserve + 1;
  if (2 * free > shape_.segments || map_.refused()) return false;
  if (paces_.fold.wait_ns() > 0 && !pressed) return false;
  // With a large table a log that is nearly full does not wait until an image pays.
  const uint64_t moved = logs_.moved_since_image();
  const bool image_pays =
      logs_.image_frees() && (moved >= std::max(kFoldsAnImage * logs_.image_cost(),
                                                kSegmentsAnImage * shape_.segment_bytes) ||
                              (moved > 0 && 4 * free < shape_.segments));
  if (pressed || !image_pays) {
    const size_t rows =
        pressed ? std::max<size_t>(kRowsAStep, kRowsABlock * logged / kBlock) : kRowsAStep;
    const auto folded = fold_watched({.stripes = rows, .rows = rows, .oldest = true});
    if (!folded) return false;
    if (*folded > 0 && !image_pays) return true;
  }
  if (!logs_.image_frees()) return false;
  const uint64_t before = logs_.moved();
  const Status written = joining_.checkpoint();
  paces_.fold.spend(logs_.moved() - before);
  if (written) {
    image_trouble_.over("an image of it was written");
  } else {
    image_trouble_.met(written.error());
  }
  return written.has_value();
}

// Whoever commits must not find a line in the log for each commit.
Result<size_t> Background::fold_watched(const FoldBounds& bounds) {
  auto folded = folder_.paced(bounds, paces_.fold);
  if (folded) {
    fold_trouble_.over(*folded == 0
                           ? "nothing is to be folded now"
                           : std::to_string(*folded) +
                                 (*folded == 1 ? " stripe was folded" : " stripes were folded"));
  } else {
    fold_trouble_.met(folded.error());
  }
  return folded;
}

}  // namespace stoker::coded
