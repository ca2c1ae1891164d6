// ShardLog: where the next frame of a shard's log goes, and which segments are free. Knows nothing
// of what the records mean. Used by the store's writer thread alone; references to segments may be
// dropped by any thread.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "stoker/io/loop.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/coded/format/format.h"
#include "stoker/store/coded/format/stripe.h"

namespace stoker::coded {

// A frame that is ready to be written.
struct LogFrame {
  SegmentRef segment;
  uint64_t offset = 0;     // in the shard's file
  uint64_t blocks_at = 0;  // in the shard's file, of its first block
  AlignedBytes bytes;
};

// How far a segment is written.
struct SegmentEnd {
  uint64_t generation = 0;  // 0: there is no frame that counts
  LogCursor cursor;         // behind the last intact frame
  uint64_t count() const { return generation >> 32; }
};

class ShardLog {
 public:
  ShardLog(const Shape& shape, const StoreId& store, size_t shard)
      : shape_(shape), store_(store), shard_(shard), refs_(shape.segments) {}

  // A frame found on the disk: its segment is held until nobody needs it. One object a segment.
  SegmentRef hold(size_t segment);
  // Generation counts already used on this shard end here.
  void seen(uint64_t generation_count) {
    next_count_ = std::max(next_count_, generation_count + 1);
  }
  // Goes on behind the last intact frame of this segment, which is the one begun last: opening
  // takes no room.
  void resume(size_t segment, const SegmentEnd& end);

  size_t free_segments() const;
  // Whether frames of this many bytes in all (each smaller than a segment) can be appended, leaving
  // `reserve` other segments free.
  bool fits(size_t bytes, size_t reserve) const;
  LogFrame append(const FrameBuilder& frame);

 private:
  void begin_segment();
  size_t expired_segments() const;  // that nobody holds, the current one aside

  const Shape shape_;
  const StoreId store_;
  const size_t shard_;
  std::vector<std::weak_ptr<const Segment>> refs_;
  SegmentRef current_;
  LogWriter writer_;
  uint64_t next_count_ = 1;
};

// Hands out every frame of the segment's generation with its place in the segment; `bytes` is all
// of it. What is damaged is skipped. Generation counts below `floor` do not count.
SegmentEnd read_segment(const Shape& shape, const StoreId& store, size_t shard, size_t segment,
                        uint64_t floor, std::span<const std::byte> bytes,
                        const std::function<void(uint64_t at, FrameContent content)>& visit);

}  // namespace stoker::coded
