// Looking at what lies on a shard beside its slots: superblocks, table areas, logs. Nothing is
// written here. Scrub mends by it, fsck tells.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "stoker/store/coded/shards/shards.h"

namespace stoker::coded {

using ValKey = std::tuple<Stamp, uint64_t, size_t, size_t>;  // stamp, stripe, chunk, first row
inline ValKey key_of(const Val& val) { return {val.stamp, val.stripe, val.chunk, val.first}; }

// The table image in an area, if there is a whole one.
struct TableImage {
  Stamp stamp = 0;
  std::vector<std::string> pieces;
};
std::optional<TableImage> read_table_image(const StoreId& store, std::span<const std::byte> area);

// What the intact frames of one shard's log say and have.
struct LogContent {
  std::map<ValKey, bool> vals;  // with all their blocks; whether it needs its COMMIT
  std::set<Stamp> commits;
  Stamp newest = 0;  // of both

  // `bytes`: of the segment, from the frame on.
  void take(const FrameContent& frame, std::span<const std::byte> bytes);
  // The VAL is there, and so is its COMMIT if it needs that.
  bool holds(const Val& val) const;
};

// Both copies of a shard's superblock as they are on the disk; none: damaged, or not readable.
std::array<std::optional<Superblock>, 2> superblock_copies(Shards& shards, size_t shard);

// An area of a shard, read in pieces: whoever wants the disk waits for one of them at most. Blocks
// that cannot be read are zeros.
class PiecewiseRead {
 public:
  // Pieces, where nobody else wants the disk: so many keep it at work.
  static constexpr size_t kAtOnce = 8;
  // `used`: memory of another one, to be used again if it is large enough.
  PiecewiseRead(Shards& shards, size_t shard, uint64_t offset, size_t bytes, AlignedBytes used);
  // So many pieces at once, as far as there are so many; how many bytes that were.
  size_t step(size_t pieces);
  bool done() const { return at_ == size_; }
  bool readable() const { return readable_; }  // all of it
  std::span<const std::byte> bytes() const { return bytes_.span().first(size_); }
  AlignedBytes take_memory() { return std::move(bytes_); }

 private:
  Shards& shards_;
  const size_t shard_;
  const uint64_t offset_;
  const size_t size_;
  AlignedBytes bytes_;  // of large pages: maybe more
  size_t at_ = 0;
  bool readable_ = true;
};

}  // namespace stoker::coded
