// An update scheme: how new bytes of a data chunk reach the chunk and the parities of its stripe.
// docs/curm.md compares them.
//
// Each scheme is one file over the Substrate. What they share is here: sequence numbers, the rounds
// that every scheme makes, and what recovery has in common: deciding which updates count, and
// rebuilding lost chunks. One thread; one update after the other (the caller holds a stripe while
// it is updated or folded; different stripes of one scheme may overlap in time on the substrate).
#pragma once

#include <map>
#include <memory>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "curm/substrate.h"

namespace stoker::curm {

enum class Form : uint8_t {
  published,  // as in the paper: nothing is flushed, a crash may leave data and parity apart
  // intents, epochs, a flush before every acknowledgement: a crash leaves each update whole or
  // absent
  safe,
};

struct Update {
  Chunk chunk;  // of data
  uint64_t offset = 0;
  Value value;
};

// What orders updates. Schemes that share a substrate draw from one, so that a chunk's mark is
// above whatever any of them did to it.
struct Numbers {
  uint64_t epoch = 1, seq = 0;
};

// Of rounds: how long they keep each disk busy, and how long they take one behind the other,
// divided by how many go side by side.
struct Cost {
  double busy_ns = 0, path_ns = 0;
};

struct Setup {
  Substrate* substrate = nullptr;  // outlives the scheme
  Geometry geometry;
  codec::ErasureCode code;
  Form form = Form::safe;
  // behind each parity chunk, or for a hot stripe in a log, where a scheme reserves space
  uint64_t reserved_bytes = 256 << 10;
  std::shared_ptr<Numbers> numbers = nullptr;  // its own, where none are given
  // the stripes whose lost chunks it rebuilds; all, where nothing is said
  std::function<bool(uint64_t stripe)> owns = nullptr;
  // a gap between ranges of a chunk that a fold reads along, sooner than a second request
  uint64_t gap_max = 0;
  // what the substrate's rounds have cost so far; nothing, where it does not tell
  std::function<Cost()> cost = nullptr;
};

class Scheme {
 public:
  explicit Scheme(const Setup& setup)
      : setup_(setup), numbers_(setup.numbers ? setup.numbers : std::make_shared<Numbers>()) {}
  virtual ~Scheme() = default;
  Scheme(const Scheme&) = delete;
  Scheme& operator=(const Scheme&) = delete;

  // Acknowledged when it returns. The range lies inside the chunk.
  virtual Status update(const Update& update) = 0;
  // Pieces of one stripe that were written together. Unless a scheme knows better, one after the
  // other.
  virtual Status update_together(const std::vector<Update>& pieces);
  // The newest bytes of a range of a data chunk: those of its base, unless a scheme keeps newer
  // ones in logs.
  virtual Result<Value> read(const Chunk& chunk, uint64_t offset, uint64_t bytes);
  // Brings everything pending in the stripe into its base chunks and lets go of its records.
  virtual Status fold(uint64_t stripe) = 0;
  // After a crash, of a new scheme over the old substrate, before anything else: settles, rolls
  // forward, folds, and rebuilds all chunks of the nodes in `replaced`, which come blank. Of form
  // safe.
  virtual Status recover(const std::set<NodeId>& replaced) = 0;
  // A lost chunk of a stripe in service, newest content, from k others: written where the spare of
  // the stripe is.
  virtual Result<Value> rebuild(const Chunk& lost);

  // Bytes that were logged (one copy each) since their stripe was folded last, and fill the logs;
  // and the stripes, the one longest untouched first.
  virtual uint64_t logged_bytes() const { return logged_bytes_; }
  uint64_t logged_bytes(uint64_t stripe) const;
  uint64_t last_seq() const { return numbers_->seq; }
  virtual std::vector<uint64_t> pending() const;
  Status fold_all();
  // Room in the logs of all nodes that was set aside for stripes, at its most.
  virtual uint64_t reserved_peak_bytes() const { return 0; }
  // The stripes to fold when the logs hold as much as they may: all, unless a scheme knows better.
  virtual std::vector<uint64_t> make_room(uint64_t logged_bytes_max) const;

 protected:
  // A record that recovery found and that still counts.
  struct Survivor {
    NodeId node;
    LogPlace place;
    Record record;
  };
  struct Recovered {
    std::vector<Survivor> updates;  // settled ones, by seq
    std::vector<Survivor> folds;    // stages and commits, by seq
    std::map<Chunk, uint64_t> folded;
    std::vector<LogPlace> places;  // of all records, dropped ones too
    uint64_t folded_of(const Chunk& chunk) const;
  };

  const Geometry& geometry() const { return setup_.geometry; }
  const codec::ErasureCode& code() const { return setup_.code; }
  bool safe() const { return setup_.form == Form::safe; }
  int k() const { return setup_.geometry.k; }
  int m() const { return setup_.geometry.m; }
  const Setup& setup() const { return setup_; }
  NodeId node(const Chunk& chunk) const { return setup_.geometry.node(chunk); }
  // The chunk of the stripe that lies on the node.
  Chunk chunk_on(uint64_t stripe, NodeId node) const;

  uint64_t next_seq() { return ++numbers_->seq; }
  Status run(Round& round) { return setup_.substrate->run(round); }
  Record record(Record::Kind kind, uint64_t seq, const Chunk& chunk, uint64_t offset,
                Value value) const;

  // The client hands the update to the node of its chunk: what that node does first is added by the
  // caller.
  static Round enter(const Update& update, NodeId leader);
  Status acknowledge(NodeId leader);
  // A record appended, and flushed where the form is safe.
  PlaceSlot log(Errand& errand, Record record) const;
  // Ranges of a chunk and their new bytes, which may be derived only when their turn comes.
  using Changed = std::vector<std::pair<uint64_t, Slot>>;
  // Durable, before the chunk is overwritten with it.
  PlaceSlot append_stage(Errand& errand, const Chunk& chunk, uint64_t fold_seq,
                         const Changed& changed) const;
  // What was written in place is durable, then marked: all records of the chunk up to the fold are
  // dead.
  static void flush_and_mark(Errand& errand, const Chunk& chunk, uint64_t fold_seq);
  // Of chunks that are overwritten before they are folded: the records that hold the new bytes
  // until then, on the chunk's own node.
  using Intents = std::map<Chunk, std::vector<LogPlace>>;
  Status overwrite(const Update& update);
  // Of the stripe's chunks: flushes and marks them; their intents are `done` with.
  void fold_overwritten(Round& round, uint64_t stripe, uint64_t fold_seq, Intents& intents,
                        std::vector<LogPlace>& done) const;
  // The settled watermark and the places, on every node they are on.
  Status release(const std::vector<LogPlace>& places);

  // Settles what was found on the nodes that are not replaced, and begins a new epoch on all.
  Result<Recovered> settle(const std::set<NodeId>& replaced);
  // Writes what was staged over its chunk again, and marks it. Harmless twice.
  Status roll_forward(const Survivor& stage);
  // The same of every stage whose chunk is not marked yet, where a stage is its own commit.
  Status roll_forward_stages(Recovered& recovered);
  // Rebuilds the bases of replaced nodes by decoding bases, which agree; marks them with what the
  // others of the stripe say.
  Status rebuild_bases(const std::set<NodeId>& replaced, const Recovered& recovered);

  // The newest content of a chunk as its node can tell it alone; for decoding. The default is the
  // base.
  virtual Slot logical(Errand& errand, const Chunk& chunk);
  // What a rebuild reads beside the k sources, in the round that gathers them. `rebuilt` follows
  // when it was run.
  virtual void pick_up(const Chunk& /*lost*/, Round& /*gather*/) {}
  // The errand writes the lost chunk's base anew, as `logical` of its sources gave it. What was
  // pending of it and is not in that base is appended there again; else it is forgotten. What is
  // returned is called when the errand is done.
  virtual std::function<void()> rebuilt(const Chunk& lost, Errand& errand) = 0;

  void count_logged(uint64_t stripe, uint64_t bytes);
  // of what was counted as logged: overtaken by newer bytes
  void count_dead(uint64_t stripe, uint64_t bytes);
  void count_folded(uint64_t stripe);

 private:
  const Setup setup_;
  const std::shared_ptr<Numbers> numbers_;
  struct Dirt {
    uint64_t bytes = 0, touched = 0;
  };
  std::map<uint64_t, Dirt> dirt_;          // by stripe
  std::map<uint64_t, uint64_t> by_touch_;  // touched -> stripe
  uint64_t touches_ = 0;
  uint64_t logged_bytes_ = 0;
};

// By name, of kSchemes. Null for any other.
std::unique_ptr<Scheme> make_scheme(std::string_view name, const Setup& setup);
inline constexpr std::string_view kSchemes[] = {"fo",    "fl",  "pl",   "plr",
                                                "parix", "vdl", "curm", "curm-reserve"};
// Those with rounds of their own: what curm-reserve sends is curm's, only when it folds is not.
inline constexpr std::span<const std::string_view> kProtocols = std::span(kSchemes).first(7);

}  // namespace stoker::curm
