#include "stoker/curm/shard_sim.h"

#include <algorithm>

#include "stoker/base/check.h"

namespace stoker::curm {
namespace {

ShardOptions small_options(const Geometry& geometry) {
  ShardOptions options;
  options.files = false;
  options.reserved_bytes = 4096;
  options.segment_bytes = ShardLayout::segment_min(geometry.chunk_bytes);
  return options;
}

std::unique_ptr<Loop> loop_on(const std::shared_ptr<SimDisk>& disk, uint64_t seed) {
  SimDevice device;
  device.seed = seed;
  auto engine = std::move(*SimEngine::make(disk, 64, device));
  const Clock& clock = static_cast<SimEngine&>(*engine).clock();
  return std::move(*Loop::make(std::move(engine), {}, clock));
}

}  // namespace

ShardSim::ShardSim(const Geometry& geometry, uint64_t seed) : geometry_(geometry), random_(seed), disk_(std::make_shared<SimDisk>(seed)), loop_(loop_on(disk_, seed)) {
  for (NodeId id = 0; id < geometry.nodes; ++id) paths_.push_back(path(id));
  auto made = ShardCluster::make(*loop_, paths_, geometry, small_options(geometry));
  STOKER_CHECK(made.has_value());
  opened_ = std::move(*made);
}

void ShardSim::close() {
  opened_.reset();
  loop_.reset();
}

Status ShardSim::open() {
  if (opened_) return {};
  loop_ = loop_on(disk_, random_());
  auto opened = ShardCluster::open(*loop_, paths_, small_options(geometry_));
  if (!opened) return opened.error();
  opened_ = std::move(*opened);
  return {};
}

Status ShardSim::reopen() {
  close();
  STOKER_TRY(open());
  lost_ = opened_->replaced();
  return {};
}

// After an order the first failure is the crash. (Opening then finds that too many nodes cannot be read.)
Status ShardSim::watched(Status done) {
  crashed_ = crashed_ || (ordered_ && !done && (done.error().code == Code::io || !opened_));
  return done;
}

Status ShardSim::run(Round& round) {
  if (bug_) bug_(round);
  STOKER_TRY(watched(open()));
  return watched(opened_->run(round));
}

Result<NodeState> ShardSim::scan(NodeId node) {
  STOKER_TRY(watched(open()));
  if (opened_->replaced() != lost_) {
    std::string all;
    for (const std::string& trouble : opened_->troubles()) all += "; " + trouble;
    return make_error(Code::corruption, "the cluster counts other nodes as lost than were taken away" + all);
  }
  return opened_->scan(node);
}

void ShardSim::crash_at_transfer(uint64_t transfers) {
  disk_->cut_power_after(transfers + 1, random_());
  ordered_ = true;
}

void ShardSim::restart(const std::set<NodeId>& lost) {
  close();
  disk_->cut_power(random_());
  disk_->restore_power();
  for (const NodeId id : lost) disk_->unlimit(path(id) + "/");
  lost_ = lost;
  ordered_ = crashed_ = false;
}

std::vector<std::byte> ShardSim::base(const Chunk& chunk) {
  Round round;
  const Slot value = round.to(geometry_.node(chunk)).read(chunk, 0, geometry_.chunk_bytes);
  STOKER_CHECK(open().has_value());
  const Status done = opened_->run(round);
  if (!done) return std::vector<std::byte>(geometry_.chunk_bytes, std::byte{0xEE});  // what no test writes a chunk full of
  return {value->bytes().begin(), value->bytes().end()};
}

}  // namespace stoker::curm
