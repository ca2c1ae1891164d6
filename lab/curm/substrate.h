// What an update scheme runs on: nodes that each keep base chunks and a log, and do what a round of
// messages asks of them.
//
// A scheme is written once, as rounds. A round goes from one place (the client, or a node) to
// several nodes at once; each node does its steps in order and answers; the round is over when all
// have. A Substrate runs rounds: in memory with every crash that can be (tests), on a modelled
// cluster that counts and times them, on real files (shard_cluster.h).
//
// What a crash leaves: steps `write`, `append` and `mark` of a node may survive or vanish, each by
// itself, until a later `flush` of that node is done; a write may also be torn at 512 bytes. So
// order between durable things is made by flushes, and between nodes by rounds. A released record
// may come back from the dead as long as it likes: its chunk's mark says that it is dead.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "curm/value.h"

namespace stoker::curm {

using NodeId = int;
inline constexpr NodeId kClient = -1;
// counted as framing, beside a record's payload
inline constexpr uint64_t kRecordHeaderBytes = 64;
inline constexpr uint64_t kChunkHeaderBytes = 4096;  // likewise, of a mark

// A chunk of a stripe: data at positions 0 to k-1, parity behind.
struct Chunk {
  uint64_t stripe = 0;
  int position = 0;
  bool operator==(const Chunk&) const = default;
  bool operator<(const Chunk& other) const {
    return std::tie(stripe, position) < std::tie(other.stripe, other.position);
  }
};

struct Geometry {
  int k = 6, m = 3, nodes = 9;
  uint64_t chunk_bytes = 1 << 20;
  uint64_t stripes = 0;
  NodeId node(const Chunk& chunk) const {
    return static_cast<NodeId>((chunk.stripe + static_cast<uint64_t>(chunk.position)) %
                               static_cast<uint64_t>(nodes));
  }
  size_t chunks() const { return static_cast<size_t>(k) + static_cast<size_t>(m); }
  Chunk parity(uint64_t stripe, int index) const { return {stripe, k + index}; }
};

// Where an appended record came to lie: beside others in the node's log, or in space reserved
// behind a chunk.
struct LogPlace {
  NodeId node = kClient;
  uint64_t id = 0;  // of the record, on its node; never used twice
  bool reserved = false;
  bool operator==(const LogPlace&) const = default;
  bool operator<(const LogPlace& other) const {
    return std::tie(node, id) < std::tie(other.node, other.id);
  }
};

// The scheme that a stripe was said to go by (scheme_switch.h), and the number of that change; 0:
// nothing was said.
struct Said {
  uint64_t seq = 0;
  uint8_t scheme = 0;
  bool operator==(const Said&) const = default;
};

// What stands in a log. `chunk` is the data chunk whose update it belongs to, or the parity that
// was staged.
struct Record {
  enum class Kind : uint8_t {
    value,     // the new bytes of a range of a data chunk
    delta,     // old ^ new of a range of a data chunk
    original,  // what a range held before it was written for the first time since the last fold
    parity,    // the new bytes of a range of a parity chunk (the intent to overwrite them)
    stage,     // the new bytes of all ranges that a fold changes in one chunk
    commit,    // all stages of this fold (seq) are durable: roll it forward
    epoch,     // begins an epoch; `dropped` names the updates that recovery decided against
  };
  struct Range {
    uint64_t offset = 0;
    Value value;
  };
  Kind kind = Kind::value;
  uint64_t epoch = 0, seq = 0;
  Chunk chunk;
  std::vector<Range> ranges;
  // with a value: what these ranges held, where the fold does not know it yet
  std::vector<Range> before = {};
  std::vector<uint64_t> dropped = {};
  uint8_t scheme = 0;  // whose it is, where several share a substrate (scheme_switch.h)
  // a value: the base is overwritten with it only when a commit stands in the log behind it
  bool needs_commit = false;
  uint64_t payload_bytes() const {
    uint64_t sum = 8 * dropped.size();
    for (const Range& range : ranges) sum += range.value.size();
    for (const Range& range : before) sum += range.value.size();
    return sum;
  }
};

// Filled while the round runs, used by later steps of the same errand or by the scheme afterwards.
using Slot = std::shared_ptr<Value>;
using PlaceSlot = std::shared_ptr<LogPlace>;

struct Step {
  enum class Kind : uint8_t { read, write, append, flush, mark, release, derive };
  // A part of what is read: of a chunk's base, or of a record in a log.
  struct Part {
    bool logged = false;
    // in the chunk; or in the record's payload: its ranges, then what was before
    uint64_t offset = 0, bytes = 0;
    LogPlace place;
  };
  Kind kind = Kind::read;
  // read, write, mark: whose base; append: the parity behind which space is reserved
  Chunk chunk;
  uint64_t offset = 0;  // write: in the chunk
  // read: joined in this order, one request; what is reserved behind a chunk comes along with it
  std::vector<Part> parts;
  Slot value;                      // read, derive: out; write: in
  std::function<Value()> compute;  // derive: the node computes, no I/O
  std::function<Record()> record;  // append: made when its turn comes, from slots filled before
  PlaceSlot place;                 // append: out
  // append: behind `chunk` (a random write), not in the log (a sequential one)
  bool reserved = false;
  // mark: all records of the stripe up to it are in the base; release: all up to it are settled
  uint64_t seq = 0;
  std::vector<LogPlace> released;  // release: their space
  std::optional<uint8_t> said;     // mark: the scheme that the stripe goes by from now on
};

// What one node does in a round.
class Errand {
 public:
  Errand(NodeId to, uint64_t sent_bytes) : node(to), sent(sent_bytes) {}

  Slot read(const Chunk& chunk, uint64_t offset, uint64_t bytes) {
    return gather(chunk, {{false, offset, bytes, {}}});
  }
  Slot gather(const Chunk& chunk, std::vector<Step::Part> parts);
  void write(const Chunk& chunk, uint64_t offset, Slot value);
  void write(const Chunk& chunk, uint64_t offset, Value value) {
    write(chunk, offset, std::make_shared<Value>(std::move(value)));
  }
  Slot derive(std::function<Value()> compute);
  PlaceSlot append(Record record);
  PlaceSlot append_when_ready(std::function<Record()> record);
  PlaceSlot append_behind(const Chunk& chunk, Record record);
  void flush() { add(Step::Kind::flush); }
  void mark(const Chunk& chunk, uint64_t seq, std::optional<uint8_t> said = {});
  void release(std::vector<LogPlace> places, uint64_t settled);

  NodeId node;
  uint64_t sent;          // bytes of payload in the message to it
  uint64_t answered = 0;  // and in its answer
  std::deque<Step> steps;

 private:
  Step& add(Step::Kind kind);
};

struct Round {
  enum class Kind : uint8_t {
    exchange,  // messages out, steps, answers
    // the client's message to the node that leads the update, which answers when it acknowledges
    entry,
    acknowledge,  // that answer
  };
  NodeId from = kClient;
  Kind kind = Kind::exchange;
  bool background = false;
  std::deque<Errand> errands;
  Errand& to(NodeId node, uint64_t sent = 0) { return errands.emplace_back(node, sent); }
};

// What is found on a node after a crash: intact records in the order they were appended, and what
// its chunk headers say.
struct NodeState {
  std::vector<std::pair<LogPlace, Record>> records;
  std::map<Chunk, uint64_t> folded;  // the seq of each chunk's last mark
  std::map<Chunk, Said> said;        // where something was said
  uint64_t settled = 0;              // of its last release
};

// One thread runs a scheme. An error of run() ends the scheme's life: what is durable is settled by
// a new one's recover().
class Substrate {
 public:
  virtual ~Substrate() = default;
  virtual Status run(Round& round) = 0;
  virtual Result<NodeState> scan(NodeId node) = 0;
};

}  // namespace stoker::curm
