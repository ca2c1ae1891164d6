// Recovery, the part that writes: what was chosen becomes true on all live shards, in a new epoch.
#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "stoker/base/crc32c.h"
#include "stoker/base/log.h"
#include "stoker/store/coded/mutation.h"
#include "stoker/store/coded/recovery/recovery.h"

namespace stoker::coded {
// What could not be read was not seen, so it must not be seen later either: it becomes zeros. At
// least one copy of all that stood there is elsewhere.
Status Recovery::make_readable() {
  AlignedBytes zeros(kBlock);
  std::memset(zeros.data(), 0, zeros.size());
  ShardBatch batch(shards_, Priority::demand);
  ShardSet touched = 0;
  for (const auto& [shard, blocks] : found_.unreadable) {
    if ((map_.live() & shard_bit(shard)) == 0) continue;
    for (const uint64_t at : blocks) batch.write(shard, at, zeros.slice());
    touched |= shard_bit(shard);
  }
  if (const ShardSet failed = batch.run(); failed != 0)
    STOKER_TRY(logs_.drop_shards(failed, batch.why()));
  return logs_.flush(touched);
}

Status Recovery::settle() {
  STOKER_TRY(logs_.change_epoch(map_.live()));
  STOKER_TRY(make_readable());
  if (!mutated(Mutation::settle_nothing)) {
    STOKER_TRY(append_commits());
    STOKER_TRY(append_vals());
  }
  STOKER_TRY(append_folds());
  STOKER_TRY(logs_.flush(map_.live()));
  STOKER_TRY(roll_forward());
  if (full_ != 0)
    STOKER_TRY(logs_.drop_shards(full_, "its log has lost more than it has room for"));
  STOKER_TRY(catch_up());
  STOKER_TRY(joining_.checkpoint());  // above all old COMMITs: none of them is ever chosen late
  return restore_reserve();           // also for the next opening
}

// A log that lacks more than it has room for gets nothing: its shard is left out and gets a new
// one, or a single disk would keep the store closed. Not before the others have what was seen on
// it, and what a decided fold needs of it is in the bases.
Status Recovery::append(std::map<size_t, FrameBuilder>& frames,
                        std::map<size_t, LogFrame>& written) {
  if (const ShardSet full = full_ | logs_.without_room(frames);
      shape_.writable(map_.live() & ~full))
    full_ = full;
  std::erase_if(frames, [this](const auto& each) { return (full_ & shard_bit(each.first)) != 0; });
  return logs_.append(frames, 0, written);
}

Status Recovery::append_commits() {
  std::map<size_t, FrameBuilder> frames;
  std::vector<CommitRecord*> records;  // in these
  const auto write = [&]() -> Status {
    std::map<size_t, LogFrame> written;
    STOKER_TRY(append(frames, written));
    for (const auto& [shard, frame] : written) {
      for (CommitRecord* record : records) record->held.push_back(frame.segment);
    }
    frames.clear();
    records.clear();
    return {};
  };
  const ShardSet live = map_.live();
  for (const auto& [stamp, found] : found_.commits) {
    size_t largest = 0;
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((live & ~found.seen & shard_bit(shard)) == 0) continue;
      frames[shard].add(CommitItem{stamp, found.items});
      largest = std::max(largest, frames[shard].bytes());
    }
    records.push_back(found.record.get());
    if (largest > shape_.segment_bytes / 2) STOKER_TRY(write());
  }
  return write();
}

// Only now: with its COMMIT on all shards a VAL of a transaction cannot come to stand alone.
Status Recovery::append_vals() {
  std::map<size_t, FrameBuilder> frames;
  std::vector<AlignedBytes> memory;
  struct Home {
    Val* val;
    size_t shard, at;
  };
  std::vector<Home> homes;
  const ShardSet live = map_.live();
  const auto write = [&]() -> Status {
    std::map<size_t, LogFrame> written;
    STOKER_TRY(append(frames, written));
    for (const Home& home : homes) {
      const auto frame = written.find(home.shard);
      if (frame == written.end()) continue;
      home.val->places.push_back({home.shard, frame->second.blocks_at + home.at * kBlock});
      home.val->held.push_back(frame->second.segment);
    }
    frames.clear();
    homes.clear();
    memory.clear();
    return {};
  };
  for (auto& [key, found] : found_.vals) {
    const StripePtr stripe = find_stripe(found.item.stripe);
    if (!stripe || !found_.counts(found)) continue;
    const auto& val = found.val;
    const bool newest = std::any_of(stripe->overlay.begin(), stripe->overlay.end(),
                                    [&val](const auto& each) { return each.second.val == val; });
    ShardSet lacking = 0;
    for (size_t c = 0; c < shape_.n(); ++c) {
      if (c == found.item.chunk || c >= shape_.k)
        lacking |= shard_bit(stripe->shards[c]) & live & ~found.seen;
    }
    if (!newest || lacking == 0) continue;
    AlignedBytes& blocks = memory.emplace_back();
    do {
      blocks = AlignedBytes(found.item.crcs.size() * kBlock);
      reader_.fetch_records({{Run::From::log, stripe, found.item.chunk, found.item.first,
                              found.item.crcs.size(), found.val, 0, blocks.data()}},
                            Priority::demand);
    } while (blocks.lost());
    size_t largest = 0;
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((lacking & shard_bit(shard)) == 0) continue;
      homes.push_back({found.val.get(), shard, frames[shard].block_count()});
      frames[shard].add(found.item, blocks.span());
      largest = std::max(largest, frames[shard].bytes());
    }
    if (largest > shape_.segment_bytes / 2) STOKER_TRY(write());
  }
  return write();
}

Status Recovery::append_folds() {
  std::map<size_t, FrameBuilder> frames;
  const ShardSet live = map_.live();
  for (const auto& [key, found] : found_.folds) {
    const StripePtr stripe = find_stripe(found.item.stripe);
    uint32_t concerned = 0;
    for (const FoldRow& row : found.item.rows) concerned |= uint32_t{1} << row.chunk;
    for (size_t c = 0; c < shape_.n(); ++c) {
      const ShardSet shard = shard_bit(stripe->shards[c]);
      if ((c >= shape_.k || (concerned >> c & 1) != 0) && (live & ~found.seen & shard) != 0)
        frames[stripe->shards[c]].add(found.item);
    }
  }
  std::map<size_t, LogFrame> written;
  STOKER_TRY(append(frames, written));
  for (auto& [key, found] : found_.folds) {
    for (const auto& [shard, frame] : written) found.held.push_back(frame.segment);
  }
  return {};
}

Status Recovery::roll_forward() {
  std::set<uint64_t> stripes;
  for (const auto& [key, found] : found_.folds) stripes.insert(found.item.stripe);
  for (const uint64_t id : stripes) STOKER_TRY(roll_forward(find_stripe(id)));
  return {};
}

// What nothing was found for, or was lost since, comes from the others.
Status Recovery::catch_up() {
  for (const auto& [id, raw] : raw_) {
    const StripePtr stripe = find_stripe(id);
    if (!stripe) continue;
    for (size_t position = 0; position < shape_.n(); ++position) {
      if ((map_.live_positions(*stripe) >> position & 1) == 0 || !lags(*stripe, raw, position))
        continue;
      const auto rebuilt = rebuilder_.rebuild(stripe, position);
      if (rebuilt) continue;
      const ShardSet shard = shard_bit(stripe->shards[position]);
      // it cannot be written
      if (rebuilt.error().code == Code::io && shape_.writable(map_.live() & ~shard)) {
        STOKER_TRY(logs_.drop_shards(shard, rebuilt.error().what));
        continue;
      }
      log().warn("{}", rebuilt.error().message());
      const auto map = map_.lock();
      map->bad[{id, position}] = stripe;  // by a repair, then
    }
  }
  return {};
}

// Whether the shard's own header does not say of every row what the headers together say.
bool Recovery::lags(const Stripe& stripe, const RawHeaders& raw, size_t position) const {
  for (size_t row = 0; row < shape_.rows(); ++row) {
    if (position >= shape_.k) {
      if (stripe.headers->unsound[row * shape_.m + position - shape_.k]) return true;
    } else if (const auto& entry = raw.data[position][row];
               !entry || entry->version != stripe.headers->versions[row * shape_.k + position]) {
      return true;
    }
  }
  return false;
}

// Blocks in place, durable, then their header pages, durable.
Status Recovery::roll_forward(const StripePtr& stripe) {
  Headers& headers = *stripe->headers;
  const uint32_t live = map_.live_positions(*stripe);
  ShardBatch blocks(shards_, Priority::demand);
  std::vector<AlignedBytes> memory;
  std::set<std::pair<size_t, size_t>> pages;  // position, page
  ShardSet touched = 0;
  for (const auto& [at, over] : stripe->overrides) {
    const size_t row = at / shape_.n();
    const size_t position = at % shape_.n();
    if ((live >> position & 1) == 0) continue;
    AlignedBytes& block = memory.emplace_back(kBlock);
    if (over.val) {
      auto read = reader_.read_val(stripe, over.val, over.index, 1, Priority::demand);
      if (!read) {  // no log has it intact: decoded from the others, if they have it
        raw_.at(stripe->id).data[position][row].reset();
        continue;
      }
      block = std::move(*read);
    } else {
      ShardBatch read(shards_, Priority::demand);
      read.read(over.place.shard, over.place.offset, block.slice());
      const bool intact = read.run() == 0 &&
                          crc32c(block.data(), kBlock) == headers.crcs[row * shape_.n() + position];
      if (!intact) {
        headers.unsound[row * shape_.m + position - shape_.k] = true;
        continue;
      }
    }
    blocks.write(stripe->shards[position], shape_.block_at(stripe->slots[position], row),
                 block.slice());
    pages.emplace(position, row / shape_.rows_per_page());
    touched |= shard_bit(stripe->shards[position]);
  }
  blocks.flush(touched);
  if (const ShardSet failed = blocks.run(); failed != 0)
    STOKER_TRY(logs_.drop_shards(failed, blocks.why()));
  const auto write = [&](const std::set<std::pair<size_t, size_t>>& those) -> Status {
    ShardBatch batch(shards_, Priority::demand);
    for (const auto& [position, page] : those) {
      const HeaderPage header = page_of(shape_, stripe->id, headers, position, page);
      headers.counters[position * shape_.pages() + page] = header.counter;
      encode_page(shape_, shards_.store(), header, memory.emplace_back(kBlock).span());
      batch.write(stripe->shards[position],
                  shape_.page_at(stripe->slots[position], page, header.counter),
                  memory.back().slice());
    }
    batch.flush(touched & map_.live());
    const ShardSet failed = batch.run();
    return failed == 0 ? Status() : logs_.drop_shards(failed, batch.why());
  };
  // Of a page that could not be read both copies: the one that is left may have a higher counter.
  std::set<std::pair<size_t, size_t>> unread = pages;
  std::erase_if(unread, [&](const auto& at) {
    return headers.counters[at.first * shape_.pages() + at.second] != 0;
  });
  STOKER_TRY(write(pages));
  if (!unread.empty()) STOKER_TRY(write(unread));
  stripe->overrides.clear();
  return {};
}

// Crash after crash must not eat up the segments that opening needs.
Status Recovery::restore_reserve() {
  while (logs_.free_segments() < LogSet::kReserve) {
    const auto folded = folder_.step({kFoldAtOnce});
    if (folded) STOKER_TRY(joining_.checkpoint());
    if (!folded || *folded == 0) {
      log().warn(
          "the logs of {} are nearly full: {} of the {} segments that an opening needs are free, "
          "and applying the logged updates frees no more ({}); remove objects",
          map_.name(), logs_.free_segments(), LogSet::kReserve,
          folded ? "nothing is left to fold" : folded.error().what);
      return {};
    }
  }
  return {};
}

}  // namespace stoker::coded
