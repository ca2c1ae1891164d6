#include "stoker/store/cached/slots.h"

#include <algorithm>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/log.h"

namespace stoker::cached {
namespace {

constexpr uint32_t kMapChunk = 64 * kKiB;

Slice slice_of(std::string& text) {
  return {reinterpret_cast<std::byte*>(text.data()), text.size()};
}

// Waits for all of them, then tells the first error.
Status wait_all(const std::vector<Future<void>>& futures) {
  Status first;
  for (const auto& each : futures) {
    const Status& status = each.wait();
    if (first && !status) first = status;
  }
  return first;
}

}  // namespace

Room room_for(uint64_t usable, uint32_t block_bytes) {
  Room room;
  room.usable = usable;
  // A small cache has more than 2 %, for a commit of a few blocks writes much beside them.
  const uint64_t small = std::min(usable / 4, kCommitBytes / block_bytes);
  room.slots = usable + std::max({uint64_t{2}, (usable + 49) / 50, small});
  // What comes during a commit goes into the next one, hence twice.
  room.staged =
      std::max(room.slots - usable, std::min<uint64_t>(room.slots, 2 * kCommitBytes / block_bytes));
  // FAST writes what changes beside what is there: the fills of one commit, and the whole map.
  const uint64_t map = kHeaderBytes + kRecordBytes * (4096 + 3 * room.slots);
  const uint64_t data = (room.slots + room.staged) * block_bytes;
  const uint64_t maps = 2 * align_up(map, kMapChunk) + uint64_t{4} * kMapChunk;
  room.fast_bytes = align_up(data + data / 64 + maps, kMiB);
  return room;
}

Room room_in(uint64_t fast_bytes, uint32_t block_bytes) {
  uint64_t usable = fast_bytes / block_bytes;
  while (usable > 0 && room_for(usable, block_bytes).fast_bytes > fast_bytes)
    usable -= (usable + 99) / 100;
  return room_for(usable, block_bytes);
}

Result<std::unique_ptr<Slots>> Slots::open(std::unique_ptr<Store> fast, const Header& header) {
  const Features has = fast->features();
  if (has.atomic != AtomicUnit::transaction || !has.update || !has.verified)
    return fail(Code::unsupported,
                "'{}' cannot be the fast store of a cache: it lacks transactions, updates or "
                "checksums; use local:",
                fast->info().composition);
  STOKER_ASSIGN(const auto objects, fast->list(""));
  for (const ObjectInfo& object : objects) {
    if (!object.key.starts_with("cache/"))
      return fail(
          Code::invalid_argument,
          "'{}' holds the object '{}', so it is not a cache; name a store that may be overwritten",
          fast->info().composition, object.key);
  }
  std::unique_ptr<Slots> slots(new Slots(std::move(fast), header));
  auto map = slots->load();
  if (map && map->header == header) {
    slots->found_ = std::move(map->used);
    slots->records_ = map->records;
    return slots;
  }
  if (!map && map.error().code != Code::not_found && map.error().code != Code::corruption &&
      map.error().code != Code::mismatch)
    return map.error();
  if (!map && map.error().code != Code::not_found)
    log().warn("the cache begins empty: {}", map.error().message());
  STOKER_TRY(slots->format());
  return slots;
}

Result<Map> Slots::load() {
  STOKER_ASSIGN(const ObjectInfo info, fast_->stat(kMapKey));
  std::string bytes(info.bytes, '\0');
  STOKER_TRY(fast_->read(kMapKey, 0, slice_of(bytes)).wait());
  return decode(std::as_bytes(std::span(bytes)));
}

Status Slots::format() {
  STOKER_ASSIGN(auto change, fast_->begin());
  STOKER_ASSIGN(const auto objects, fast_->list(""));
  for (const ObjectInfo& object : objects) STOKER_TRY(change->remove(object.key));
  if (!objects.empty()) {
    STOKER_TRY(change->commit(Durability::durable).wait());  // gives its room back first
    STOKER_ASSIGN(change, fast_->begin());
  }
  std::string header = encode(header_);
  STOKER_TRY(change->resize(kMapKey, header.size(), kMapChunk));
  STOKER_TRY(change->write(kMapKey, 0, slice_of(header)).wait());
  for (uint64_t slot = 0; slot < header_.slots; slot += kSlotsPerObject) {
    const uint64_t here = std::min(kSlotsPerObject, header_.slots - slot);
    STOKER_TRY(change->resize(slots_key(slot), here * header_.block_bytes, header_.block_bytes));
  }
  const auto version = change->commit(Durability::durable).wait();
  return version ? Status() : Status(version.error());
}

Status Slots::commit(const std::vector<Fill>& fills, const std::vector<uint32_t>& freed,
                     const std::vector<Record>& others) {
  std::vector<Record> records;
  const bool anew = rewrites(fills.size() + freed.size());
  if (anew) {
    records = others;
  } else {
    for (const uint32_t slot : freed) {
      STOKER_CHECK(slot < header_.slots);
      records.push_back({.id = {}, .slot = slot});
    }
  }
  STOKER_ASSIGN(auto change, fast_->begin());
  std::vector<Future<void>> writes;
  for (const auto& [slot, block] : fills) {
    STOKER_CHECK(slot < header_.slots && block->size > 0 && block->size <= header_.block_bytes);
    writes.push_back(change->write(slots_key(slot), slot % kSlotsPerObject * header_.block_bytes,
                                   block->slice()));
    records.push_back({block->id, slot, static_cast<uint32_t>(block->size)});
  }
  const uint64_t at = kHeaderBytes + (anew ? 0 : records_ * kRecordBytes);
  std::string bytes = encode(records);
  Status status = change->resize(kMapKey, at + bytes.size());
  if (status) writes.push_back(change->write(kMapKey, at, slice_of(bytes)));
  Status written = wait_all(writes);
  if (!status) return status;
  if (!written) return written;
  const auto version = change->commit(Durability::durable).wait();
  if (!version) return version.error();
  records_ = (anew ? 0 : records_) + records.size();
  return {};
}

}  // namespace stoker::cached
