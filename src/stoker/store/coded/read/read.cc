// Reading: what is newer comes from the logs, all else from the bases; what is lost or rotten is
// decoded.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"
#include "stoker/base/log.h"
#include "stoker/store/coded/mutation.h"
#include "stoker/store/coded/read/reader.h"

namespace stoker::coded {
namespace {

constexpr uint64_t kStripesLikely = 2;  // of which bases are read before their headers are known

Error no_object(std::string_view key) {
  return fail(Code::not_found, "there is no object '{}'", key);
}

Status check_range(std::string_view key, uint64_t object_bytes, uint64_t offset, size_t bytes) {
  if (offset <= object_bytes && bytes <= object_bytes - offset) return {};
  return fail(Code::invalid_argument,
              "bytes {} to {} are beyond the end of '{}', which has {}; resize it first", offset,
              offset + bytes, key, object_bytes);
}

}  // namespace

// A read under way: whole blocks, into memory of its own.
struct Reader::Reading {
  explicit Reading(CommittedMap& map) : pins(map) {}
  void drop_memory() {
    scratch = SparePiece();
    grant = Grant();
    there.clear();
  }

  HeaderPins pins;
  Grant grant;
  SparePiece scratch;
  std::set<ChunkAt> there;        // of these, bases may stand in the memory already
  std::vector<StripePtr> pinned;  // of which it counts as a reader
  std::vector<Run> runs;
  std::vector<StripePtr> doubted;  // of which headers of the parities alone do not do
};

// Reads [offset, offset + size) of the object as it is at one moment; null: as the table has it.
// Once more by all headers where those of the parities do not do; and into other memory where a
// disk was given up: it is asked for nothing any more.
Status Reader::read(std::string_view key, const ObjectPtr& given, uint64_t offset, Slice into,
                    Priority priority) {
  Reading reading(map_);
  for (;;) {
    STOKER_TRY(plan(reading, key, given, offset, into.size, priority));
    if (into.size == 0) return {};
    Status status;
    if (reading.doubted.empty())
      status = fetch(std::exchange(reading.runs, {}), priority, &reading.doubted);
    release(reading);
    const auto doubted = std::exchange(reading.doubted, {});
    if (reading.scratch.lost()) {
      reading.drop_memory();
    } else if (!doubted.empty()) {
      if (const auto failed = load_headers(doubted, priority); !failed.empty())
        return failed.begin()->second.with("'" + std::string(key) + "'");
    } else if (!status) {
      return status.error().with("'" + std::string(key) + "'");
    } else {
      std::memcpy(into.data, reading.scratch.data() + offset % kBlock, into.size);
      return {};
    }
  }
}

// Where all of it is, by headers that are known. From here on it counts as a reader of its stripes.
Status Reader::plan(Reading& reading, std::string_view key, const ObjectPtr& given, uint64_t offset,
                    size_t bytes, Priority priority) {
  const uint64_t begin = align_down(offset, kBlock);
  const uint64_t end = align_up(offset + bytes, kBlock);
  for (;;) {
    auto map = map_.lock();
    const ObjectPtr object = given ? given : map->table.find(key);
    if (!object) return no_object(key);
    if (!given) STOKER_TRY(check_range(key, object->bytes, offset, bytes));
    if (bytes == 0) return {};
    if (reading.scratch.size() == 0) {
      map.unlock();
      STOKER_ASSIGN(reading.grant, budget_.take(end - begin, "a read of a coded store"));
      reading.scratch = spare_.take(end - begin);
      continue;
    }
    std::vector<StripePtr> stripes, unknown;
    bool wait = false;
    for (size_t i = begin / shape_.stripe_bytes();
         i <= (end - 1) / shape_.stripe_bytes() && i < object->stripes.size(); ++i) {
      const StripePtr& stripe = object->stripes[i];
      if (!stripe) continue;
      stripes.push_back(stripe);
      if (stripe->folding) wait = true;
      if (!stripe->headers) unknown.push_back(stripe);
    }
    if (!unknown.empty()) {
      // also those that are there, or they might go for those that come
      for (const StripePtr& stripe : stripes) reading.pins.add(*map, stripe);
      const std::vector<Run> likely =
          likely_bases(*map, *object, begin, end, reading.scratch.data());
      map.unlock();
      if (const Status loaded = load_unknown(reading, unknown, likely, priority); !loaded)
        return loaded.error().with("'" + std::string(key) + "'");
      continue;
    }
    if (wait) {
      map.wait();
      continue;
    }
    take_pieces(reading, *object, begin, end);
    break;
  }
  std::erase_if(reading.runs, [&](const Run& run) {
    return reading.there.contains({run.stripe->id, run.chunk}) && is_there(run);
  });
  return {};
}

// Loads the headers, and reads meanwhile what is likely to be wanted by them.
Status Reader::load_unknown(Reading& reading, const std::vector<StripePtr>& unknown,
                            const std::vector<Run>& likely, Priority priority) {
  ShardBatch bases(shards_, priority);
  for (const Run& run : likely)
    bases.read(run.stripe->shards[run.chunk],
               shape_.block_at(run.stripe->slots[run.chunk], run.first),
               {run.into, run.count * kBlock, kLosableHeap});
  bases.start();
  if (const auto failed = load_for_reading(unknown, priority); !failed.empty())
    return failed.begin()->second;
  (void)bases.finish();  // what failed of them is read where it is needed
  for (size_t i = 0; i < likely.size(); ++i) {
    if (bases.ok(i)) reading.there.emplace(likely[i].stripe->id, likely[i].chunk);
  }
  if (reading.scratch.lost()) reading.drop_memory();  // other memory, by headers that are known
  return {};
}

// With the map locked.
void Reader::take_pieces(Reading& reading, const Object& object, uint64_t begin, uint64_t end) {
  each_piece(object, begin, end, reading.scratch.data(), [&](const Run& piece) {
    const StripePtr& stripe = piece.stripe;
    if (!stripe) {
      std::memset(piece.into, 0, piece.count * kBlock);
      return;
    }
    // a fold waits for those who read by these headers, and they for it
    STOKER_CHECK(stripe->headers && !stripe->folding);
    if (!stripe->headers->whole() && has_zeros(piece)) reading.doubted.push_back(stripe);
    plan_chunk(stripe, piece.chunk, piece.first, piece.count, piece.into, reading.runs);
    HeaderCache::used(*stripe);
    reading.pinned.push_back(stripe);
    ++stripe->readers;
  });
}

// The runs go before a fold goes on: it waits for us to let the logs go. The headers of what is
// doubted stay until they were used whole.
void Reader::release(Reading& reading) {
  reading.runs.clear();
  std::vector<StripePtr>& doubted = reading.doubted;
  std::sort(doubted.begin(), doubted.end());
  doubted.erase(std::unique(doubted.begin(), doubted.end()), doubted.end());
  const auto map = map_.lock();
  for (const StripePtr& stripe : doubted) reading.pins.add(*map, stripe);
  for (const StripePtr& stripe : std::exchange(reading.pinned, {})) {
    STOKER_CHECK(stripe->readers > 0);
    if (--stripe->readers == 0) map_.changed();
  }
}

// What of it lies in one chunk each: `piece` says which rows, and where in `memory` they go. No
// stripe: zeros.
template <typename Take>
void Reader::each_piece(const Object& object, uint64_t begin, uint64_t end, std::byte* memory,
                        const Take& take) const {
  for (uint64_t at = begin; at < end;) {
    const uint64_t in_stripe = at % shape_.stripe_bytes();
    const size_t index = at / shape_.stripe_bytes();
    Run piece;
    piece.stripe = index < object.stripes.size() ? object.stripes[index] : nullptr;
    piece.chunk = in_stripe / shape_.chunk_bytes;
    piece.first = in_stripe % shape_.chunk_bytes / kBlock;
    piece.count = std::min<uint64_t>(shape_.rows() - piece.first, (end - at) / kBlock);
    piece.into = memory + (at - begin);
    at += piece.count * kBlock;
    take(piece);
  }
}

// Where the headers of a stripe are not known, and nothing of it is newer: its bases. To read them
// while the headers come is to wait once, not twice. None of a stripe of which a disk is away: what
// its rows take is read together. None of many stripes: there the headers are the smaller wait.
std::vector<Run> Reader::likely_bases(const MapState& map, const Object& object, uint64_t begin,
                                      uint64_t end, std::byte* memory) const {
  std::vector<Run> bases;
  if (end - begin > kStripesLikely * shape_.stripe_bytes()) return bases;
  std::set<uint64_t> without_a_disk;
  each_piece(object, begin, end, memory, [&](Run& piece) {
    const StripePtr& stripe = piece.stripe;
    if (!stripe || stripe->headers || !stripe->overlay.empty() || !stripe->overrides.empty())
      return;
    if (!map.is_live(stripe->shards[piece.chunk])) without_a_disk.insert(stripe->id);
    piece.from = Run::From::base;
    bases.push_back(std::move(piece));
  });
  std::erase_if(bases, [&](const Run& run) { return without_a_disk.contains(run.stripe->id); });
  return bases;
}

// Whether all its blocks stand in memory already, each as its CRC says.
bool Reader::is_there(const Run& run) const {
  if (run.from != Run::From::base) return false;
  const std::vector<uint32_t> crcs = crcs_of(run);
  for (size_t b = 0; b < crcs.size(); ++b) {
    if (crc32c(run.into + b * kBlock, kBlock) != crcs[b]) return false;
  }
  return !crcs.empty();
}

// Blocks that were never written, by headers that are in memory: there is nothing to compare with.
bool Reader::has_zeros(const Run& piece) const {
  for (size_t row = piece.first; row < piece.first + piece.count; ++row) {
    const size_t at = row * shape_.k + piece.chunk;
    if (piece.stripe->headers->versions[at] == 0 && !piece.stripe->overlay.contains(at))
      return true;
  }
  return false;
}

// Where the newest bytes of these rows are, as runs; zeros are filled in at once.
void Reader::plan_chunk(const StripePtr& stripe, size_t chunk, size_t first, size_t count,
                        std::byte* into, std::vector<Run>& runs) const {
  STOKER_CHECK(stripe->headers && chunk < shape_.k && first + count <= shape_.rows());
  for (size_t row = first; row < first + count; ++row) {
    std::byte* memory = into + (row - first) * kBlock;
    Run next{Run::From::zeros, stripe, chunk, row, 1, nullptr, 0, memory, {}};
    const auto newer = stripe->overlay.find(row * shape_.k + chunk);
    if (newer != stripe->overlay.end()) {
      next.from = Run::From::log;
      next.val = newer->second.val;
      next.index = newer->second.index;
    } else if (stripe->headers->versions[row * shape_.k + chunk] != 0) {
      next.from = Run::From::base;
      next.headers = stripe->headers;
    }
    if (next.from == Run::From::zeros) {
      std::memset(memory, 0, kBlock);
      continue;
    }
    if (!runs.empty()) {
      Run& last = runs.back();
      const bool goes_on = last.from == next.from && last.stripe == stripe && last.chunk == chunk &&
                           last.first + last.count == row &&
                           last.into + last.count * kBlock == memory && last.val == next.val &&
                           (!next.val || last.index + last.count == next.index);
      if (goes_on) {
        ++last.count;
        continue;
      }
    }
    runs.push_back(std::move(next));
  }
}

// What those of its blocks should be.
std::vector<uint32_t> Reader::crcs_of(const Run& run) const {
  STOKER_CHECK(run.from != Run::From::zeros && run.count > 0);
  STOKER_CHECK(!run.val || run.index + run.count <= run.val->crcs.size());
  std::vector<uint32_t> crcs;
  if (mutated(Mutation::skip_crc)) return crcs;
  crcs.reserve(run.count);
  for (size_t b = 0; b < run.count; ++b) {
    crcs.push_back(run.from == Run::From::log
                       ? run.val->crcs[run.index + b]
                       : run.headers->crcs[(run.first + b) * shape_.n() + run.chunk]);
  }
  return crcs;
}

// The blocks of these runs that did not come, or not right: neighbours as one run.
std::vector<Run> Reader::wrong_of(const std::vector<Run>& runs, const std::vector<size_t>& ops,
                                  const ShardBatch& batch) const {
  STOKER_CHECK(ops.size() == runs.size());
  std::vector<Run> wrong;
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    bool goes_on = false;
    for (size_t b = 0; b < run.count; ++b) {
      if (ops[i] != SIZE_MAX && batch.right(ops[i], b)) {
        goes_on = false;
      } else if (std::exchange(goes_on, true)) {
        ++wrong.back().count;
      } else {
        wrong.push_back(run.part(b, 1));
      }
    }
  }
  return wrong;
}

// A base that is not read where it belongs: its shard is away, or newer blocks stand in for some.
bool Reader::is_lost_in(ShardSet live, const Run& run) const {
  return run.from == Run::From::base &&
         ((live & shard_bit(run.stripe->shards[run.chunk])) == 0 || !run.stripe->overrides.empty());
}

// Takes out of `runs` those bases that stand in rows of which others of them have to be decoded:
// these are read together, as what is wanted of a row is most of what decoding it takes.
std::vector<Run> Reader::take_lost_rows(std::vector<Run>& runs, ShardSet live_now) const {
  std::set<std::pair<uint64_t, size_t>> rows;  // stripe, row
  for (const Run& run : runs) {
    for (size_t b = 0; b < run.count && is_lost_in(live_now, run); ++b)
      rows.emplace(run.stripe->id, run.first + b);
  }
  if (rows.empty()) return {};
  std::vector<Run> direct, with_lost;
  for (const Run& run : runs) {
    for (size_t b = 0; b < run.count;) {
      const auto decoded = [&](size_t at) {
        return run.from == Run::From::base && rows.contains({run.stripe->id, run.first + at});
      };
      size_t end = b + 1;
      while (end < run.count && decoded(end) == decoded(b)) ++end;
      (decoded(b) ? with_lost : direct).push_back(run.part(b, end - b));
      b = end;
    }
  }
  runs = std::move(direct);
  return with_lost;
}

namespace {

// Of bases that are not right, or not there.
std::vector<StripePtr> not_whole(std::span<const Run> bases) {
  std::vector<StripePtr> stripes;
  for (const Run& run : bases) {
    if (!run.headers->whole()) stripes.push_back(run.stripe);
  }
  return stripes;
}

}  // namespace

// All runs at once from where they should be; what of them is not right there from elsewhere, again
// all at once.
Status Reader::fetch(std::vector<Run> runs, Priority priority, std::vector<StripePtr>* doubted) {
  const auto doubt = [doubted](std::span<const Run> bases) {
    std::vector<StripePtr> stripes = not_whole(bases);
    STOKER_CHECK(doubted || stripes.empty());
    if (doubted) *doubted = std::move(stripes);
    return doubted && !doubted->empty();
  };
  const ShardSet live_now = map_.live();
  std::vector<Run> lost = take_lost_rows(runs, live_now);
  if (doubt(lost)) return {};
  ShardBatch batch(shards_, priority);
  std::vector<size_t> ops(runs.size(), SIZE_MAX);
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    const Slice into{run.into, run.count * kBlock, kLosableHeap};
    if (run.from == Run::From::log) {
      if (const Place* place = run.val->live_place(live_now, 0))
        ops[i] = batch.read(place->shard, place->offset + run.index * kBlock, into, crcs_of(run));
    } else {
      const size_t shard = run.stripe->shards[run.chunk];
      if ((live_now & shard_bit(shard)) != 0 && run.stripe->overrides.empty())
        ops[i] = batch.read(shard, shape_.block_at(run.stripe->slots[run.chunk], run.first), into,
                            crcs_of(run));
    }
  }
  batch.run();
  std::vector<Run> logs = wrong_of(runs, ops, batch);
  const auto bases = std::stable_partition(
      logs.begin(), logs.end(), [](const Run& run) { return run.from == Run::From::log; });
  if (doubt({bases, logs.end()})) return {};
  {
    const auto map = map_.lock();
    const size_t miss = priority == Priority::scrub ? 0 : 1;
    for (const Run& run : lost) run.stripe->misses += is_lost_in(live_now, run) ? miss : 0;
    // on live shards, where they belong: the background mends them
    for (auto run = bases; run != logs.end(); ++run) {
      run->stripe->misses += miss;
      map->bad[{run->stripe->id, run->chunk}] = run->stripe;
    }
  }
  lost.insert(lost.end(), std::make_move_iterator(bases), std::make_move_iterator(logs.end()));
  logs.erase(bases, logs.end());
  STOKER_TRY(fetch_from_logs(std::move(logs), priority));
  return fetch_degraded(lost, priority);
}

// Whole runs from the second copy on, each from what the one before had wrong; then, as one bad
// sector takes a whole transfer with it, block by block.
Status Reader::fetch_from_logs(std::vector<Run> left, Priority priority) {
  const ShardSet live_now = map_.live();
  for (const bool singly : {false, true}) {
    if (singly) {
      std::vector<Run> blocks;
      for (const Run& run : left) {
        for (size_t b = 0; b < run.count; ++b) blocks.push_back(run.part(b, 1));
      }
      left = std::move(blocks);
    }
    for (size_t copy = singly ? 0 : 1; !left.empty(); ++copy) {
      ShardBatch batch(shards_, priority);
      std::vector<size_t> ops(left.size(), SIZE_MAX);
      for (size_t i = 0; i < left.size(); ++i) {
        const Run& run = left[i];
        if (const Place* place = run.val->live_place(live_now, copy))
          ops[i] = batch.read(place->shard, place->offset + run.index * kBlock,
                              {run.into, run.count * kBlock, kLosableHeap}, crcs_of(run));
      }
      if (batch.empty()) break;
      batch.run();
      left = wrong_of(left, ops, batch);
    }
  }
  if (left.empty()) return {};
  const Run& run = left.front();
  return fail(Code::corruption,
              "an update of block {} in chunk {} of stripe {} of {} cannot be read: its copy is "
              "intact on no "
              "shard that is present. Bring missing disks back, or restore the object from a copy",
              run.first, run.chunk, run.stripe->id, map_.name());
}

Result<AlignedBytes> Reader::read_val(const StripePtr& stripe, const ValRef& val, size_t index,
                                      size_t count, Priority priority) {
  for (;;) {
    AlignedBytes blocks(count * kBlock);
    const Status read = fetch({{Run::From::log, stripe, val->chunk, val->first + index, count, val,
                                index, blocks.data()}},
                              priority);
    if (blocks.lost()) continue;
    if (!read) return read.error();
    return blocks;
  }
}

// What no log has intact is zeros in them, and told. The record goes on without it: as long as that
// is there its checksum fails, and what is older is not taken for it.
void Reader::fetch_records(const std::vector<Run>& runs, Priority priority) {
  const Status fetched = fetch(runs, priority);
  if (fetched) return;
  for (const Run& run : runs) {
    for (size_t b = 0; b < run.count; ++b) {
      std::byte* const block = run.into + b * kBlock;
      if (crc32c(block, kBlock) != run.val->crcs[run.index + b]) std::memset(block, 0, kBlock);
    }
  }
  log().warn("{}", fetched.error().what);
}

}  // namespace stoker::coded
