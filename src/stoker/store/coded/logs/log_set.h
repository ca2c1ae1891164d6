// LogSet: the shards as a set that is written to together: frames in their logs, images of the
// object table, and the epoch, which says who counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "stoker/store/coded/format/log.h"
#include "stoker/store/coded/format/rounds.h"
#include "stoker/store/coded/map/committed_map.h"
#include "stoker/store/coded/read/reader.h"
#include "stoker/store/coded/shards/shards.h"

namespace stoker::coded {

// Writer thread.
class LogSet {
 public:
  LogSet(CommittedMap& map, Shards& shards, Reader& reader)
      : map_(map), shards_(shards), shape_(shards.shape()), reader_(reader) {}

  // Segments that commits leave to folds and to the next opening.
  static constexpr size_t kReserve = 2;
  // Bytes for a shard that go with the frames.
  struct Beside {
    size_t shard;
    uint64_t offset;
    AlignedBytes bytes;
  };
  // Writes the frames, one a shard, and what goes with them, and flushes these shards and
  // `touched`. Drops shards that fail; an error if too few are left.
  Status append(std::map<size_t, FrameBuilder>& frames, ShardSet touched,
                std::map<size_t, LogFrame>& written, std::span<const Beside> beside = {});
  // Into one shard's log, not flushed. They are settled: none of them needs its COMMIT any more.
  // Errors: io, and out_of_space where the log would have too little left.
  Status append_settled(size_t shard, const std::vector<std::pair<StripePtr, ValRef>>& vals);
  // live shards whose logs have none for their frame
  ShardSet without_room(const std::map<size_t, FrameBuilder>& frames) const;
  // So many bytes, on each live shard, beside the reserve.
  bool fits(size_t bytes) const;
  size_t free_segments() const;  // of the live shard that has the fewest
  // Of the live shards among these; drops those that fail.
  Status flush(ShardSet set);
  // Writes the table as an image on every live shard, and on those `beside` them, which do not
  // count yet: those of them that failed are in `failed`.
  Status checkpoint(ShardSet beside, ShardSet& failed);
  // These shards failed: the others go on, once they have agreed on that durably.
  Status drop_shards(ShardSet failed, const std::string& why);
  // Proposes, then confirms. A shard that fails meanwhile is left out of the next attempt.
  Status change_epoch(ShardSet to);
  void set_trouble(ShardSet set, const std::string& why);

  Rounds& rounds() { return rounds_; }
  // Of the newest table image. found_image(): opening found it.
  Stamp image_stamp() const { return image_stamp_; }
  void found_image(Stamp stamp) { image_stamp_ = stamp; }
  uint64_t images() const { return images_; }
  // Something in the logs that the next table image makes superfluous.
  void hold_until_image(std::shared_ptr<const void> record) {
    since_image_.push_back(std::move(record));
  }
  bool image_frees() const { return !since_image_.empty(); }
  // Bytes, by folds and table images since the store was opened.
  void count_moved(uint64_t bytes) { moved_ += bytes; }
  uint64_t moved() const { return moved_; }
  uint64_t moved_since_image() const { return moved_ - moved_at_image_; }
  uint64_t image_cost() const { return image_cost_; }  // of these by the newest image

 private:
  Status refuse_outdone();

  CommittedMap& map_;
  Shards& shards_;
  const Shape& shape_;
  Reader& reader_;
  Rounds rounds_;          // of appends to the logs
  Stamp image_stamp_ = 0;  // of the newest table image
  uint64_t images_ = 0;    // written since it was opened
  uint64_t image_cost_ = 0;
  uint64_t moved_ = 0;
  uint64_t moved_at_image_ = 0;  // when that was written
  // what the table image does not make superfluous yet
  std::vector<std::shared_ptr<const void>> since_image_;
};

}  // namespace stoker::coded
