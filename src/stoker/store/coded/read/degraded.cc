// Reading what is lost or rotten: bases are decoded from the others of their rows, in memory from
// the cap.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/store/coded/read/reader.h"
#include "stoker/store/coded/read/row_reads.h"

namespace stoker::coded {
namespace {

constexpr size_t kDecodedAtOnce = 256;  // rows
constexpr uint64_t kDecodeShare = 16;   // a sixteenth of it, for the rows that are read at once

}  // namespace

// Reads that are left behind hold scratch a moment longer: whoever finds no room for a row waits
// for them before it is refused.
Result<ScratchPtr> Reader::take_scratch(size_t rows, size_t blocks_a_row,
                                        std::string_view who) const {
  for (bool last = false;;) {
    auto grant = budget_.take(rows * blocks_a_row * kBlock, who);
    if (grant)
      return std::make_shared<Scratch>(
          Scratch{std::move(*grant), spare_.take(rows * blocks_a_row * kBlock), rows});
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

namespace {

// Runs of one stripe that have the same rows.
struct SameRows {
  std::vector<Run> runs;
  size_t count() const { return runs.front().count; }
  SameRows part(size_t from, size_t rows) const {
    SameRows some;
    for (const Run& run : runs) some.runs.push_back(run.part(from, rows));
    return some;
  }
  uint32_t positions() const {
    uint32_t set = 0;
    for (const Run& run : runs) set |= uint32_t{1} << run.chunk;
    return set;
  }
};

std::vector<SameRows> same_rows(const std::vector<Run>& runs) {
  std::map<uint64_t, std::set<size_t>> cuts;  // by stripe: rows at which a run begins or ends
  for (const Run& run : runs) cuts[run.stripe->id].insert({run.first, run.first + run.count});
  std::map<std::pair<uint64_t, size_t>, SameRows> groups;  // stripe, first row
  for (const Run& run : runs) {
    const std::set<size_t>& at = cuts[run.stripe->id];
    for (auto begin = at.find(run.first); *begin < run.first + run.count; ++begin) {
      const size_t count = *std::next(begin) - *begin;
      groups[{run.stripe->id, *begin}].runs.push_back(run.part(*begin - run.first, count));
    }
  }
  std::vector<SameRows> all;
  all.reserve(groups.size());
  for (auto& [where, group] : groups) all.push_back(std::move(group));
  return all;
}

}  // namespace

// Bases, by decoding: so many rows at once. Those of the same rows are read together.
Status Reader::fetch_degraded(const std::vector<Run>& runs, Priority priority) {
  if (runs.empty()) return {};
  std::vector<SameRows> left = same_rows(runs);
  std::reverse(left.begin(), left.end());  // the next one last
  size_t rows_left = 0;
  for (const SameRows& group : left) rows_left += group.count();
  while (!left.empty()) {
    STOKER_ASSIGN(const ScratchPtr memory,
                  take_scratch(std::min(rows_left, kDecodedAtOnce), shape_.n(),
                               "decoding for a read of a coded store"));
    STOKER_CHECK(memory->rows > 0 && rows_left >= memory->rows);
    rows_left -= memory->rows;
    std::vector<SameRows> now;
    for (size_t rows = 0; rows < memory->rows;) {
      STOKER_CHECK(!left.empty());
      const size_t count = std::min(left.back().count(), memory->rows - rows);
      now.push_back(left.back().part(0, count));
      rows += count;
      if (count == left.back().count()) {
        left.pop_back();
      } else {
        left.back() = left.back().part(count, left.back().count() - count);
      }
    }
    std::vector<RowsWanted> wanted;
    size_t at = 0;
    for (const SameRows& group : now) {
      const Run& any = group.runs.front();
      const size_t bytes = shape_.n() * any.count * kBlock;
      wanted.push_back({any.stripe.get(), any.first, any.count, group.positions(),
                        memory->bytes.span().subspan(at, bytes)});
      at += bytes;
    }
    read_rows(wanted, memory, priority);
    if (memory->bytes.lost()) {
      left.insert(left.end(), now.rbegin(), now.rend());
      rows_left += memory->rows;
      continue;
    }
    for (size_t i = 0; i < now.size(); ++i) STOKER_TRY(take_rows(now[i].runs, wanted[i]));
  }
  return {};
}

// What came of these runs, all of the same rows.
Status Reader::take_rows(std::span<const Run> runs, const RowsWanted& rows) {
  for (const Run& run : runs) {
    if (!is_set(rows.wrong, run.chunk) || !run.stripe->overrides.empty()) continue;
    map_.lock()->bad[{run.stripe->id, run.chunk}] = run.stripe;
  }
  if (!rows.status) return rows.status;
  for (const Run& run : runs) {
    STOKER_CHECK(run.first == rows.first && run.count == rows.count);
    std::memcpy(run.into, rows.blocks.data() + run.chunk * run.count * kBlock, run.count * kBlock);
  }
  return {};
}

// Users who find nothing left of the cap are refused.
size_t Reader::rows_of_share(size_t rows, size_t blocks_a_row) const {
  const uint64_t share = budget_.cap() / kDecodeShare / (blocks_a_row * kBlock);
  return static_cast<size_t>(std::clamp<uint64_t>(share, 1, rows));
}

}  // namespace stoker::coded
