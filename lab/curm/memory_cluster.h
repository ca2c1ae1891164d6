// A cluster in memory, for tests: real bytes, every crash that the Substrate's contract allows,
// lost nodes. Seeded.
#pragma once

#include <functional>
#include <optional>
#include <random>
#include <set>
#include <variant>

#include "curm/crash_cluster.h"

namespace stoker::curm {

class MemoryCluster final : public CrashCluster {
 public:
  MemoryCluster(const Geometry& geometry, uint64_t seed)
      : geometry_(geometry), random_(seed), nodes_(static_cast<size_t>(geometry.nodes)) {}

  Status run(Round& round) override;  // errands take turns in a random order, step by step
  Result<NodeState> scan(NodeId node) override;

  void mutate(std::function<void(Round&)> bug) override { bug_ = std::move(bug); }
  void crash_after(uint64_t durable_steps) override { left_ = durable_steps; }
  bool crashed() const override { return crashed_; }
  void restart(const std::set<NodeId>& lost) override;
  void wipe(NodeId node) override { nodes_[static_cast<size_t>(node)] = {}; }

  std::vector<std::byte> base(const Chunk& chunk) override;
  uint64_t records() const override;

 private:
  struct Contents {
    std::map<Chunk, std::vector<std::byte>> base;
    std::map<uint64_t, Record> log;
    std::map<Chunk, uint64_t> folded;
    std::map<Chunk, Said> said;
    uint64_t settled = 0;
  };
  struct Change {
    Step::Kind kind;
    Chunk chunk;
    uint64_t offset = 0, seq = 0, id = 0;
    Value value;
    Record record;
    std::vector<LogPlace> released;
    std::optional<uint8_t> said;
  };
  struct Node {
    Contents now, durable;
    std::vector<Change> pending;  // not flushed
  };
  void apply(Contents& contents, const Change& change, bool torn);
  Status step(Node& node, NodeId id, Step& step);
  Result<Value> read(const Node& node, const Step& step) const;

  const Geometry geometry_;
  std::mt19937_64 random_;
  std::vector<Node> nodes_;
  std::function<void(Round&)> bug_;
  std::optional<uint64_t> left_;
  bool crashed_ = false;
  uint64_t ids_ = 0;
};

}  // namespace stoker::curm
