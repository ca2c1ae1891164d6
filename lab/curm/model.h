// A modelled cluster: nodes with one disk and one network card each, and clients. It carries no
// bytes. run() counts what a round does and keeps it; a Player then plays what was kept on a
// virtual clock.
#pragma once

#include <string_view>
#include <unordered_map>

#include "curm/substrate.h"

namespace stoker::curm {

// What a device takes. A disk with lanes works on so many requests at once, which share its
// bandwidth.
struct Device {
  std::string_view name;
  int lanes = 1;
  uint64_t random_read_ns = 0, random_write_ns = 0;  // before the first byte
  // likewise, where it begins where the last one ended, and for appends
  uint64_t next_ns = 0;
  uint64_t flush_ns = 0;
  uint64_t read_bytes_per_s = 0, write_bytes_per_s = 0;  // of all lanes together
  uint64_t link_bytes_per_s = 0;                         // of a card, each way
  uint64_t link_ns = 0;                                  // of a message, one way
};
// A data-centre NVMe disk with power-loss protection; a 7200 rpm disk. Both behind 10 Gb/s.
inline constexpr Device kSsd{
    "ssd", 8, 80'000, 30'000, 15'000, 10'000, 3'000'000'000, 1'800'000'000, 1'250'000'000, 30'000};
inline constexpr Device kHdd{"hdd",     1,           8'300'000,   8'300'000,     100'000,
                             4'200'000, 180'000'000, 180'000'000, 1'250'000'000, 30'000};

// The bytes that one of its lanes reads in the time that another request takes to begin.
inline uint64_t gap_max(const Device& device) {
  return device.random_read_ns * (device.read_bytes_per_s / static_cast<uint64_t>(device.lanes)) /
         1'000'000'000;
}

// Everything that is counted, exactly. Foreground: what updates do themselves; background: what
// folds do.
struct Counts {
  // foreground
  uint64_t reads = 0, random_writes = 0, sequential_writes = 0, flushes = 0, messages = 0,
           round_trips = 0;
  // foreground, disk
  uint64_t payload_bytes = 0, framing_bytes = 0;
  uint64_t background_reads = 0, background_writes = 0, background_payload_bytes = 0,
           background_framing_bytes = 0;
};

// The messages and round trips of a foreground round.
void count_messages(const Round& round, Counts& counts);

// A round as the player sees it.
struct Play {
  enum class Kind : uint8_t { read, write, append, flush };
  struct Step {
    Kind kind = Kind::read;
    uint64_t area = 0, at = 0;  // where on the disk; of appends the log
    uint64_t bytes = 0;
    uint64_t seeks = 1;
    uint64_t space = 0;  // bytes of log that are taken when it is done
  };
  struct Errand {
    NodeId node = 0;
    uint64_t sent = 0, answered = 0;
    std::vector<Step> steps;
  };
  NodeId from = kClient;
  Round::Kind kind = Round::Kind::exchange;
  uint64_t freed = 0;  // bytes of log given back: word of it goes along with other messages
  std::vector<Errand> errands;
};

// What a node reads of its log within one errand (a fold's or a rebuild's share of a stripe, an
// update's old bytes) it picks in the order in which it stands there: a seek for each record that
// does not follow the last, but a gap that is read sooner than it is jumped over is read along.
class Model final : public Substrate {
 public:
  explicit Model(const Device& device) : device_(device), gap_(gap_max(device)) {}
  Status run(Round& round) override;
  Result<NodeState> scan(NodeId) override {
    return fail(Code::unsupported, "a modelled cluster keeps no bytes and does not crash");
  }

  // The rounds since the last call, for the player.
  std::vector<Play> take() { return std::exchange(plays_, {}); }
  const Counts& counts() const { return counts_; }
  // What the rounds so far kept disks busy, all disks together; and how long they took one behind
  // the other, had each been alone: those of updates, those of folds.
  double busy_ns() const { return busy_ns_; }
  double path_ns(bool background) const { return path_ns_[background ? 1 : 0]; }
  // What comes from now on rebuilds lost chunks, and is not counted.
  void count_no_more() { counts_on_ = false; }

 private:
  struct Picked {
    uint64_t seeks = 0, bytes = 0;
  };
  Picked pick(const Errand& errand) const;
  Play::Step read(const Step& step, Picked& picked);
  Play::Step append(NodeId node, Step& step, bool background);
  void count(const Round& round, const Step& step, uint64_t bytes);
  double takes_ns(const Play::Step& step, int lanes) const;
  void add_cost(const Round& round, const Play& play);

  const Device device_;
  const uint64_t gap_;  // bytes of a log that are read as soon as jumped over
  std::vector<Play> plays_;
  Counts counts_;
  double busy_ns_ = 0, path_ns_[2] = {0, 0};
  struct Logged {
    uint64_t at = 0, bytes = 0;  // in its node's log
  };
  bool counts_on_ = true;
  uint64_t ids_ = 0;
  std::unordered_map<uint64_t, Logged> logged_;  // by record
  std::unordered_map<NodeId, uint64_t> log_ends_;
};

}  // namespace stoker::curm
