// NeighbourReads: samples that follow one another come by one read, and stay until all batches of
// their window had them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "stoker/base/future.h"
#include "stoker/base/mutex.h"
#include "stoker/data/sample_table.h"
#include "stoker/data/sequence.h"
#include "stoker/data/spares.h"

namespace stoker::data {

class SourceReads;

// Parts of samples that lie closer together than this come by one read: to ask for them one by one
// costs more than the bytes between them.
inline constexpr uint64_t kJoinedGap = uint64_t{16} << 10;
// Longer reads are several: a store works on them at once.
inline constexpr uint64_t kJoinedMost = uint64_t{4} << 20;

// Neighbours in memory, or on their way there.
class NeighbourRead {
 public:
  NeighbourRead(const Neighbours& of, std::shared_ptr<Spares> spares)
      : of_(of), spares_(std::move(spares)) {}
  ~NeighbourRead() { spares_->give_back(std::move(memory_)); }
  NeighbourRead(const NeighbourRead&) = delete;
  NeighbourRead& operator=(const NeighbourRead&) = delete;

  // Asks the store. corruption: the index says of a sample what cannot be. Call once.
  Status start(SourceReads& source);
  // As SourceReads::read().
  const Future<uint64_t>& done() const { return done_; }
  uint64_t asked() const { return asked_; }
  uint64_t requests() const { return requests_; }
  // The parts of one of its samples, as they were read. Once it is done.
  std::span<const Piece> parts(uint64_t sample) const;
  const std::byte* at(const Piece& part) const { return memory_.data() + part.into; }

 private:
  Neighbours of_;
  std::shared_ptr<Spares> spares_;
  std::vector<Piece> pieces_;     // where each part lies in memory_
  std::vector<uint64_t> starts_;  // of the pieces of each sample
  Slot memory_;
  uint64_t asked_ = 0, requests_ = 0;
  Future<uint64_t> done_;
};
using NeighbourReadPtr = std::shared_ptr<const NeighbourRead>;

// Any thread.
class NeighbourReads {
 public:
  // spares: pieces of memory that are kept.
  explicit NeighbourReads(size_t spares) : spares_(std::make_shared<Spares>(spares)) {}

  struct Got {
    NeighbourReadPtr read;
    bool begun = false;  // by this call
  };
  // Starts to read them, unless that was done. A read that failed is tried anew.
  Result<Got> get(SourceReads& source, const Neighbours& of);
  // Forgets all of this lane but the turns [turn, turn + 1].
  void keep(uint32_t source, uint64_t lane, uint64_t turn);

 private:
  const std::shared_ptr<Spares> spares_;
  Mutex mutex_;
  std::map<Neighbours, NeighbourReadPtr> reads_ GUARDED_BY(mutex_);
};

}  // namespace stoker::data
