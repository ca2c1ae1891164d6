// PARIX, speculative partial writes: the data chunk is overwritten in place; the parities log the
// new bytes as they are, and of a range that is written for the first time since the last fold also
// what it held before. A fold adds newest ^ original, whatever came between. So only first touches
// read.
//
// published: parities are sent the new bytes on speculation and ask for the original where they
// miss it: one more round trip. safe: the data node knows what was touched and sends the original
// along, in one record; its own intent closes the write hole.
#pragma once

#include "curm/range_map.h"
#include "curm/scheme.h"

namespace stoker::curm {

class Parix final : public Scheme {
 public:
  using Scheme::Scheme;
  Status update(const Update& update) override;
  Status fold(uint64_t stripe) override;
  Status recover(const std::set<NodeId>& replaced) override;

 private:
  // Bytes in a log: the range they were put for begins at `begin` of the record's payload.
  struct Where {
    LogPlace place;
    uint64_t begin = 0;
  };
  // What a parity knows of one data chunk. Both maps cover the same ranges.
  struct Known {
    RangeMap<Where> newest, original;
  };
  struct Side {
    std::map<int, Known> known;    // by position of the data chunk
    std::vector<LogPlace> places;  // of all its records
  };
  void index(const Chunk& parity, const LogPlace& place, const Record& record);
  // newest ^ original of every range that was touched; each is read once, however often it was
  // written.
  Changed read_differences(Errand& errand, const Chunk& parity, const Known& known) const;
  PlaceSlot fold_parity(Errand& errand, const Chunk& parity, const std::map<int, Known>& batch,
                        uint64_t fold_seq);
  Slot logical(Errand& errand, const Chunk& chunk) override;
  std::function<void()> rebuilt(const Chunk& lost, Errand& errand) override;

  // by data chunk: the parities know the original
  std::map<Chunk, RangeMap<bool>> touched_;
  std::map<Chunk, Side> sides_;  // by parity chunk
  Intents intents_;              // of data chunks
};

}  // namespace stoker::curm
