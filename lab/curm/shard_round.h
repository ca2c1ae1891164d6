// ShardRound: one round on a ShardCluster. Its errands go on together, in waves: what each can do
// next is one batch of transfers.
#pragma once

#include "curm/shard_cluster.h"

namespace stoker::curm {

// One thread, once.
class ShardRound {
 public:
  ShardRound(ShardCluster& cluster, Round& round) : cluster_(cluster), round_(round) {}
  Status run();

 private:
  using Node = ShardCluster::Node;
  struct Wave {
    Wave(Loop& loop, bool background)
        : batch(loop, background ? Priority::write_back : Priority::demand) {}
    IoBatch batch;
    std::deque<AlignedBytes> memory;
    std::vector<std::function<Status()>> after;
    std::set<NodeId> flushes;
    bool moved = false;
  };
  struct Runner {
    Errand* errand;
    size_t next = 0;
    bool aligned = false;  // the write that is next was brought to whole blocks
    // chunks that were read together with what is reserved behind them
    std::map<Chunk, std::vector<std::byte>> whole = {};
  };
  Status advance(Runner& runner, Wave& wave);
  Status reads(Runner& runner, Wave& wave);
  Status read(Runner& runner, Step& step, Wave& wave);
  Status read_reserved(Runner& runner, Step& step, Wave& wave);
  enum class Torn : uint8_t { refused, taken };
  void read_base(const Chunk& chunk, uint64_t offset, std::span<std::byte> into, Torn torn,
                 Wave& wave);
  static Status check_blocks(const ShardCluster::Header& header, const Node& where,
                             const Chunk& chunk, uint64_t first, std::span<std::byte> bytes,
                             Torn torn);
  Status read_record(const Step::Part& part, std::span<std::byte> into, Wave& wave);
  Status writes(Runner& runner, Wave& wave);
  void align(Runner& runner, Step& step, Wave& wave);
  void write(const Chunk& chunk, uint64_t offset, const Value& value, Wave& wave);
  Status append(Runner& runner, Step& step, Wave& wave);
  void mark(const Step& step, Wave& wave);
  // What was written to the file of this chunk is not durable.
  void changed(Node& node, const Chunk& chunk);
  template <typename Change>
  void count(Change change) {
    const std::lock_guard lock(cluster_.mutex_);
    change(cluster_.counts_);
  }
  Node& node(const Chunk& chunk) { return cluster_.node(cluster_.layout_.geometry.node(chunk)); }

  ShardCluster& cluster_;
  Round& round_;
};

}  // namespace stoker::curm
