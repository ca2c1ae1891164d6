// VDL, versioned data difference: the new bytes go to the log of the data node and of every parity
// at once, straight from the client. Nothing is read, nothing computed, one round trip. Who reads
// before the fold asks the log of the data node.
//
// A fold of a stripe, in the four steps of the coded store: (1) the data nodes read the newest
// bytes out of their logs, then what is needed of their bases; as published, the client (the one
// writer) has the newest bytes still. (2) each parity computes its new bytes and stages them,
// flushed; (3) a commit with the fold's number, flushed, on all that take part; (4) all write in
// place, flush, and mark. A commit seen anywhere rolls the fold forward, else its stages are void.
// What is lost is decoded from bases, which agree between folds; then the live records are appended
// again, out of the log of another that has them.
#pragma once

#include "curm/fold.h"
#include "curm/overlay.h"
#include "curm/scheme.h"

namespace stoker::curm {

class Vdl : public Scheme {
 public:
  using Scheme::Scheme;
  Status update(const Update& update) override;
  Result<Value> read(const Chunk& chunk, uint64_t offset, uint64_t bytes) override;
  Status fold(uint64_t stripe) final;
  Status recover(const std::set<NodeId>& replaced) final;

 protected:
  // Whether ranges where so many data chunks are dirty are folded from the clean ones instead of
  // from old bytes and old parity.
  virtual bool reconstructs(int /*dirty*/) const { return false; }
  // Whether a record that newer ones cover whole is let go of at once. It may come back: what
  // overtook it then lies over it.
  virtual bool lets_go_early() const { return false; }
  // Writes new bytes of a clean stripe without a log: the four steps with the data staged as well;
  // acknowledged after the commit.
  Status write_through(uint64_t stripe, const Fold::Newest& newest);
  bool clean(uint64_t stripe) const { return dirty_.count(stripe) == 0; }

 private:
  // The update is the newest of its range. The places of records that it overtook, where they are
  // let go of.
  std::vector<LogPlace> put(const Update& update, uint64_t seq, std::vector<LogPlace> places);
  Result<Fold::Newest> newest_of(uint64_t stripe, const Overlay& overlay);
  enum class Why : uint8_t { fold, write };
  Status bring_in(uint64_t stripe, const Fold::Newest& newest, Why why);
  Status spread_commits(Recovered& found);
  Status resolve_folds(Recovered& found);
  Status append_again(Recovered& found, const std::set<NodeId>& replaced);
  void pick_up(const Chunk& lost, Round& gather) override;
  std::function<void()> rebuilt(const Chunk& lost, Errand& errand) override;

  std::map<uint64_t, Overlay> dirty_;   // by stripe
  std::vector<Overlay::Piece> picked_;  // for the chunk that is being rebuilt
};

}  // namespace stoker::curm
