// Resync: a shard that was away gets the chunks that it missed, while the store works on, and counts again once it has all.
#include <algorithm>
#include <cstring>
#include <random>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"
#include "stoker/base/log.h"
#include "stoker/store/coded/coded_store.h"
#include "stoker/store/coded/headers.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {
namespace {

constexpr const char* kWhere = "store/coded/resync";

bool says_blank(const RawHeaders& raw, size_t position, size_t row) {
  if (position < raw.data.size()) return raw.data[position][row] && raw.data[position][row]->version == 0;
  const auto& entry = raw.parity[position - raw.data.size()][row];
  return entry && std::all_of(entry->versions.begin(), entry->versions.end(), [](Stamp version) { return version == 0; });
}

Error failing(const std::string& path, const std::string& why) { return make_error(Code::io, "the shard '" + path + "' cannot be resynced: " + why, kWhere); }

}  // namespace

// Every row of the chunk with what the headers of all say.
Result<CodedStore::Compared> CodedStore::compare(const StripePtr& stripe, size_t position) {
  STOKER_TRY(load_headers(stripe, Priority::scrub));
  const size_t shard = stripe->shards[position];
  const size_t slot = stripe->slots[position];
  AlignedBytes pairs(header_bytes(shape_));
  AlignedBytes own(shape_.chunk_bytes);
  bool readable = false;
  {
    ShardBatch batch(*shards_, Priority::scrub);
    batch.read(shard, shape_.slot_at(slot), pairs.slice());
    batch.read(shard, shape_.block_at(slot, 0), own.slice());
    readable = batch.run() == 0;
  }
  RawHeaders raw(shape_);
  if (readable) raw.take(shape_, shards_->store(), stripe->id, position, pairs.span());
  Compared found;
  found.next = *stripe->headers;
  Headers& next = found.next;
  for (size_t row = 0; row < shape_.rows(); ++row) {
    const Stamp* versions = &next.versions[row * shape_.k];
    const bool data = position < shape_.k;
    if (data ? versions[position] == 0 : row_is_blank(shape_, next, row)) {
      // Zeros that were never written: there is no block, but the page must say so. Or nothing is known of them once the others are lost.
      if (!says_blank(raw, position, row)) found.lost_pages.insert(row / shape_.rows_per_page());
      if (!data) next.unsound[row * shape_.m + position - shape_.k] = false;
      continue;
    }
    uint32_t crc = next.crcs[row * shape_.n() + position];
    bool right = readable;
    if (data) {
      const auto& entry = raw.data[position][row];
      right = right && entry && entry->version == versions[position] && entry->crc == crc;
    } else {
      const auto& entry = raw.parity[position - shape_.k][row];
      right = right && entry && std::equal(versions, versions + shape_.k, entry->versions.begin());
      if (right) crc = entry->crc;
    }
    if (right && crc32c(own.data() + row * kBlock, kBlock) == crc) {
      next.crcs[row * shape_.n() + position] = crc;
      if (!data) next.unsound[row * shape_.m + position - shape_.k] = false;
    } else {
      found.wrong_rows.push_back(row);
    }
  }
  for (size_t page = 0; page < shape_.pages(); ++page) {
    const uint64_t own_counter = raw.counters[position * shape_.pages() + page];
    if (own_counter == 0) found.lost_pages.insert(page);  // or never written on this disk
    uint64_t& counter = next.counters[position * shape_.pages() + page];
    counter = std::max(counter, own_counter);
  }
  return found;
}

// Blocks first, durable, then the header pages, durable: as in a fold.
Result<size_t> CodedStore::rebuild(const StripePtr& stripe, size_t position) {
  STOKER_ASSIGN(Compared found, compare(stripe, position));
  const size_t shard = stripe->shards[position];
  const std::string& path = (*shards_)[shard].path;
  const size_t slot = stripe->slots[position];
  Headers& next = found.next;
  std::set<size_t> pages = found.lost_pages;
  ShardBatch blocks(*shards_, Priority::scrub);
  std::vector<AlignedBytes> memory;
  for (const size_t row : found.wrong_rows) {
    pages.insert(row / shape_.rows_per_page());
    AlignedBytes& all = memory.emplace_back(shape_.n() * kBlock);
    const Status decoded = read_rows(*stripe, row, 1, uint32_t{1} << position, all.span(), Priority::scrub, uint32_t{1} << position);
    if (!decoded) {
      // Lost for good: it stays an erasure, and no reason to go without the rest.
      log().warn("{}", decoded.error().message());
      if (position >= shape_.k) next.unsound[row * shape_.m + position - shape_.k] = true;
      continue;
    }
    const Slice block{all.data() + position * kBlock, kBlock, -1};
    next.crcs[row * shape_.n() + position] = crc32c(block.data, kBlock);
    if (position >= shape_.k) next.unsound[row * shape_.m + position - shape_.k] = false;
    blocks.write(shard, shape_.block_at(slot, row), block);
  }
  const auto durable = [&](ShardBatch& batch) -> Status {
    if (batch.run() != 0) return failing(path, batch.why());
    ShardBatch sync(*shards_, Priority::scrub);
    sync.sync(shard_bit(shard));
    return sync.run() == 0 ? Status() : failing(path, sync.why());
  };
  if (!pages.empty()) {
    STOKER_TRY(durable(blocks));
    ShardBatch headers(*shards_, Priority::scrub);
    for (const size_t page : pages) {
      const HeaderPage header = page_of(shape_, stripe->id, next, position, page);
      next.counters[position * shape_.pages() + page] = header.counter;
      encode_page(shape_, shards_->store(), header, memory.emplace_back(kBlock).span());
      headers.write(shard, shape_.page_at(slot, page, header.counter), memory.back().slice());
    }
    STOKER_TRY(durable(headers));
  }
  std::unique_lock lock(mutex_);
  stripe->folding = true;
  unpinned_.wait(lock, [&] { return stripe->readers == 0; });
  stripe->headers = std::move(next);
  stripe->folding = false;
  unpinned_.notify_all();
  return found.wrong_rows.size();
}

// One stripe of the joining shard, or its admission when it has all of them.
Result<bool> CodedStore::resync_step() {
  if (const std::lock_guard lock(mutex_); refused_) return false;
  if (!joining_) {
    const ShardSet away = shards_->present() & ~live();
    for (size_t shard = 0; shard < shape_.shards && !joining_; ++shard) {
      if ((away & shard_bit(shard)) != 0 && !given_up_.contains(shard)) joining_ = shard;
    }
    if (!joining_) return false;
    joined_.clear();
    log().info("the shard '{}' is being brought up to date", (*shards_)[*joining_].path);
  }
  StripePtr next;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, object] : table_.objects()) {
      for (const StripePtr& stripe : object->stripes) {
        if (stripe && !joined_.contains(stripe->id) && !mutated(Mutation::admit_stale) && std::find(stripe->shards.begin(), stripe->shards.end(), *joining_) != stripe->shards.end()) next = stripe;
        if (next) break;
      }
      if (next) break;
    }
  }
  Status status;
  if (next) {
    const auto position = static_cast<size_t>(std::find(next->shards.begin(), next->shards.end(), *joining_) - next->shards.begin());
    const auto rebuilt = rebuild(next, position);
    if (rebuilt) {
      joined_.insert(next->id);
    } else {
      status = rebuilt.error();
    }
  } else {
    status = admit();
  }
  if (!status) {
    log().warn("{}", status.error().message());
    const std::lock_guard lock(mutex_);
    (*shards_)[*joining_].trouble = status.error().message();
    given_up_.insert(*joining_);
  }
  if (!status || !next) joining_.reset();
  return true;
}

// The VALs that belong to the shard, the table, and then the epoch that counts it.
Status CodedStore::admit() {
  const size_t shard = *joining_;
  Shard& each = (*shards_)[shard];
  each.super.incarnation = std::random_device{}();
  // A log of its own, above all that it ever wrote.
  uint64_t highest = each.super.log_floor;
  for (size_t segment = 0; segment < shape_.segments; ++segment) {
    AlignedBytes bytes(shape_.segment_bytes);
    ShardBatch batch(*shards_, Priority::scrub);
    batch.read(shard, shape_.segment_at(segment), bytes.slice());
    if (batch.run() != 0) return failing(each.path, batch.why());
    highest = std::max(highest, read_segment(shape_, shards_->store(), shard, segment, 0, bytes.span(), [](uint64_t, const FrameContent&) {}).count());
  }
  each.log = std::make_unique<ShardLog>(shape_, shards_->store(), shard);
  each.log->seen(highest);
  each.super.log_floor = highest + 1;
  std::vector<std::pair<StripePtr, ValRef>> vals;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, weak] : dirty_) {
      const StripePtr stripe = weak.lock();
      if (!stripe) continue;
      const auto position = static_cast<size_t>(std::find(stripe->shards.begin(), stripe->shards.end(), shard) - stripe->shards.begin());
      if (position == shape_.n()) continue;
      for (const auto& [block, newer] : stripe->overlay) {
        const bool belongs = position >= shape_.k || position == newer.val->chunk;
        if (belongs && (vals.empty() || vals.back().second != newer.val)) vals.emplace_back(stripe, newer.val);
      }
    }
  }
  std::sort(vals.begin(), vals.end());
  vals.erase(std::unique(vals.begin(), vals.end()), vals.end());
  if (mutated(Mutation::resync_without_vals)) vals.clear();
  for (const auto& [stripe, val] : vals) {
    AlignedBytes blocks(val->crcs.size() * kBlock);
    std::vector<Run> runs = {{Run::From::log, stripe, val->chunk, val->first, val->crcs.size(), val, 0, blocks.data()}};
    STOKER_TRY(fetch(runs, Priority::scrub));
    FrameBuilder frame;
    frame.add(ValItem{val->stamp, false, val->stripe, val->chunk, val->first, val->crcs, 0}, blocks.span());  // settled: it needs no COMMIT any more
    if (!each.log->fits(frame.bytes(), 1)) return failing(each.path, "its log is full");
    const LogFrame made = each.log->append(frame);
    ShardBatch batch(*shards_, Priority::scrub);
    batch.write(shard, made.offset, made.bytes.slice());
    if (batch.run() != 0) return failing(each.path, batch.why());
    const auto more = std::make_shared<Val>(*val);  // readers may be looking at the old one
    more->places.push_back({shard, made.blocks_at});
    more->held.push_back(made.segment);
    std::lock_guard lock(mutex_);
    for (auto& [block, newer] : stripe->overlay) {
      if (newer.val == val) newer.val = more;
    }
  }
  STOKER_TRY(checkpoint());  // on the joining shard too
  ShardBatch flush(*shards_, Priority::scrub);
  flush.sync(shard_bit(shard));
  if (flush.run() != 0) return failing(each.path, flush.why());
  STOKER_TRY(change_epoch(live() | shard_bit(shard)));
  if ((live() & shard_bit(shard)) == 0) return failing(each.path, each.trouble);
  {
    const std::lock_guard lock(mutex_);
    each.trouble.clear();
  }
  log().info("the shard '{}' is up to date and counts again", each.path);
  return {};
}

bool CodedStore::background_step() {
  if (const std::lock_guard lock(mutex_); refused_) return false;
  const auto mended = mend_step();
  if (mended && *mended) return true;
  const auto resynced = resync_step();
  if (resynced && *resynced) return true;
  const auto folded = fold_step(1);
  if (folded && *folded > 0) return true;
  if (!folded) log().warn("folding: {}", folded.error().message());
  return false;
}

// A chunk in which a reader found a bad block is compared with the others and written where it differs.
Result<bool> CodedStore::mend_step() {
  StripePtr stripe;
  size_t position = 0;
  {
    std::lock_guard lock(mutex_);
    if (refused_ || bad_.empty()) return false;
    position = bad_.begin()->first.second;
    stripe = bad_.begin()->second.lock();
    bad_.erase(bad_.begin());
  }
  if (!stripe || (live_positions(*stripe) >> position & 1) == 0) return true;
  const auto mended = rebuild(stripe, position);
  if (!mended) {
    log().warn("{}", mended.error().message());
    return true;
  }
  std::lock_guard lock(mutex_);
  counts_.mended_blocks += *mended;
  return true;
}

Future<void> CodedStore::repair() {
  Request request;
  request.work = [this]() -> Status {
    given_up_.clear();
    for (;;) {
      STOKER_ASSIGN(const bool mended, mend_step());
      STOKER_ASSIGN(const bool resynced, resync_step());
      if (!mended && !resynced) return {};
    }
  };
  Future<void> future = request.done.future();
  std::lock_guard lock(queue_mutex_);
  queue_.push_back(std::move(request));
  queued_.notify_all();
  return future;
}

}  // namespace stoker::coded
