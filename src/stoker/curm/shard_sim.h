// A ShardCluster on simulated disks, for tests: the production code, with the power that goes between any two of its transfers.
#pragma once

#include <random>

#include "stoker/curm/crash_cluster.h"
#include "stoker/curm/shard_cluster.h"
#include "stoker/testing/sim_engine.h"

namespace stoker::curm {

class ShardSim final : public CrashCluster {
 public:
  ShardSim(const Geometry& geometry, uint64_t seed);

  Status run(Round& round) override;
  Result<NodeState> scan(NodeId node) override;
  void mutate(std::function<void(Round&)> bug) override { bug_ = std::move(bug); }
  void crash_after(uint64_t steps) override { crash_at_transfer(2 * steps); }
  void crash_at_transfer(uint64_t transfers);
  bool crashed() const override { return crashed_; }
  void restart(const std::set<NodeId>& lost) override;
  Status recovered() override { return watched(opened_->admit()); }
  std::vector<std::byte> base(const Chunk& chunk) override;
  uint64_t records() const override { return opened_->live_records(); }
  void wipe(NodeId) override {}  // spares are modelled only

  static std::string path(NodeId node) { return "n" + std::to_string(node); }
  SimDisk& disk() { return *disk_; }
  ShardCluster& cluster() { return *opened_; }
  void close();
  // Opens what there is, and takes what is lost then for what was to be; recover(lost()) comes next.
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
  bool ordered_ = false, crashed_ = false;
};

}  // namespace stoker::curm
