#include "stoker/store/coded/logs/log_set.h"

#include <algorithm>
#include <bit>
#include <random>

#include "stoker/base/check.h"
#include "stoker/base/log.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {
namespace {

constexpr size_t kImagePiece = 256 * kKiB;

uint64_t random_generation() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;
}

}  // namespace

ShardSet LogSet::without_room(const std::map<size_t, FrameBuilder>& frames) const {
  const ShardSet set = map_.live();
  const size_t round = rounds_.item_bytes(shape_);
  ShardSet full = 0;
  for (const auto& [shard, frame] : frames) {
    const size_t bytes = frame.bytes(round);
    const bool fits = bytes <= shape_.segment_bytes && shards_[shard].log->fits(bytes, 0);
    if ((set & shard_bit(shard)) != 0 && !fits) full |= shard_bit(shard);
  }
  return full;
}

Status LogSet::append(std::map<size_t, FrameBuilder>& frames, ShardSet touched,
                      std::map<size_t, LogFrame>& written, std::span<const Beside> beside) {
  if (const ShardSet full = without_room(frames); full != 0) {
    return fail(Code::out_of_space, "the log of '{}' is full: commit less at a time",
                shards_[static_cast<size_t>(std::countr_zero(full))].path);
  }
  STOKER_CHECK(written.empty());
  ShardBatch batch(shards_, Priority::demand);
  const ShardSet set = map_.live();
  const auto round =
      frames.empty() ? std::nullopt : std::optional(rounds_.begin(shape_, image_stamp_));
  for (auto& [shard, frame] : frames) {
    STOKER_CHECK(shard < shape_.shards);
    if ((set & shard_bit(shard)) == 0) continue;
    frame.add(*round);
    const LogFrame& made = written.emplace(shard, shards_[shard].log->append(frame)).first->second;
    batch.write(shard, made.offset, made.bytes.slice());
    touched |= shard_bit(shard);
  }
  for (const Beside& each : beside) {
    if ((set & shard_bit(each.shard)) != 0)
      batch.write(each.shard, each.offset, each.bytes.slice());
  }
  // Each shard makes its frame durable as soon as it is written: none waits for another.
  if (!mutated(Mutation::skip_flush)) batch.flush(touched & set);
  const ShardSet failed = batch.run();
  if (failed != 0) STOKER_TRY(drop_shards(failed, batch.why()));
  const ShardSet left = map_.live();
  std::erase_if(written, [&](const auto& each) { return (left & shard_bit(each.first)) == 0; });
  for (auto& [shard, frame] : written) frame.bytes = AlignedBytes();
  if (round) rounds_.end(written);
  return {};
}

Status LogSet::flush(ShardSet set) {
  ShardBatch batch(shards_, Priority::demand);
  batch.flush(set & map_.live());
  const ShardSet failed = batch.run();
  return failed == 0 ? Status() : drop_shards(failed, batch.why());
}

bool LogSet::fits(size_t bytes) const {
  const ShardSet set = map_.live();
  for (size_t shard = 0; shard < shape_.shards; ++shard) {
    if ((set & shard_bit(shard)) != 0 && !shards_[shard].log->fits(bytes, kReserve)) return false;
  }
  return true;
}

size_t LogSet::free_segments() const {
  const ShardSet set = map_.live();
  size_t free = SIZE_MAX;
  for (size_t shard = 0; shard < shape_.shards; ++shard) {
    if ((set & shard_bit(shard)) != 0) free = std::min(free, shards_[shard].log->free_segments());
  }
  return free;
}

// Into the area that does not hold the newest one.
Status LogSet::checkpoint(ShardSet beside, ShardSet& failed) {
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
  LogWriter writer({shards_.store(), generation}, shape_.area_bytes);
  uint64_t bytes = 0;
  for (const std::string& payload : payloads) bytes += framed_bytes(payload.size());
  if (bytes > shape_.area_bytes)
    return fail(Code::out_of_space,
                "the object table of the store {} does not fit its area: remove objects",
                map_.name());
  AlignedBytes image(bytes);
  for (const std::string& payload : payloads) {
    const auto source = std::as_bytes(std::span(payload));
    writer.append(source,
                  image.span().subspan(writer.cursor().offset, framed_bytes(payload.size())));
  }
  STOKER_CHECK(writer.cursor().offset == bytes);
  ++images_;
  const ShardSet set = map_.live();
  STOKER_CHECK((set & beside) == 0);
  image_cost_ = bytes * static_cast<uint64_t>(std::popcount(set));
  moved_ += image_cost_;
  moved_at_image_ = moved_;
  const auto write = [&](ShardSet to) -> ShardSet {
    ShardBatch batch(shards_, Priority::write_back);
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((to & shard_bit(shard)) == 0) continue;
      Member& each = shards_[shard];
      STOKER_CHECK(each.image_area < 2);
      each.image_area ^= 1;
      batch.write(shard, shape_.area_at(each.image_area), image.slice());
    }
    batch.flush(set);
    return batch.run();
  };
  const ShardSet not_written = write(set | beside);
  failed = not_written & beside;
  if (not_written != 0) STOKER_TRY(drop_shards(not_written, "writing the object table failed"));
  since_image_.clear();
  image_stamp_ = stamp;
  return {};
}

Status LogSet::drop_shards(ShardSet failed, const std::string& why) {
  STOKER_CHECK(failed != 0);
  if (shards_.outdone()) return refuse_outdone();
  ShardSet left = 0;
  {
    const auto map = map_.lock();
    left = map->live & ~failed;
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((failed & map->live & shard_bit(shard)) != 0) shards_[shard].trouble = why;
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

// No shard failed: the fence says that this writer's time is over.
Status LogSet::refuse_outdone() {
  const Error refused = fail(Code::read_only,
                             "another writer has opened {}, so its shards refuse writes from this "
                             "one. Close it, and open it again when the other writer has ended",
                             map_.name());
  map_.lock()->refused = refused;
  return fail(Code::io, "{}", refused.what);
}

Status LogSet::change_epoch(ShardSet to) {
  for (;;) {
    if (shards_.outdone()) return refuse_outdone();
    if (!shape_.writable(to)) {
      const Error refused = fail(Code::read_only,
                                 "only {} of the {} shards of {} are left, too few to write to: "
                                 "bring missing disks back and open the store again",
                                 std::popcount(to), shape_.shards, map_.name());
      map_.lock()->refused = refused;
      return fail(Code::io, "{}", refused.what);
    }
    STOKER_CHECK((to & ~shards_.present()) == 0);
    const Epoch next{shards_.epoch_seen() + 1, to};
    if (next.number >= uint64_t{1} << (64 - kNumberBits))
      return fail(Code::unsupported,
                  "this coded store was opened more often than its format can count: copy its "
                  "objects into a new one");
    std::array<uint32_t, kShardsMax> incarnations{};
    std::string why;
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((to & shard_bit(shard)) == 0) continue;
      shards_[shard].super.proposed = next;
      incarnations[shard] = shards_[shard].super.incarnation;
    }
    ShardSet failed = shards_.write_superblocks(to, why);
    if (failed == 0) {
      for (size_t shard = 0; shard < shape_.shards; ++shard) {
        if ((to & shard_bit(shard)) == 0) continue;
        shards_[shard].super.confirmed = next;
        shards_[shard].super.incarnations = incarnations;
      }
      failed = shards_.write_superblocks(to, why);
    }
    if (failed == 0) {
      const auto map = map_.lock();
      STOKER_CHECK(next.number > map->epoch);
      map->epoch = next.number;
      map->next_id = 1;
      map->live = to;
      return {};
    }
    log().warn("a shard of a coded store failed and is left out from now on: {}", why);
    set_trouble(failed, why);
    STOKER_CHECK((failed & ~to) == 0);
    to &= ~failed;
  }
}

void LogSet::set_trouble(ShardSet set, const std::string& why) {
  const auto map = map_.lock();
  for (size_t shard = 0; shard < shape_.shards; ++shard) {
    if ((set & shard_bit(shard)) != 0) shards_[shard].trouble = why;
  }
}

Status LogSet::append_settled(size_t shard, const std::vector<std::pair<StripePtr, ValRef>>& vals) {
  Member& each = shards_[shard];
  for (size_t first = 0; first < vals.size();) {
    FrameBuilder frame;
    std::vector<AlignedBytes> memory;
    std::vector<Run> runs;
    std::vector<size_t> at;
    size_t end = first;
    for (size_t blocks = 0; end < vals.size() && blocks * kBlock < shape_.segment_bytes / 4;
         ++end) {
      const auto& [stripe, val] = vals[end];
      runs.push_back({Run::From::log, stripe, val->chunk, val->first, val->crcs.size(), val, 0,
                      memory.emplace_back(val->crcs.size() * kBlock).data()});
      blocks += val->crcs.size();
    }
    STOKER_CHECK(end > first);
    reader_.fetch_records(runs, Priority::scrub);
    if (std::any_of(memory.begin(), memory.end(),
                    [](const AlignedBytes& blocks) { return blocks.lost(); }))
      continue;
    for (size_t i = first; i < end; ++i) {
      const auto& val = vals[i].second;
      at.push_back(frame.block_count());
      frame.add(ValItem{val->stamp, false, val->stripe, val->chunk, val->first, val->crcs, 0},
                memory[i - first].span());
    }
    if (frame.bytes() > shape_.segment_bytes || !each.log->fits(frame.bytes(), kReserve))
      return stays_out(each.path, "its log has no room for the updates that are not folded yet",
                       Code::out_of_space);
    const LogFrame made = each.log->append(frame);
    ShardBatch batch(shards_, Priority::scrub);
    batch.write(shard, made.offset, made.bytes.slice());
    if (batch.run() != 0) return stays_out(each.path, batch.why());
    const auto map = map_.lock();
    for (size_t i = first; i < end; ++i) {
      const auto& [stripe, val] = vals[i];
      const auto more = std::make_shared<Val>(*val);  // readers may be looking at the old one
      std::erase_if(more->places, [shard](const Place& place) { return place.shard == shard; });
      const bool data = stripe->shards[val->chunk] == shard;
      more->places.insert(data ? more->places.begin() : more->places.end(),
                          {shard, made.blocks_at + at[i - first] * kBlock});
      more->held.push_back(made.segment);
      if (!more->told) rounds_.add(more);
      for (auto& [block, newer] : stripe->overlay) {
        if (newer.val == val) newer.val = more;
      }
    }
    first = end;
  }
  return {};
}

}  // namespace stoker::coded
