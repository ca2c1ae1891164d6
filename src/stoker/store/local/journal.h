// Journal: the durable form of the map, in two copies, each of two areas used in turn: an image of
// the map + the log after it.
//
// Used by one thread at a time: the one that opens the store, then its worker.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stoker/io/loop.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/local/map.h"
#include "stoker/store/local/volume.h"
#include "stoker/store/record_log.h"

namespace stoker::local {

// The first four bytes of every frame's payload.
enum class FrameKind : uint32_t {
  image = 1,      // items
  image_end = 2,  // u32: how many image frames went before
  seal = 3,       // the image is durable in both copies; only then come records
  record = 4,     // items
};

// What one copy of the current generation looks like on its own.
struct CopyReport {
  uint64_t records = 0;
  bool image = false, seal = false;
  std::vector<std::string> damage;  // bad frames with a good one behind them
  std::string unread_behind;        // where it cannot be read behind its last frame, if so
};

// Applies the frames of one generation to a map, in order. Pure: bytes in, map out.
class FrameReader {
 public:
  explicit FrameReader(Map& map) : map_(map) {}
  Status apply(std::span<const std::byte> payload);
  bool image_complete() const { return image_complete_; }
  bool sealed() const { return sealed_; }
  uint64_t records() const { return records_; }

 private:
  Map& map_;
  std::vector<Extent> freed_;  // while recovering nobody uses an extent: dropped
  uint32_t parts_ = 0;
  bool image_complete_ = false, sealed_ = false;
  uint64_t records_ = 0;
};

// An error of opening the store at `path`, for its user: where the map is damaged, with what is
// left to do.
Error opening_error(const Error& error, const std::string& path);

class Journal {
 public:
  Journal(Loop& loop, const VolumeSet& volumes);

  // The map of the newest generation whose image is complete, read from whichever copy has each
  // frame intact. corruption: a frame is damaged in both copies and later ones stand behind it, or
  // a sealed generation has lost its image.
  Result<std::unique_ptr<Map>> recover(const MapLimits& limits);
  // Flushes both copies. Due between recover() and begin(): a killed process may have left what was
  // recovered in the disks' caches alone, and begin() writes over the generation before it.
  Status sync();
  // Starts a new generation that holds `map`, durably in both copies, in the areas that do not hold
  // the current one.
  Status begin(const Map& map);
  // Is there room for a record in this generation? If not, begin() a new one.
  bool fits(size_t items_bytes) const { return writer_.fits(sizeof(FrameKind) + items_bytes); }
  // A record, durable in both copies when this returns.
  Status append(std::string_view items);

  // Half an area: what an image or a record takes at most.
  uint64_t payload_max() const { return area_bytes_ / 2 - 4 * kBlock; }
  uint64_t generation() const { return generation_; }
  // The counting halves of the present generation, and of the one that begin() starts next.
  uint32_t number() const { return static_cast<uint32_t>(generation_ >> 32); }
  uint32_t next_number() const { return static_cast<uint32_t>(generation_max_ >> 32) + 1; }
  uint64_t records() const { return records_; }
  // Notes on what recover() met and mended by the other copy.
  const std::vector<std::string>& mended() const { return mended_; }
  // Reads the current generation in one copy on its own.
  Result<CopyReport> check(size_t copy);

 private:
  struct Copy {
    FileId file = -1;
    uint64_t at = 0;
    std::array<uint64_t, 2> generations{};  // found in area A and B; 0: none
    size_t area = 1;                        // the one that holds the current generation
  };
  class Source;
  Result<uint64_t> newest_generation(LogSource& source) const;
  Result<bool> load(uint64_t generation, Map& map);
  Result<bool> sealed_anywhere(std::vector<Source>& sources, uint64_t generation) const;
  std::vector<Source> sources_of(uint64_t generation);
  void settle(uint64_t generation);
  Status write_frame(FrameKind kind, std::string_view body);

  Loop& loop_;
  StoreId store_{};
  uint64_t area_bytes_ = 0;
  std::array<Copy, 2> copies_;
  LogWriter writer_;
  AlignedBytes frame_;  // reused from frame to frame
  uint64_t generation_ = 0;
  uint64_t generation_max_ = 0;  // seen anywhere, finished or not
  uint64_t records_ = 0;
  std::vector<std::string> mended_;
};

}  // namespace stoker::local
