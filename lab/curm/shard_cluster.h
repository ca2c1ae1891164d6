// ShardCluster: the Substrate on real files. A node is a folder with base chunks in slots, the log
// in segments, and a head that says whose it is. docs/formats/curm_shards.md has the bytes, and why
// a crash loses nothing.
//
// Rounds of several threads may be under way at once, where they concern different stripes (who
// runs them holds the stripe). What waits to be flushed on a node goes along with whoever flushes
// it first. Only safe forms run here: a record that was appended is read, and found after a crash,
// once its errand flushed it.
//
// A block that differs from its checksum is an error of the round, which ends the scheme's life;
// opening again counts the node that it is on as lost, and with more than m such nodes says so. A
// node that is not there, stale or damaged comes back blank: recover() of the scheme fills it, then
// admit() makes it a member.
#pragma once

#include <condition_variable>
#include <set>
#include <string>

#include "curm/model.h"
#include "curm/mutation.h"
#include "curm/shard_log.h"

namespace stoker::curm {

struct ShardOptions {
  uint64_t segment_bytes = 16 << 20;
  // of payload behind each parity chunk; twice that is taken on the disk, for frames
  uint64_t reserved_bytes = 0;
  // false: the paths are names of simulated disks; no folders, no locks
  bool files = true;
  // opening reads every block, so that damage counts before anything is decided
  bool verify = true;
};

class ShardCluster final : public Substrate {
 public:
  static Result<std::unique_ptr<ShardCluster>> make(Loop& loop,
                                                    const std::vector<std::string>& paths,
                                                    const Geometry& geometry,
                                                    const ShardOptions& options);
  // Paths in any order; what is not there is taken for a lost node. Then
  // scheme.recover(replaced()), then admit().
  static Result<std::unique_ptr<ShardCluster>> open(Loop& loop,
                                                    const std::vector<std::string>& paths,
                                                    const ShardOptions& options);
  ~ShardCluster() override;
  ShardCluster(const ShardCluster&) = delete;
  ShardCluster& operator=(const ShardCluster&) = delete;

  Status run(Round& round) override;
  Result<NodeState> scan(NodeId node) override;

  const Geometry& geometry() const { return layout_.geometry; }
  uint64_t reserved_bytes() const { return layout_.reserve_bytes / 2; }
  const std::set<NodeId>& replaced() const { return replaced_; }
  // a sentence for each replaced node
  const std::vector<std::string>& troubles() const { return troubles_; }
  // Recovery is done: what was replaced counts from now on.
  Status admit();

  // What was done since the last call, in the terms of the model, framing too. What the disks
  // really moved is told by the Loop.
  Counts take_counts();
  uint64_t live_records() const;  // epochs apart
  // all base chunks are read and written around the page cache
  bool direct() const { return direct_; }

 private:
  friend class ShardRound;
  struct Header : ChunkHeader {
    // blocks that may have been overwritten since the header was written: a record says with what
    std::vector<bool> flux;
  };
  struct Node {
    explicit Node(std::string where) : path(std::move(where)) {}
    std::string path;
    NodeHead head;
    FileId head_file = -1, data_file = -1, parity_file = -1;
    int lock_fd = -1;
    bool named = false;
    std::unique_ptr<ShardLog> log;
    NodeState found;  // until admit()
    // Guarded by the cluster's mutex. A header is used by who holds its stripe.
    std::map<Chunk, Header> headers;
    uint64_t changes = 0, flushed = 0;
    bool flushing = false, data_dirty = false, parity_dirty = false;
  };
  ShardCluster(Loop& loop, const ShardOptions& options) : loop_(loop), options_(options) {}

  Node& node(NodeId id) { return *nodes_[static_cast<size_t>(id)]; }
  FileId file_of(const Node& node, const Chunk& chunk) const {
    return layout_.is_data(chunk) ? node.data_file : node.parity_file;
  }
  Header& header(Node& node, const Chunk& chunk);
  // Everything that these nodes were given so far becomes durable.
  Status flush(const std::set<NodeId>& ids);
  Status flush_led(const std::vector<Node*>& led);

  // Opening (shard_open.cc).
  Status open_head(Node& node, bool create, std::optional<NodeHead>& found);
  void name_holder(Node& node);
  Status open_files(Node& node, bool create);
  Status arrange(std::vector<std::optional<NodeHead>>& heads);
  void judge(const std::vector<std::optional<NodeHead>>& heads);
  Status load(Node& node, std::string& damage);
  Status load_headers(Node& node, bool data, std::string& damage);
  Status verify(Node& node, std::string& damage);
  void find_flux(Node& node);
  Status may_blank(const Node& node, bool ours) const;
  Status blank(Node& node);
  Status settle_opening(uint64_t opening);
  // Durable when it returns. `unflushed`: the bug that leaves the flush out.
  Status write_heads(const std::vector<Node*>& nodes, Mutation unflushed);
  // Everything but the heads.
  Status sync_all();
  void lose(Node& node, std::string why);

  Loop& loop_;
  const ShardOptions options_;
  ShardLayout layout_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::set<NodeId> replaced_;
  std::vector<std::string> troubles_;
  bool direct_ = true;

  std::mutex mutex_;
  std::condition_variable flushed_;
  std::optional<Error> failed_;  // the first error of a round: nothing runs any more
  Counts counts_;
};

}  // namespace stoker::curm
