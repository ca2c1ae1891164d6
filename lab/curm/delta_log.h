// What FL, PL and PLR share: each parity node keeps the differences of its stripe's data chunks,
// and folds them into its chunk by itself.
//
// The fold is local: new parity bytes are staged in one record and flushed (this is its commit),
// written in place, flushed, and the chunk is marked with the fold's number: records up to it are
// dead. What a parity chunk says, base and log together, is the same before and after, so no other
// node takes part. Applying twice is harmless.
#pragma once

#include "curm/range_map.h"
#include "curm/scheme.h"

namespace stoker::curm {

class DeltaLog : public Scheme {
 public:
  using Scheme::Scheme;
  Status fold(uint64_t stripe) final;
  Status recover(const std::set<NodeId>& replaced) final;

 protected:
  // Sends the difference to every parity of the round and appends it there; where, by parity, is
  // known once the round was run.
  std::vector<PlaceSlot> send_delta(Round& round, const Chunk& data, uint64_t offset,
                                    const Value& delta, uint64_t seq) const;
  void index_delta(const Chunk& data, uint64_t offset, uint64_t bytes, uint64_t seq,
                   const std::vector<PlaceSlot>& places);

  // The data node's own share of a fold: what of its log goes into the base. Called before the
  // parities let go of theirs.
  virtual Status fold_data(uint64_t stripe, uint64_t fold_seq) = 0;
  // A settled record of a data chunk, in order of seq; `alive`: its chunk was not folded since.
  virtual Status redo(const Survivor& survivor, bool alive) = 0;
  // The records are behind the parity chunk, and the fold reads and writes all of it in one go.
  virtual bool reserves() const { return false; }
  uint64_t reserved_used(const Chunk& parity) const;
  Slot logical(Errand& errand, const Chunk& chunk) override;
  std::function<void()> rebuilt(const Chunk& lost, Errand& errand) override;

 private:
  struct Entry {
    int data = 0;  // position of the chunk that changed
    uint64_t offset = 0, bytes = 0, seq = 0;
    LogPlace place;
  };
  using Entries = std::vector<Entry>;
  Slot load(Errand& errand, const Chunk& parity, const Entries& entries) const;
  Changed derive(Errand& errand, const Chunk& parity, const Entries& entries) const;
  // Null where nothing is staged.
  PlaceSlot fold_parity(Round& round, const Chunk& parity, uint64_t fold_seq);

  std::map<Chunk, Entries> entries_;  // by parity chunk
};

}  // namespace stoker::curm
