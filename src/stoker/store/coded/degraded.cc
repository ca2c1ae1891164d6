// Reading what is lost or rotten: bases are decoded from the others of their rows, in memory from
// the cap.
#include <algorithm>
#include <cstring>
#include <utility>

#include "stoker/store/coded/reader.h"
#include "stoker/store/coded/row_reads.h"

namespace stoker::coded {
namespace {

constexpr size_t kDecodedAtOnce = 256;   // rows
constexpr uint64_t kShareOfTheCap = 16;  // a sixteenth of it, for the rows that are read at once

}  // namespace

// Reads that are left behind hold scratch a moment longer: whoever finds no room for a row waits
// for them before it is refused.
Result<ScratchPtr> Reader::take_scratch(size_t rows, size_t blocks_a_row,
                                        std::string_view who) const {
  for (bool last = false;;) {
    auto grant = budget_.take(rows * blocks_a_row * kBlock, who);
    if (grant)
      return std::make_shared<Scratch>(
          Scratch{std::move(*grant), AlignedBytes::faulted(rows * blocks_a_row * kBlock), rows});
    if (last) return grant.error();
    // none: the last of them may have come just now
    if (rows == 1) last = !shards_.stragglers().await();
    rows = std::max<size_t>(1, rows / 2);
  }
}

void Reader::read_rows(std::span<RowsWanted> all, std::shared_ptr<const void> memory,
                       Priority priority) {
  RowReads reads(shards_, map_.live(), all, std::move(memory), priority);
  finish_rows(reads);
}

void Reader::finish_rows(RowReads& reads) {
  const uint64_t decoded = reads.finish(code_);
  if (decoded == 0) return;
  const auto map = map_.lock();
  map->counts.decoded_blocks += decoded;
}

// Bases, by decoding: so many rows at once, of as many runs.
Status Reader::fetch_degraded(std::vector<Run> left, Priority priority) {
  if (left.empty()) return {};
  {
    const auto map = map_.lock();
    for (const Run& run : left) {
      const bool live = (map->live & shard_bit(run.stripe->shards[run.chunk])) != 0;
      if (live && run.stripe->overrides.empty()) map->bad[{run.stripe->id, run.chunk}] = run.stripe;
      run.stripe->misses += priority == Priority::scrub ? 0 : 1;
    }
  }
  std::reverse(left.begin(), left.end());  // the next one last
  size_t rows_left = 0;
  for (const Run& run : left) rows_left += run.count;
  while (!left.empty()) {
    STOKER_ASSIGN(const ScratchPtr memory,
                  take_scratch(std::min(rows_left, kDecodedAtOnce), shape_.n(),
                               "decoding for a read of a coded store"));
    rows_left -= memory->rows;
    std::vector<Run> now;
    for (size_t rows = 0; rows < memory->rows;) {
      const size_t count = std::min(left.back().count, memory->rows - rows);
      now.push_back(left.back().part(0, count));
      rows += count;
      if (count == left.back().count) {
        left.pop_back();
      } else {
        left.back() = left.back().part(count, left.back().count - count);
      }
    }
    std::vector<RowsWanted> wanted;
    size_t at = 0;
    for (const Run& run : now) {
      wanted.push_back({run.stripe.get(), run.first, run.count, uint32_t{1} << run.chunk,
                        memory->bytes.span().subspan(at, shape_.n() * run.count * kBlock)});
      at += shape_.n() * run.count * kBlock;
    }
    read_rows(wanted, memory, priority);
    if (memory->bytes.lost()) {
      left.insert(left.end(), now.rbegin(), now.rend());
      rows_left += memory->rows;
      continue;
    }
    for (size_t i = 0; i < now.size(); ++i) {
      const Run& run = now[i];
      if (!wanted[i].status) return wanted[i].status;
      std::memcpy(run.into, wanted[i].blocks.data() + run.chunk * run.count * kBlock,
                  run.count * kBlock);
    }
  }
  return {};
}

// Users who find nothing left of the cap are refused.
size_t Reader::rows_of_share(size_t rows, size_t blocks_a_row) const {
  const uint64_t share = budget_.cap() / kShareOfTheCap / (blocks_a_row * kBlock);
  return static_cast<size_t>(std::clamp<uint64_t>(share, 1, rows));
}

}  // namespace stoker::coded
