#include "stoker/store/local/map.h"

#include <algorithm>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"

namespace stoker::local {
namespace {

Error damaged(const std::string& what) {
  return fail(Code::corruption, "the map is damaged: {}", what);
}

Chunk get_chunk(ByteReader& in) {
  Chunk chunk;
  chunk.place = in.get<uint64_t>();
  chunk.birth = in.get<uint64_t>();
  chunk.crc = in.get<uint32_t>();
  chunk.stored = in.get<uint32_t>();
  chunk.valid = in.get<uint32_t>();
  return chunk;
}

bool valid_chunk(const Chunk& chunk, uint32_t chunk_bytes, const MapLimits& limits) {
  if (chunk.sparse()) return chunk == Chunk{};
  if (chunk.stored == 0 || chunk.stored > chunk_bytes || chunk.valid > chunk.stored) return false;
  if (volume_of(chunk.place) >= limits.volumes.size()) return false;
  const auto& range = limits.volumes[volume_of(chunk.place)];
  const uint64_t block = block_of(chunk.place);
  return block >= range.begin && block <= range.end && chunk.extent().blocks <= range.end - block;
}

// Hands items over in parts, cut between items.
class ImageWriter {
 public:
  ImageWriter(size_t part_bytes, const std::function<Status(std::string_view)>& part)
      : part_bytes_(part_bytes), part_(part) {}

  ByteWriter& items() { return items_; }
  Status flush_if_full() { return items_.size() >= part_bytes_ ? flush() : Status(); }
  Status flush() {
    if (items_.size() == 0) return {};
    const std::string part = items_.take();
    items_ = ByteWriter();
    return part_(part);
  }
  // The entries of `to` that differ from `from` (null: from a new object), in runs.
  Status chunks(const Object* from, const Object& to) {
    const size_t run_max = std::max<size_t>(1, part_bytes_ / kChunkRecordBytes);
    const auto same = [&](size_t i) {
      return from != nullptr && i < from->chunks.size() ? from->chunks[i] == to.chunks[i]
                                                        : to.chunks[i].sparse();
    };
    for (size_t i = 0; i < to.chunks.size();) {
      if (same(i)) {
        ++i;
        continue;
      }
      size_t end = i + 1;
      while (end < to.chunks.size() && end - i < run_max && !same(end)) ++end;
      put_chunks(items_, static_cast<uint32_t>(i), std::span(to.chunks).subspan(i, end - i));
      STOKER_TRY(flush_if_full());
      i = end;
    }
    return {};
  }

 private:
  const size_t part_bytes_;
  const std::function<Status(std::string_view)>& part_;
  ByteWriter items_;
};

// The items that turn table `from` into table `to`.
Status write_difference(const Table& from, const Table& to, ImageWriter& out) {
  auto old = from.begin();
  for (const auto& [key, object] : to) {
    for (; old != from.end() && old->first < key; ++old) put_remove(out.items(), old->first);
    const Object* before = nullptr;
    if (old != from.end() && old->first == key) before = (old++)->second.get();
    if (before == object.get()) continue;
    if (before != nullptr && before->chunk_bytes != object->chunk_bytes) {
      put_remove(out.items(), key);
      before = nullptr;
    }
    put_object(out.items(), key, object->bytes, object->chunk_bytes, object->version);
    STOKER_TRY(out.chunks(before, *object));
    STOKER_TRY(out.flush_if_full());
  }
  for (; old != from.end(); ++old) put_remove(out.items(), old->first);
  return {};
}

}  // namespace

std::string tag_of(const Object& object) {
  ByteWriter sums;
  sums.put<uint64_t>(object.bytes);
  for (const Chunk& chunk : object.chunks) {
    sums.put<uint64_t>(chunk.birth);
    sums.put<uint32_t>(chunk.crc);
    sums.put<uint32_t>(chunk.valid);
  }
  const std::string bytes = sums.take();
  return std::to_string(object.version) + "-" + std::to_string(crc32c(bytes.data(), bytes.size()));
}

void put_version(ByteWriter& out, Version version) {
  out.put(ItemKind::version);
  out.put(version);
}

void put_object(ByteWriter& out, std::string_view key, uint64_t bytes, uint32_t chunk_bytes,
                Version version) {
  STOKER_CHECK(!key.empty() && key.size() <= kKeyMax && valid_chunk_bytes(chunk_bytes));
  out.put(ItemKind::put);
  out.put_string(key);
  out.put(bytes);
  out.put(chunk_bytes);
  out.put(version);
}

void put_chunks(ByteWriter& out, uint32_t first, std::span<const Chunk> chunks) {
  STOKER_CHECK(!chunks.empty());
  out.put(ItemKind::chunks);
  out.put(first);
  out.put(static_cast<uint32_t>(chunks.size()));
  for (const Chunk& chunk : chunks) {
    out.put(chunk.place);
    out.put(chunk.birth);
    out.put(chunk.crc);
    out.put(chunk.stored);
    out.put(chunk.valid);
  }
}

void put_remove(ByteWriter& out, std::string_view key) {
  out.put(ItemKind::remove);
  out.put_string(key);
}

void put_snapshot(ByteWriter& out, std::string_view name) {
  STOKER_CHECK(!name.empty() && name.size() <= kKeyMax);
  out.put(ItemKind::snapshot);
  out.put_string(name);
}

void put_drop(ByteWriter& out, std::string_view name) {
  out.put(ItemKind::drop);
  out.put_string(name);
}

Status Map::apply(std::span<const std::byte> items, std::vector<Extent>& freed) {
  ByteReader in(items);
  while (in.left() > 0) {
    switch (in.get<ItemKind>()) {
      case ItemKind::version: {
        const auto version = in.get<Version>();
        if (!in.ok() || version < version_) return damaged("a version goes backwards");
        version_ = version;
        break;
      }
      case ItemKind::put:
        STOKER_TRY(apply_put(in, freed));
        break;
      case ItemKind::chunks:
        STOKER_TRY(apply_chunks(in, freed));
        break;
      case ItemKind::remove:
        STOKER_TRY(apply_remove(in, freed));
        break;
      case ItemKind::snapshot:
        STOKER_TRY(apply_snapshot(in));
        break;
      case ItemKind::drop:
        STOKER_TRY(apply_drop(in, freed));
        break;
      default:
        return damaged("an item of an unknown kind");
    }
  }
  return {};
}

Status Map::apply_put(ByteReader& in, std::vector<Extent>& freed) {
  const std::string_view key = in.get_string();
  const auto bytes = in.get<uint64_t>();
  const auto chunk_bytes = in.get<uint32_t>();
  const auto version = in.get<Version>();
  if (!in.ok() || key.empty() || key.size() > kKeyMax)
    return damaged("an object without a proper key");
  if (!valid_chunk_bytes(chunk_bytes)) return damaged("chunks of an impossible size");
  const uint64_t count = bytes / chunk_bytes + (bytes % chunk_bytes != 0);
  auto found = current_.find(key);
  const uint64_t before = found == current_.end() ? 0 : found->second->chunks.size();
  // Within a commit one object may grow before another shrinks or goes: twice the limit is never
  // passed.
  if (count > limits_.slots_max || slots_ - before + count > 2 * limits_.slots_max)
    return damaged("an object too large for the store");
  if (found == current_.end()) {
    found = current_.emplace(key, std::make_shared<Object>()).first;
    found->second->chunk_bytes = chunk_bytes;
    key_bytes_ += key.size();
  } else if (found->second->chunk_bytes != chunk_bytes) {
    return damaged("an object changes the size of its chunks");
  }
  Object& object = own(found->second);
  STOKER_CHECK(object.chunks.size() == before);
  for (size_t i = count; i < before; ++i) retire(object.chunks[i], freed);
  object.chunks.resize(count);
  object.bytes = bytes;
  object.version = version;
  STOKER_CHECK(slots_ >= before);
  slots_ = slots_ - before + count;
  last_key_ = key;
  return {};
}

Status Map::apply_chunks(ByteReader& in, std::vector<Extent>& freed) {
  const auto first = in.get<uint32_t>();
  const auto count = in.get<uint32_t>();
  const auto found = current_.find(last_key_);
  if (!in.ok() || found == current_.end() || in.left() / kChunkRecordBytes < count)
    return damaged("chunks that belong to no object");
  Object& object = own(found->second);
  if (first > object.chunks.size() || count > object.chunks.size() - first)
    return damaged("chunks beyond the end of their object");
  for (size_t i = first; i < size_t{first} + count; ++i) {
    const Chunk chunk = get_chunk(in);
    if (!valid_chunk(chunk, object.chunk_bytes, limits_))
      return damaged("a chunk at an impossible place");
    const Chunk old = std::exchange(object.chunks[i], chunk);
    if (old.place == chunk.place) continue;
    retire(old, freed);
    if (!chunk.sparse()) ++extents_;
  }
  return {};
}

Status Map::apply_remove(ByteReader& in, std::vector<Extent>& freed) {
  const auto found = current_.find(in.get_string());
  if (!in.ok() || found == current_.end()) return damaged("an object is removed that is not there");
  for (const Chunk& chunk : found->second->chunks) retire(chunk, freed);
  STOKER_CHECK(slots_ >= found->second->chunks.size() && key_bytes_ >= found->first.size());
  slots_ -= found->second->chunks.size();
  key_bytes_ -= found->first.size();
  current_.erase(found);
  return {};
}

Status Map::apply_snapshot(ByteReader& in) {
  const std::string_view name = in.get_string();
  if (!in.ok() || name.empty() || name.size() > kKeyMax || find_snapshot(name) != nullptr)
    return damaged("a snapshot without a proper name");
  STOKER_CHECK(snapshots_.empty() || snapshots_.back().version <= version_);
  snapshots_.push_back(Snapshot{std::string(name), version_, current_, {}});
  snapshot_key_bytes_ += key_bytes_;
  snapshot_objects_ += current_.size();
  return {};
}

Status Map::apply_drop(ByteReader& in, std::vector<Extent>& freed) {
  const std::string_view name = in.get_string();
  const auto found = std::find_if(snapshots_.begin(), snapshots_.end(),
                                  [&](const Snapshot& each) { return each.name == name; });
  if (!in.ok() || found == snapshots_.end())
    return damaged("a snapshot is dropped that is not there");
  Snapshot* older = found == snapshots_.begin() ? nullptr : &*std::prev(found);
  for (const Snapshot::Dead& dead : found->dead) {
    if (older != nullptr && dead.birth <= older->version) {
      older->dead.push_back(dead);
    } else {
      free(dead.extent, freed);
    }
  }
  uint64_t key_bytes = 0;
  for (const auto& [key, object] : found->table) key_bytes += key.size();
  STOKER_CHECK(snapshot_key_bytes_ >= key_bytes && snapshot_objects_ >= found->table.size());
  snapshot_key_bytes_ -= key_bytes;
  snapshot_objects_ -= found->table.size();
  snapshots_.erase(found);
  return {};
}

// The current version lets go of an extent: it goes to the newest snapshot that sees it, or is
// free.
void Map::retire(const Chunk& chunk, std::vector<Extent>& freed) {
  if (chunk.sparse()) return;
  if (!snapshots_.empty() && chunk.birth <= snapshots_.back().version) {
    snapshots_.back().dead.push_back({chunk.extent(), chunk.birth});
  } else {
    free(chunk.extent(), freed);
  }
}

void Map::free(const Extent& extent, std::vector<Extent>& freed) {
  STOKER_CHECK(extents_ > 0 && extent.blocks > 0);
  freed.push_back(extent);
  --extents_;
}

// The object, for changing: a copy of its own if a snapshot shares it.
Object& Map::own(std::shared_ptr<Object>& object) {
  if (object.use_count() > 1) object = std::make_shared<Object>(*object);
  return *object;
}

const Snapshot* Map::find_snapshot(std::string_view name) const {
  const auto found = std::find_if(snapshots_.begin(), snapshots_.end(),
                                  [&](const Snapshot& each) { return each.name == name; });
  return found == snapshots_.end() ? nullptr : &*found;
}

Status Map::image(size_t part_bytes,
                  const std::function<Status(std::string_view items)>& part) const {
  static const Table nothing;
  ImageWriter out(part_bytes, part);
  const Table* before = &nothing;
  for (const Snapshot& snapshot : snapshots_) {
    put_version(out.items(), snapshot.version);
    STOKER_TRY(write_difference(*before, snapshot.table, out));
    put_snapshot(out.items(), snapshot.name);
    before = &snapshot.table;
  }
  put_version(out.items(), version_);
  STOKER_TRY(write_difference(*before, current_, out));
  return out.flush();
}

uint64_t Map::image_bound() const {
  // An object costs a put (25 + key) or a remove in each table; an extent is written once, its
  // going at most once more, each at worst in a run of its own (9); a snapshot costs its name.
  const uint64_t objects = current_.size() + snapshot_objects_;
  return 64 + snapshots_.size() * (kKeyMax + 32) + 2 * (key_bytes_ + snapshot_key_bytes_) +
         objects * 40 + extents_ * 2 * (kChunkRecordBytes + 9);
}

uint64_t Map::memory_bytes() const {
  constexpr uint64_t per_object = 160;  // tree node, control block, Object
  uint64_t bytes = sizeof *this;
  const auto add = [&bytes](const std::string& key, const Object& object) {
    bytes += per_object + key.capacity() + object.chunks.capacity() * sizeof(Chunk);
  };
  for (const auto& [key, object] : current_) add(key, *object);
  const Table* later = &current_;
  for (auto snapshot = snapshots_.rbegin(); snapshot != snapshots_.rend(); ++snapshot) {
    for (const auto& [key, object] : snapshot->table) {
      const auto same = later->find(key);
      if (same == later->end() || same->second != object) add(key, *object);
    }
    bytes += snapshot->dead.capacity() * sizeof(Snapshot::Dead);
    later = &snapshot->table;
  }
  return bytes;
}

void Map::each_extent(const std::function<void(const Extent&)>& visit) const {
  for (const auto& [key, object] : current_) {
    for (const Chunk& chunk : object->chunks) {
      if (!chunk.sparse()) visit(chunk.extent());
    }
  }
  for (const Snapshot& snapshot : snapshots_) {
    for (const auto& dead : snapshot.dead) visit(dead.extent);
  }
}

}  // namespace stoker::local
