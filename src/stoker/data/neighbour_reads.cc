#include "stoker/data/neighbour_reads.h"

#include <algorithm>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/data/source_reads.h"

namespace stoker::data {
namespace {

constexpr uint64_t kPieceAlign = 64;  // of what is read by itself

// The last read goes on to the end of this part, if it lies close behind it or overlaps it.
bool joins(const Piece& last, const Piece& part) {
  return last.object == part.object && part.offset >= last.offset &&
         part.offset <= last.offset + last.bytes + kJoinedGap &&
         part.offset + part.bytes - last.offset <= kJoinedMost;
}

}  // namespace

Status NeighbourRead::start(SourceReads& source) {
  starts_.push_back(0);
  for (uint64_t i = 0; i < of_.count; ++i) {
    STOKER_TRY(source.table().append(of_.sample + i, 0, pieces_));
    starts_.push_back(pieces_.size());
  }
  std::vector<Piece> reads;
  uint64_t end = 0;
  for (Piece& part : pieces_) {
    if (reads.empty() || !joins(reads.back(), part)) {
      end = align_up(end, kPieceAlign);
      reads.push_back({part.object, part.offset, 0, end});
    }
    Piece& read = reads.back();
    part.into = read.into + (part.offset - read.offset);
    read.bytes = std::max(read.bytes, part.offset + part.bytes - read.offset);
    end = read.into + read.bytes;
  }
  if (!source.table().has_packed()) {  // else they count as they are fetched
    for (const Piece& read : reads) asked_ += read.bytes;
    requests_ = reads.size();
  }
  memory_ = spares_->take(end);
  done_ = source.read(reads, memory_.slice().sub(0, end));
  return {};
}

std::span<const Piece> NeighbourRead::parts(uint64_t sample) const {
  const uint64_t number = sample - of_.sample;
  return std::span(pieces_).subspan(starts_[number], starts_[number + 1] - starts_[number]);
}

Result<NeighbourReads::Got> NeighbourReads::get(SourceReads& source, const Neighbours& of) {
  MutexLock lock(mutex_);
  NeighbourReadPtr& known = reads_[of];
  if (known && !(known->done().ready() && !known->done().wait())) return Got{known, false};
  auto made = std::make_shared<NeighbourRead>(of, spares_);
  if (const Status begun = made->start(source); !begun) {
    reads_.erase(of);
    return begun.error();
  }
  // Its memory stays until the store is done with it, whoever forgets it.
  made->done().on_done([made](const Result<uint64_t>&) {});
  known = std::move(made);
  return Got{known, true};
}

void NeighbourReads::keep(uint32_t source, uint64_t lane, uint64_t turn) {
  MutexLock lock(mutex_);
  const auto begin = reads_.lower_bound({source, lane, 0, 0, 0});
  const auto first = reads_.lower_bound({source, lane, turn, 0, 0});
  reads_.erase(begin, first);
  reads_.erase(reads_.lower_bound({source, lane, turn + 2, 0, 0}),
               reads_.lower_bound({source, lane + 1, 0, 0, 0}));
}

}  // namespace stoker::data
