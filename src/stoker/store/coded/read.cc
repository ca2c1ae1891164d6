// Reading: what is newer comes from the logs, all else from the bases; what is lost or rotten is decoded.
#include <algorithm>
#include <bit>
#include <cstring>

#include "stoker/base/crc32c.h"
#include "stoker/store/coded/coded_store.h"
#include "stoker/store/coded/headers.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {
namespace {

constexpr const char* kWhere = "store/coded/read";

Error no_object(std::string_view key) { return make_error(Code::not_found, "there is no object '" + std::string(key) + "'", kWhere); }
Error no_snapshot(std::string_view name) { return make_error(Code::not_found, "there is no snapshot '" + std::string(name) + "': a coded store has none", kWhere); }

Status check_range(std::string_view key, uint64_t object_bytes, uint64_t offset, size_t bytes) {
  if (offset <= object_bytes && bytes <= object_bytes - offset) return {};
  return make_error(Code::invalid_argument, "bytes " + std::to_string(offset) + " to " + std::to_string(offset + bytes) + " are beyond the end of '" + std::string(key) + "', which has " +
                    std::to_string(object_bytes) + "; resize it first", kWhere);
}

bool is_set(uint32_t set, size_t position) { return (set >> position & 1) != 0; }

}  // namespace

ObjectInfo CodedStore::info_of(std::string_view key, const Object& object) const {
  ObjectInfo info{std::string(key), object.bytes, object.chunk_bytes, object.number, {}};
  if (classes_.known(class_id(key))) info.expected = classes_.of(class_id(key));
  return info;
}

Result<ObjectInfo> CodedStore::stat(std::string_view key, std::string_view snapshot) {
  if (!snapshot.empty()) return no_snapshot(snapshot);
  std::lock_guard lock(mutex_);
  const ObjectPtr object = table_.find(key);
  if (!object) return no_object(key);
  return info_of(key, *object);
}

Result<std::vector<ObjectInfo>> CodedStore::list(std::string_view prefix, std::string_view snapshot) {
  if (!snapshot.empty()) return no_snapshot(snapshot);
  std::lock_guard lock(mutex_);
  std::vector<ObjectInfo> found;
  for (auto at = table_.objects().lower_bound(prefix); at != table_.objects().end() && at->first.starts_with(prefix); ++at) {
    found.push_back(info_of(at->first, *at->second));
  }
  return found;
}

Future<void> CodedStore::read(std::string_view key, uint64_t offset, Slice into, ReadOptions options) {
  if (!options.snapshot.empty()) return no_snapshot(options.snapshot);
  if (options.priority != Priority::scrub) {
    pace_.used();
    std::lock_guard lock(mutex_);
    if (table_.find(key)) classes_.see(class_id(key), {class_volume(key), false, offset, into.size});
  }
  auto promise = std::make_shared<Promise<void>>();
  Future<void> future = promise->future();
  readers_->run([this, promise, key = std::string(key), offset, into, priority = options.priority] { promise->complete(read_now(key, nullptr, offset, into, priority)); });
  return future;
}

ShardSet CodedStore::live() const {
  std::lock_guard lock(mutex_);
  return live_;
}

uint32_t CodedStore::live_positions(const Stripe& stripe) const {
  const ShardSet set = live();
  uint32_t positions = 0;
  for (size_t i = 0; i < stripe.shards.size(); ++i) positions |= (set & shard_bit(stripe.shards[i])) != 0 ? uint32_t{1} << i : 0;
  return positions;
}

// Reads [offset, offset + size) of the object as it is at one moment; null: as the table has it.
Status CodedStore::read_now(std::string_view key, const ObjectPtr& given, uint64_t offset, Slice into, Priority priority) {
  const uint64_t begin = align_down(offset, kBlock);
  std::vector<StripePtr> pinned;
  std::vector<Run> runs;
  AlignedBytes scratch;
  Grant grant;
  for (;;) {
    StripePtr unknown;
    std::unique_lock lock(mutex_);
    const ObjectPtr object = given ? given : table_.find(key);
    if (!object) return no_object(key);
    if (!given) STOKER_TRY(check_range(key, object->bytes, offset, into.size));
    if (into.size == 0) return {};
    if (scratch.size() == 0) {
      lock.unlock();
      const uint64_t bytes = align_up(offset + into.size, kBlock) - begin;
      STOKER_ASSIGN(grant, runtime_.budget.take(bytes, "a read of a coded store"));
      scratch = AlignedBytes(bytes);
      continue;
    }
    const size_t first = begin / shape_.stripe_bytes();
    const size_t last = (offset + into.size - 1) / shape_.stripe_bytes();
    bool wait = false;
    for (size_t i = first; i <= last && i < object->stripes.size(); ++i) {
      const StripePtr& stripe = object->stripes[i];
      if (stripe && stripe->folding) wait = true;
      if (stripe && !stripe->headers) unknown = stripe;
    }
    if (unknown) {
      lock.unlock();
      if (const Status loaded = load_headers(unknown, priority); !loaded) return loaded.error().with("'" + std::string(key) + "'");
      continue;
    }
    if (wait) {
      unpinned_.wait(lock);
      continue;
    }
    for (uint64_t at = begin; at < offset + into.size;) {
      const uint64_t in_stripe = at % shape_.stripe_bytes();
      const size_t index = at / shape_.stripe_bytes();
      const size_t row = in_stripe % shape_.chunk_bytes / kBlock;
      const size_t count = std::min<uint64_t>(shape_.rows() - row, (align_up(offset + into.size, kBlock) - at) / kBlock);
      const StripePtr stripe = index < object->stripes.size() ? object->stripes[index] : nullptr;
      std::byte* memory = scratch.data() + (at - begin);
      if (stripe) {
        plan_chunk(stripe, in_stripe / shape_.chunk_bytes, row, count, memory, runs);
        pinned.push_back(stripe);
        ++stripe->readers;
      } else {
        std::memset(memory, 0, count * kBlock);
      }
      at += count * kBlock;
    }
    break;
  }
  const Status status = fetch(runs, priority);
  runs.clear();  // before a fold goes on: it waits for us to let the logs go
  {
    std::lock_guard lock(mutex_);
    for (const StripePtr& stripe : pinned) {
      if (--stripe->readers == 0) unpinned_.notify_all();
    }
  }
  if (!status) return status.error().with("'" + std::string(key) + "'");
  if (into.size > 0) std::memcpy(into.data, scratch.data() + (offset - begin), into.size);
  return {};
}

// Reads the header pages of all live chunks. Two threads may do so at once: the first one's counts.
Status CodedStore::load_headers(const StripePtr& stripe, Priority priority) {
  {
    std::lock_guard lock(mutex_);
    if (stripe->headers) return {};
  }
  RawHeaders raw(shape_);
  std::string why;
  if (!read_headers(*stripe, priority, raw, why)) return make_error(Code::io, "none of the headers of stripe " + std::to_string(stripe->id) + " can be read: " + why, kWhere);
  Headers merged = raw.merge(shape_);
  std::lock_guard lock(mutex_);
  if (!stripe->headers) stripe->headers = std::move(merged);
  return {};
}

// Takes what can be read of the header pages of all live chunks; false: nothing.
bool CodedStore::read_headers(const Stripe& stripe, Priority priority, RawHeaders& raw, std::string& why) {
  const uint32_t positions = live_positions(stripe);
  std::vector<AlignedBytes> memory;
  std::vector<Area> areas;
  std::vector<size_t> at;
  for (size_t i = 0; i < shape_.n(); ++i) {
    if (!is_set(positions, i)) continue;
    areas.push_back({stripe.shards[i], shape_.slot_at(stripe.slots[i]), memory.emplace_back(header_bytes(shape_)).slice()});
    at.push_back(i);
  }
  why = read_areas(*shards_, priority, areas);
  for (size_t i = 0; i < areas.size(); ++i) raw.take(shape_, shards_->store(), stripe.id, at[i], memory[i].span());
  return std::any_of(areas.begin(), areas.end(), [](const Area& area) { return area.any(); });
}

// Where the newest bytes of these rows are, as runs; zeros are filled in at once.
void CodedStore::plan_chunk(const StripePtr& stripe, size_t chunk, size_t first, size_t count, std::byte* into, std::vector<Run>& runs) const {
  for (size_t row = first; row < first + count; ++row) {
    std::byte* memory = into + (row - first) * kBlock;
    Run next{Run::From::zeros, stripe, chunk, row, 1, nullptr, 0, memory};
    const auto newer = stripe->overlay.find(row * shape_.k + chunk);
    if (newer != stripe->overlay.end()) {
      next.from = Run::From::log;
      next.val = newer->second.val;
      next.index = newer->second.index;
    } else if (stripe->headers->versions[row * shape_.k + chunk] != 0) {
      next.from = Run::From::base;
    }
    if (next.from == Run::From::zeros) {
      std::memset(memory, 0, kBlock);
      continue;
    }
    if (!runs.empty()) {
      Run& last = runs.back();
      const bool goes_on = last.from == next.from && last.stripe == stripe && last.chunk == chunk && last.first + last.count == row && last.into + last.count * kBlock == memory &&
                           last.val == next.val && (!next.val || last.index + last.count == next.index);
      if (goes_on) {
        ++last.count;
        continue;
      }
    }
    runs.push_back(std::move(next));
  }
}

// All runs at once from where they should be; those that fail there one by one from elsewhere.
Status CodedStore::fetch(std::vector<Run>& runs, Priority priority) {
  const ShardSet live_now = live();
  ShardBatch batch(*shards_, priority);
  std::vector<size_t> ops(runs.size(), SIZE_MAX);
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    const Slice into{run.into, run.count * kBlock, -1};
    if (run.from == Run::From::log) {
      const Place& place = run.val->places.front();
      if ((live_now & shard_bit(place.shard)) != 0) ops[i] = batch.read(place.shard, place.offset + run.index * kBlock, into);
    } else {
      const size_t shard = run.stripe->shards[run.chunk];
      if ((live_now & shard_bit(shard)) != 0 && run.stripe->overrides.empty()) ops[i] = batch.read(shard, shape_.block_at(run.stripe->slots[run.chunk], run.first), into);
    }
  }
  batch.run();
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    bool good = ops[i] != SIZE_MAX && batch.ok(ops[i]);
    for (size_t b = 0; good && b < run.count; ++b) {
      const uint32_t crc = run.from == Run::From::log ? run.val->crcs[run.index + b] : run.stripe->headers->crcs[(run.first + b) * shape_.n() + run.chunk];
      good = mutated(Mutation::skip_crc) || crc32c(run.into + b * kBlock, kBlock) == crc;
    }
    if (good) continue;
    STOKER_TRY(run.from == Run::From::log ? fetch_from_log(run, priority) : fetch_degraded(run, priority));
  }
  return {};
}

// Block by block from whichever copy is intact.
Status CodedStore::fetch_from_log(const Run& run, Priority priority) {
  const ShardSet live_now = live();
  for (size_t b = 0; b < run.count; ++b) {
    bool good = false;
    for (const Place& place : run.val->places) {
      if ((live_now & shard_bit(place.shard)) == 0) continue;
      AlignedBytes block(kBlock);
      ShardBatch batch(*shards_, priority);
      batch.read(place.shard, place.offset + (run.index + b) * kBlock, block.slice());
      if (batch.run() != 0 || crc32c(block.data(), kBlock) != run.val->crcs[run.index + b]) continue;
      std::memcpy(run.into + b * kBlock, block.data(), kBlock);
      good = true;
      break;
    }
    if (good) continue;
    return make_error(Code::corruption, "block " + std::to_string(run.first + b) + " of chunk " + std::to_string(run.chunk) + " of stripe " + std::to_string(run.stripe->id) +
                      " is in the logs of no live shard intact: bring missing disks back, or restore the object from a copy", kWhere);
  }
  return {};
}

Status CodedStore::fetch_degraded(const Run& run, Priority priority) {
  {
    std::lock_guard lock(mutex_);
    const bool live = (live_ & shard_bit(run.stripe->shards[run.chunk])) != 0;
    if (live && run.stripe->overrides.empty()) bad_[{run.stripe->id, run.chunk}] = run.stripe;
    run.stripe->misses += priority == Priority::scrub ? 0 : 1;
  }
  AlignedBytes blocks(shape_.n() * run.count * kBlock);
  STOKER_TRY(read_rows(*run.stripe, run.first, run.count, uint32_t{1} << run.chunk, blocks.span(), priority));
  std::memcpy(run.into, blocks.data() + run.chunk * run.count * kBlock, run.count * kBlock);
  return {};
}

namespace {

// The state of read_rows: which blocks of the rows are there and right.
class RowSet {
 public:
  RowSet(const Shape& shape, const Headers& headers, size_t first, size_t count, std::span<std::byte> blocks)
      : shape_(shape), headers_(headers), first_(first), count_(count), blocks_(blocks), have_(count, 0) {
    for (size_t r = 0; r < count; ++r) {
      const bool blank = row_is_blank(shape, headers, first + r);
      for (size_t c = 0; c < shape.n(); ++c) {
        const bool zeros = c < shape.k ? headers.versions[(first + r) * shape.k + c] == 0 : blank;
        if (!zeros) continue;
        std::memset(at(c, r), 0, kBlock);
        have_[r] |= uint32_t{1} << c;
      }
    }
  }
  std::byte* at(size_t c, size_t r) const { return blocks_.data() + (c * count_ + r) * kBlock; }
  uint32_t have(size_t r) const { return have_[r]; }
  bool all_have(size_t c) const {
    return std::all_of(have_.begin(), have_.end(), [c](uint32_t have) { return is_set(have, c); });
  }
  bool known(size_t c, size_t r) const { return c < shape_.k ? headers_.versions[(first_ + r) * shape_.k + c] != kUnknown : !headers_.unsound[(first_ + r) * shape_.m + c - shape_.k]; }
  bool intact(size_t c, size_t r) const { return crc32c(at(c, r), kBlock) == headers_.crcs[(first_ + r) * shape_.n() + c]; }
  // What was read of chunk c (or failed to be: `ok`) is taken where it is right.
  void took(size_t c, bool ok) {
    for (size_t r = 0; r < count_; ++r) {
      if (ok && !is_set(have_[r], c) && known(c, r) && intact(c, r)) have_[r] |= uint32_t{1} << c;
      // A block that was zeros all along was overwritten by what stood in its place.
      if (c < shape_.k && headers_.versions[(first_ + r) * shape_.k + c] == 0) std::memset(at(c, r), 0, kBlock);
      if (c >= shape_.k && row_is_blank(shape_, headers_, first_ + r)) std::memset(at(c, r), 0, kBlock);
    }
  }
  bool enough(uint32_t wanted) const {
    return std::all_of(have_.begin(), have_.end(), [&](uint32_t have) { return (have & wanted) == wanted || static_cast<size_t>(std::popcount(have)) >= shape_.k; });
  }
  // Fills in the wanted blocks of row r; false: too few are there, or the result is wrong.
  bool complete(const codec::ErasureCode& code, size_t r, uint32_t wanted) {
    const uint32_t missing = wanted & ~have_[r];
    if (missing == 0) return true;
    if (static_cast<size_t>(std::popcount(have_[r])) < shape_.k) return false;
    std::vector<codec::Source> sources(shape_.n());
    std::vector<codec::Target> targets(shape_.n());
    for (size_t c = 0; c < shape_.n(); ++c) {
      if (is_set(have_[r], c)) sources[c].bytes = {at(c, r), kBlock};
      if (is_set(missing, c)) targets[c].bytes = {at(c, r), kBlock};
    }
    if (!code.decode(sources, targets)) return false;
    for (size_t c = 0; c < shape_.n() && !mutated(Mutation::decode_unchecked); ++c) {
      // An unsound parity has no checksum to compare with; it is computed from blocks that have. A data block of no known version has none either.
      if (is_set(missing, c) && (known(c, r) ? !intact(c, r) : c < shape_.k)) return false;
    }
    return true;
  }

 private:
  const Shape& shape_;
  const Headers& headers_;
  const size_t first_, count_;
  const std::span<std::byte> blocks_;
  std::vector<uint32_t> have_;
};

}  // namespace

Status CodedStore::read_rows(const Stripe& stripe, size_t first, size_t count, uint32_t wanted, std::span<std::byte> blocks, Priority priority, uint32_t avoid) {
  RowSet rows(shape_, *stripe.headers, first, count, blocks);
  const uint32_t available = live_positions(stripe) & ~avoid;
  const auto read_chunks = [&](uint32_t positions) {
    ShardBatch batch(*shards_, priority);
    std::vector<std::pair<size_t, std::vector<size_t>>> reads;
    for (size_t c = 0; c < shape_.n(); ++c) {
      if (!is_set(positions, c)) continue;
      auto& [chunk, ops] = reads.emplace_back(c, std::vector<size_t>());
      const bool moved = stripe.overrides.lower_bound(first * shape_.n()) != stripe.overrides.lower_bound((first + count) * shape_.n());
      const size_t step = moved ? 1 : count;  // blocks of which some lie in the log are read one by one
      for (size_t r = 0; r < count; r += step) {
        const auto over = stripe.overrides.find((first + r) * shape_.n() + c);
        const Slice into{rows.at(c, r), step * kBlock, -1};
        if (over != stripe.overrides.end()) {
          ops.push_back(batch.read(over->second.place.shard, over->second.place.offset, into));
        } else {
          ops.push_back(batch.read(stripe.shards[c], shape_.block_at(stripe.slots[c], first + r), into));
        }
      }
    }
    batch.run();
    for (const auto& [chunk, ops] : reads) {
      rows.took(chunk, std::all_of(ops.begin(), ops.end(), [&](size_t op) { return batch.ok(op); }));
    }
  };
  // First what is wanted, and where that is not there, enough of the others, data before parity.
  uint32_t chosen = 0;
  for (size_t c = 0; c < shape_.n(); ++c) {
    if (is_set(wanted & available, c) && !rows.all_have(c)) chosen |= uint32_t{1} << c;
  }
  const uint32_t wanted_first = chosen;
  read_chunks(chosen);
  if (!rows.enough(wanted) || (wanted & ~available) != 0) {
    const auto must_decode = [&] {
      for (size_t r = 0; r < count; ++r) {
        if ((wanted & ~rows.have(r)) != 0) return true;
      }
      return false;
    };
    if (must_decode()) {
      uint32_t more = 0;
      size_t sure = static_cast<size_t>(std::popcount(wanted_first));
      for (size_t c = 0; c < shape_.n() && sure < shape_.k; ++c) {
        if (!is_set(available, c) || is_set(wanted_first, c)) continue;
        if (!rows.all_have(c)) more |= uint32_t{1} << c;
        ++sure;
      }
      read_chunks(more);
      uint32_t rest = available & ~wanted_first & ~more;
      for (size_t c = 0; c < shape_.n(); ++c) {
        if (rows.all_have(c)) rest &= ~(uint32_t{1} << c);
      }
      if (!rows.enough(wanted)) read_chunks(rest);
    }
  }
  uint64_t decoded = 0;
  for (size_t r = 0; r < count; ++r) {
    decoded += static_cast<uint64_t>(std::popcount(wanted & ~rows.have(r)));
    if (rows.complete(code_, r, wanted)) continue;
    return make_error(Code::corruption, "row " + std::to_string(first + r) + " of stripe " + std::to_string(stripe.id) + " has only " + std::to_string(std::popcount(rows.have(r))) + " intact blocks of the " +
                      std::to_string(shape_.k) + " it needs: bring missing disks back, or restore the object from a copy", kWhere);
  }
  if (decoded > 0) {
    std::lock_guard lock(mutex_);
    counts_.decoded_blocks += decoded;
  }
  return {};
}

}  // namespace stoker::coded
