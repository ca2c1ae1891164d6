// What the writer thread does to the shards as a set: appending frames, making room in the logs,
// table images, the epoch.
#include <algorithm>
#include <bit>
#include <cstring>
#include <random>

#include "stoker/base/log.h"
#include "stoker/store/coded/coded_store.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {
namespace {

constexpr const char* kWhere = "store/coded/log_space";
constexpr size_t kImagePiece = 256 * kKiB;
constexpr size_t kFoldAtOnce = 16;  // stripes

uint64_t random_generation() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;
}

}  // namespace

ShardSet CodedStore::without_room(const std::map<size_t, FrameBuilder>& frames) const {
  const ShardSet set = map_.live();
  const size_t round = rounds_.item_bytes(shape_);
  ShardSet full = 0;
  for (const auto& [shard, frame] : frames) {
    const size_t bytes = frame.bytes(round);
    const bool fits = bytes <= shape_.segment_bytes && (*shards_)[shard].log->fits(bytes, 0);
    if ((set & shard_bit(shard)) != 0 && !fits) full |= shard_bit(shard);
  }
  return full;
}

Status CodedStore::append(std::map<size_t, FrameBuilder>& frames, ShardSet touched,
                          std::map<size_t, LogFrame>& written) {
  if (const ShardSet full = without_room(frames); full != 0) {
    return make_error(
        Code::out_of_space,
        "the log of '" + (*shards_)[static_cast<size_t>(std::countr_zero(full))].path + "' is full",
        kWhere);
  }
  ShardBatch batch(*shards_, Priority::demand);
  const ShardSet set = map_.live();
  const auto round =
      frames.empty() ? std::nullopt : std::optional(rounds_.begin(shape_, image_stamp_));
  for (auto& [shard, frame] : frames) {
    if ((set & shard_bit(shard)) == 0) continue;
    frame.add(*round);
    const LogFrame& made =
        written.emplace(shard, (*shards_)[shard].log->append(frame)).first->second;
    batch.write(shard, made.offset, made.bytes.slice());
    touched |= shard_bit(shard);
  }
  const ShardSet failed = batch.run();
  if (failed != 0) STOKER_TRY(drop_shards(failed, batch.why()));
  if (!mutated(Mutation::skip_flush)) STOKER_TRY(flush(touched));
  const ShardSet left = map_.live();
  std::erase_if(written, [&](const auto& each) { return (left & shard_bit(each.first)) == 0; });
  for (auto& [shard, frame] : written) frame.bytes = AlignedBytes();
  if (round) rounds_.end(written);
  return {};
}

Status CodedStore::flush(ShardSet set) {
  ShardBatch batch(*shards_, Priority::demand);
  batch.sync(set & map_.live());
  const ShardSet failed = batch.run();
  return failed == 0 ? Status() : drop_shards(failed, batch.why());
}

bool CodedStore::fits(size_t bytes, size_t reserve) const {
  const ShardSet set = map_.live();
  for (size_t shard = 0; shard < shape_.shards; ++shard) {
    if ((set & shard_bit(shard)) != 0 && !(*shards_)[shard].log->fits(bytes, reserve)) return false;
  }
  return true;
}

size_t CodedStore::free_segments() const {
  const ShardSet set = map_.live();
  size_t free = SIZE_MAX;
  for (size_t shard = 0; shard < shape_.shards; ++shard) {
    if ((set & shard_bit(shard)) != 0)
      free = std::min(free, (*shards_)[shard].log->free_segments());
  }
  return free;
}

// A full log holds commits up until enough is folded; it fails them only if nothing is left to
// fold.
Status CodedStore::make_room(size_t bytes) {
  bool again = false;
  for (;;) {
    if (fits(bytes, kReserve)) return {};
    const auto done = fold_step({kFoldAtOnce});
    if (!done && done.error().code != Code::over_budget) return done.error();
    const size_t folded = done ? *done : 0;
    {
      const auto map = map_.lock();
      map->counts.awaited_folds += folded;
    }
    const bool held = !since_image_.empty();
    if (held) STOKER_TRY(checkpoint());
    if (fits(bytes, kReserve)) return {};
    if (!done) return done.error();
    if (folded > 0 || held) continue;
    // What could not be folded once may be by now.
    const auto map = map_.lock();
    if (again || map->stuck.empty()) break;
    map->stuck.clear();
    again = true;
  }
  return make_error(Code::out_of_space,
                    "the logs of the store " + map_.name() + " have no room for " +
                        human_bytes(bytes) + ": commit less at a time",
                    kWhere);
}

// Crash after crash must not eat up the segments that opening needs.
Status CodedStore::restore_reserve() {
  while (free_segments() < kReserve) {
    const auto folded = fold_step({kFoldAtOnce});
    if (folded) STOKER_TRY(checkpoint());
    if (!folded || *folded == 0) {
      log().warn("the logs of the coded store are nearly full and cannot be folded");
      return {};
    }
  }
  return {};
}

// Writes the table as an image on every live shard, into the area that does not hold the newest
// one.
Status CodedStore::checkpoint() {
  std::vector<std::string> pieces;
  Stamp stamp = 0;
  {
    const auto map = map_.lock();
    map->table.learn(map->classes);
    pieces = map->table.image(kImagePiece);
    stamp = make_stamp(map->epoch, map->version);
  }
  std::vector<std::string> payloads;
  for (const std::string& piece : pieces) {
    ByteWriter out;
    out.put(uint32_t{1});
    payloads.push_back(out.take() + piece);
  }
  ByteWriter end;
  end.put(uint32_t{2});
  end.put(static_cast<uint32_t>(pieces.size()));
  end.put(stamp);
  payloads.push_back(end.take());
  const uint64_t generation = random_generation();
  LogWriter writer({shards_->store(), generation}, shape_.area_bytes);
  uint64_t bytes = 0;
  for (const std::string& payload : payloads) bytes += framed_bytes(payload.size());
  if (bytes > shape_.area_bytes)
    return make_error(
        Code::out_of_space,
        "the object table of the store " + map_.name() + " does not fit its area: remove objects",
        kWhere);
  AlignedBytes image(bytes);
  for (const std::string& payload : payloads) {
    const auto source = std::as_bytes(std::span(payload));
    writer.append(source,
                  image.span().subspan(writer.cursor().offset, framed_bytes(payload.size())));
  }
  ++images_;
  const ShardSet set = map_.live();
  image_cost_ = bytes * static_cast<uint64_t>(std::popcount(set));
  moved_ += image_cost_;
  moved_at_image_ = moved_;
  const auto write = [&](ShardSet to) -> ShardSet {
    ShardBatch batch(*shards_, Priority::write_back);
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((to & shard_bit(shard)) == 0) continue;
      Shard& each = (*shards_)[shard];
      each.image_area ^= 1;
      batch.write(shard, shape_.area_at(each.image_area), image.slice());
    }
    return batch.run();
  };
  const ShardSet failed = write(set | (joining_ ? shard_bit(*joining_) : 0));
  if (joining_ && (failed & shard_bit(*joining_)) != 0)
    give_up_joining("writing the object table on '" + (*shards_)[*joining_].path + "' failed");
  if (failed != 0) STOKER_TRY(drop_shards(failed, "writing the object table failed"));
  STOKER_TRY(flush(set));
  since_image_.clear();
  image_stamp_ = stamp;
  return {};
}

// These shards failed: the others go on, once they have agreed on that durably.
Status CodedStore::drop_shards(ShardSet failed, const std::string& why) {
  ShardSet left = 0;
  {
    const auto map = map_.lock();
    left = map->live & ~failed;
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((failed & map->live & shard_bit(shard)) != 0) (*shards_)[shard].trouble = why;
    }
    if (left == map->live) return {};  // not live any more, or not yet
  }
  log().warn("a shard of a coded store failed and is left out from now on: {}", why);
  if (mutated(Mutation::no_durable_exclusion)) {
    const auto map = map_.lock();
    map->live = left;
    return {};
  }
  return change_epoch(left);
}

// Proposes, then confirms. A shard that fails meanwhile is left out of the next attempt.
Status CodedStore::change_epoch(ShardSet to) {
  for (;;) {
    if (!shape_.writable(to)) {
      const Error refused = make_error(
          Code::read_only,
          "only " + std::to_string(std::popcount(to)) + " of the " + std::to_string(shape_.shards) +
              " shards of " + map_.name() +
              " are left, too few to write to: bring missing disks back and open the store again",
          kWhere);
      map_.lock()->refused = refused;
      return make_error(Code::io, refused.what, kWhere);
    }
    const Epoch next{shards_->epoch_seen() + 1, to};
    if (next.number >= uint64_t{1} << (64 - kNumberBits))
      return make_error(Code::unsupported,
                        "this coded store was opened more often than its format can count: copy "
                        "its objects into a new one",
                        kWhere);
    std::array<uint32_t, kShardsMax> incarnations{};
    std::string why;
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((to & shard_bit(shard)) == 0) continue;
      (*shards_)[shard].super.proposed = next;
      incarnations[shard] = (*shards_)[shard].super.incarnation;
    }
    ShardSet failed = shards_->write_superblocks(to, why);
    if (failed == 0) {
      for (size_t shard = 0; shard < shape_.shards; ++shard) {
        if ((to & shard_bit(shard)) == 0) continue;
        (*shards_)[shard].super.confirmed = next;
        (*shards_)[shard].super.incarnations = incarnations;
      }
      failed = shards_->write_superblocks(to, why);
    }
    if (failed == 0) {
      const auto map = map_.lock();
      map->epoch = next.number;
      map->next_id = 1;
      map->live = to;
      return {};
    }
    log().warn("a shard of a coded store failed and is left out from now on: {}", why);
    set_trouble(failed, why);
    to &= ~failed;
  }
}

void CodedStore::set_trouble(ShardSet set, const std::string& why) {
  const auto map = map_.lock();
  for (size_t shard = 0; shard < shape_.shards; ++shard) {
    if ((set & shard_bit(shard)) != 0) (*shards_)[shard].trouble = why;
  }
}

}  // namespace stoker::coded
