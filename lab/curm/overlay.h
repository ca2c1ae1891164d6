// Overlay: the records of one stripe that stand in logs and are not in its bases yet. It knows
// which of them hold the newest bytes and where they lie, and has rounds read them. One thread's,
// like the scheme that it belongs to.
#pragma once

#include <map>
#include <vector>

#include "curm/range_map.h"
#include "curm/substrate.h"

namespace stoker::curm {

class Overlay {
 public:
  struct Logged {
    int position = 0;  // of the data chunk
    uint64_t offset = 0, bytes = 0;
    std::vector<LogPlace> places;  // the data node's in front, where it has one
    Value kept = {};               // where the writer keeps it in memory: then no log is asked
  };
  // A part of a record, `at` in its chunk; after the round that was asked, it stands at `begin` of
  // `from`.
  struct Piece {
    uint64_t seq = 0, at = 0, bytes = 0;
    Slot from = nullptr;
    uint64_t begin = 0;
    Value value() const { return from->slice(begin, bytes); }
  };

  // The record is the newest of its range. What of the others now holds no newest byte.
  std::vector<uint64_t> put(uint64_t seq, Logged logged);
  // Nothing, for a record that was forgotten.
  void add_place(uint64_t seq, const LogPlace& place, bool in_front);
  void lose_places(NodeId node);
  Logged forget(uint64_t seq);
  std::vector<LogPlace> places() const;
  bool knows(uint64_t seq) const { return logged_.count(seq) != 0; }
  int position_of(uint64_t seq) const { return logged_.at(seq).position; }

  // The newest bytes of a range of a data chunk.
  std::vector<Piece> newest(int position, uint64_t at, uint64_t bytes) const;
  // The records of a data chunk that hold newest bytes, whole.
  std::vector<Piece> live(int position) const;
  // Has the round read the pieces: of each log in one request, and where a node to which the round
  // goes anyway has one, there.
  void ask(Round& round, const Chunk& chunk, std::vector<Piece>& pieces) const;

 private:
  std::map<int, RangeMap<uint64_t>> owners_;  // by position: the record that holds the newest bytes
  std::map<uint64_t, Logged> logged_;         // by seq
};

}  // namespace stoker::curm
