#include "stoker/store/coded/recovery/look.h"

#include <algorithm>

#include "stoker/base/crc32c.h"

namespace stoker::coded {
namespace {

constexpr size_t kPieceBytes = kMiB;

}  // namespace

void LogContent::take(const FrameContent& frame, std::span<const std::byte> bytes) {
  // Of blocks that no log had intact a record that was appended again has only the checksums.
  const auto whole = [&](const ValItem& val) {
    for (size_t i = 0; i < val.crcs.size(); ++i) {
      if (crc32c(bytes.data() + frame.blocks_at + (val.at + i) * kBlock, kBlock) != val.crcs[i])
        return false;
    }
    return true;
  };
  for (const Item& item : frame.items) {
    if (const auto* val = std::get_if<ValItem>(&item); val != nullptr && whole(*val)) {
      auto [at, added] =
          vals.emplace(ValKey{val->stamp, val->stripe, val->chunk, val->first}, val->needs_commit);
      at->second = at->second && val->needs_commit;  // settled once, and appended again since
      newest = std::max(newest, val->stamp);
    }
    if (const auto* commit = std::get_if<CommitItem>(&item)) {
      commits.insert(commit->stamp);
      newest = std::max(newest, commit->stamp);
    }
  }
}

bool LogContent::holds(const Val& val) const {
  const auto found = vals.find(key_of(val));
  return found != vals.end() && (!found->second || commits.contains(val.stamp));
}

std::array<std::optional<Superblock>, 2> superblock_copies(Shards& shards, size_t shard) {
  std::array<std::optional<Superblock>, 2> copies;
  for (const size_t copy : {0, 1}) {
    AlignedBytes block(kBlock);
    ShardBatch batch(shards, Priority::scrub);
    batch.read(shard, kSuperblockAt[copy], block.slice());
    if (batch.run() != 0) continue;
    if (auto found = decode_superblock(block.span())) copies[copy] = *found;
  }
  return copies;
}

PiecewiseRead::PiecewiseRead(Shards& shards, size_t shard, uint64_t offset, size_t bytes,
                             AlignedBytes used)
    : shards_(shards),
      shard_(shard),
      offset_(offset),
      size_(bytes),
      bytes_(used.data() != nullptr && used.size() >= bytes && !used.lost()
                 ? std::move(used)
                 : AlignedBytes::faulted(bytes)) {}

size_t PiecewiseRead::step(size_t pieces) {
  std::vector<Area> areas;
  const size_t begin = at_;
  for (; areas.size() < pieces && at_ < size_; at_ += areas.back().into.size) {
    const size_t piece = std::min(kPieceBytes, size_ - at_);
    areas.push_back({shard_, offset_ + at_, bytes_.slice().sub(at_, piece)});
  }
  readable_ = read_areas(shards_, Priority::scrub, areas).empty() && readable_;
  return at_ - begin;
}

std::optional<TableImage> read_table_image(const StoreId& store, std::span<const std::byte> area) {
  MemoryLogSource source(area);
  const auto first = read_frame(source, store, 0);
  if (!first || !*first) return {};
  LogScan scan(source, {store, (*first)->generation});
  TableImage image;
  for (auto item = scan.next(); item && *item; item = scan.next()) {
    const auto* record = std::get_if<LogRecord>(&**item);
    if (record == nullptr) return {};
    ByteReader in(record->payload);
    const auto kind = in.get<uint32_t>();
    if (kind == 1) {
      const auto piece = in.get_bytes(in.left());
      image.pieces.emplace_back(reinterpret_cast<const char*>(piece.data()), piece.size());
      continue;
    }
    const auto pieces = in.get<uint32_t>();
    image.stamp = in.get<uint64_t>();
    if (kind != 2 || !in.ok() || pieces != image.pieces.size()) return {};
    return image;
  }
  return {};
}

}  // namespace stoker::coded
