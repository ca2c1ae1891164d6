// A ShardCluster on simulated disks, for tests: the production code, with the power that goes
// between any two of its transfers.
#pragma once

#include <algorithm>
#include <cerrno>
#include <random>

#include "curm/crash_cluster.h"
#include "curm/shard_cluster.h"
#include "stoker/base/check.h"
#include "stoker/testing/sim_engine.h"

namespace stoker::curm {

inline ShardOptions small_options(const Geometry& geometry) {
  ShardOptions options;
  options.files = false;
  options.reserved_bytes = 4096;
  options.segment_bytes = ShardLayout::segment_min(geometry.chunk_bytes);
  return options;
}

inline std::unique_ptr<Loop> loop_on(const std::shared_ptr<SimDisk>& disk, uint64_t seed) {
  SimDevice device;
  device.seed = seed;
  auto engine = std::move(*SimEngine::make(disk, 64, device));
  const Clock& clock = static_cast<SimEngine&>(*engine).clock();
  return std::move(*Loop::make(std::move(engine), {}, clock));
}

class ShardSim final : public CrashCluster {
 public:
  ShardSim(const Geometry& geometry, uint64_t seed);

  Status run(Round& round) override;
  Result<NodeState> scan(NodeId node) override;
  void mutate(std::function<void(Round&)> bug) override { bug_ = std::move(bug); }
  // Counts writes and flushes, from when the nodes are open on.
  void crash_after(uint64_t steps) override;
  // Counts reads too, and those of opening.
  void crash_at_transfer(uint64_t transfers);
  // The process is killed at a flush, behind so many: what was written and not flushed stands in
  // the disks' caches, and stays so over restart().
  void kill_at_flush(uint64_t flushes);
  bool crashed() const override { return crashed_; }
  void restart(const std::set<NodeId>& lost) override;
  Status recovered() override {
    admitting_ = true;
    return watched(opened_->admit());
  }
  std::vector<std::byte> base(const Chunk& chunk) override;
  uint64_t records() const override { return opened_->live_records(); }
  void wipe(NodeId) override {}  // spares are modelled only

  static std::string path(NodeId node) { return "n" + std::to_string(node); }
  SimDisk& disk() { return *disk_; }
  ShardCluster& cluster() { return *opened_; }
  void close();
  // Opens what there is, and takes what is lost then for what was to be; recover(lost()) comes
  // next.
  Status open();
  Status reopen();
  const std::set<NodeId>& lost() const { return lost_; }
  void reorder() { std::shuffle(paths_.begin(), paths_.end(), random_); }

 private:
  Status watched(Status done);

  const Geometry geometry_;
  std::vector<std::string> paths_;
  std::mt19937_64 random_;
  std::shared_ptr<SimDisk> disk_;
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<ShardCluster> opened_;
  std::set<NodeId> lost_;
  std::function<void(Round&)> bug_;
  std::optional<uint64_t> steps_;  // ordered while the nodes were not open
  bool ordered_ = false, crashed_ = false, killed_ = false, admitting_ = false;
};

inline ShardSim::ShardSim(const Geometry& geometry, uint64_t seed)
    : geometry_(geometry),
      random_(seed),
      disk_(std::make_shared<SimDisk>(seed)),
      loop_(loop_on(disk_, seed)) {
  for (NodeId id = 0; id < geometry.nodes; ++id) paths_.push_back(path(id));
  auto made = ShardCluster::make(*loop_, paths_, geometry, small_options(geometry));
  STOKER_CHECK(made.has_value());
  opened_ = std::move(*made);
}

inline void ShardSim::close() {
  opened_.reset();
  loop_.reset();
}

inline Status ShardSim::open() {
  if (opened_) return {};
  loop_ = loop_on(disk_, random_());
  auto opened = ShardCluster::open(*loop_, paths_, small_options(geometry_));
  if (!opened) return opened.error();
  opened_ = std::move(*opened);
  if (steps_) crash_after(*std::exchange(steps_, {}));
  return {};
}

inline Status ShardSim::reopen() {
  close();
  STOKER_TRY(open());
  lost_ = opened_->replaced();
  return {};
}

// After an order the first failure is the crash. (Opening then finds that too many nodes cannot be
// read.)
inline Status ShardSim::watched(Status done) {
  crashed_ = crashed_ || (ordered_ && !done && (done.error().code == Code::io || !opened_));
  return done;
}

inline Status ShardSim::run(Round& round) {
  if (bug_) bug_(round);
  STOKER_TRY(watched(open()));
  return watched(opened_->run(round));
}

inline Result<NodeState> ShardSim::scan(NodeId node) {
  STOKER_TRY(watched(open()));
  if (opened_->replaced() != lost_) {
    std::string all;
    for (const std::string& trouble : opened_->troubles()) all += "; " + trouble;
    return fail(Code::corruption, "the cluster counts other nodes as lost than were taken away{}",
                all);
  }
  return opened_->scan(node);
}

inline void ShardSim::crash_after(uint64_t steps) {
  if (!opened_) {
    steps_ = steps;
    return;
  }
  disk_->cut_power_after_changes(steps, random_());
  ordered_ = true;
}

inline void ShardSim::crash_at_transfer(uint64_t transfers) {
  disk_->cut_power_after(transfers + 1, random_());
  ordered_ = true;
}

inline void ShardSim::kill_at_flush(uint64_t flushes) {
  disk_->fail_nth(Op::Kind::sync, flushes + 1, EIO);
  ordered_ = killed_ = true;
}

inline void ShardSim::restart(const std::set<NodeId>& lost) {
  close();
  if (!killed_) disk_->cut_power(random_());
  disk_->restore_power();
  for (const NodeId id : lost) {
    // Who was to be rebuilt and is not stays lost, with all that was written to it, or without.
    if (lost_.count(id) == 0 || admitting_ || random_() % 2 == 0) disk_->unlimit(path(id) + "/");
  }
  lost_ = lost;
  steps_.reset();
  ordered_ = crashed_ = killed_ = admitting_ = false;
}

inline std::vector<std::byte> ShardSim::base(const Chunk& chunk) {
  Round round;
  const Slot value = round.to(geometry_.node(chunk)).read(chunk, 0, geometry_.chunk_bytes);
  STOKER_CHECK(open().has_value());
  const Status done = opened_->run(round);
  // what no test writes a chunk full of
  if (!done) return std::vector<std::byte>(geometry_.chunk_bytes, std::byte{0xEE});
  return {value->bytes().begin(), value->bytes().end()};
}

}  // namespace stoker::curm
