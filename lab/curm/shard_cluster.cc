#include "curm/shard_cluster.h"

#include <algorithm>

#include "curm/shard_round.h"

namespace stoker::curm {

Status ShardCluster::run(Round& round) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_) return *failed_;
    count_messages(round, counts_);
  }
  Status done = ShardRound(*this, round).run();
  if (done) return done;
  {
    const std::lock_guard lock(mutex_);
    if (!failed_) failed_ = done.error();
  }
  flushed_.notify_all();
  return done;
}

Result<NodeState> ShardCluster::scan(NodeId id) { return node(id).found; }

Counts ShardCluster::take_counts() {
  const std::lock_guard lock(mutex_);
  return std::exchange(counts_, {});
}

uint64_t ShardCluster::live_records() const {
  uint64_t sum = 0;
  for (const auto& each : nodes_) sum += each->log->live();
  return sum;
}

ShardCluster::Header& ShardCluster::header(Node& node, const Chunk& chunk) {
  const std::lock_guard lock(mutex_);
  Header& header = node.headers[chunk];
  if (header.blocks.empty()) {
    header.blocks.resize(layout_.blocks());
    header.flux.resize(layout_.blocks());
  }
  return header;
}

// Each node has one leader at a time, who writes and flushes for all that wait; nobody waits while
// leading, so nobody waits in a circle.
Status ShardCluster::flush(const std::set<NodeId>& ids) {
  std::unique_lock lock(mutex_);
  std::map<NodeId, uint64_t> wanted;
  for (const NodeId id : ids) wanted[id] = node(id).changes;
  for (;;) {
    if (failed_) return *failed_;
    std::vector<Node*> led;
    std::erase_if(wanted,
                  [this](const auto& each) { return node(each.first).flushed >= each.second; });
    if (wanted.empty()) return {};
    for (const auto& [id, change] : wanted) {
      if (node(id).flushing) continue;
      node(id).flushing = true;
      led.push_back(&node(id));
    }
    if (led.empty()) {
      if (mutated(Mutation::acknowledge_followers)) return {};
      flushed_.wait(lock);
      continue;
    }
    std::vector<uint64_t> upto;
    upto.reserve(led.size());
    for (const Node* each : led) upto.push_back(each->changes);
    lock.unlock();
    const Status done = flush_led(led);
    lock.lock();
    for (size_t i = 0; i < led.size(); ++i) {
      led[i]->flushing = false;
      if (done) led[i]->flushed = mutated(Mutation::count_late_writes) ? led[i]->changes : upto[i];
    }
    if (!done && !failed_) failed_ = done.error();
    flushed_.notify_all();
  }
}

Status ShardCluster::flush_led(const std::vector<Node*>& led) {
  std::vector<ShardWrite> writes;
  std::vector<FileId> logs;
  for (Node* each : led) {
    std::vector<ShardWrite> mine;
    STOKER_TRY(each->log->frame(mine));
    if (!mine.empty()) logs.push_back(each->log->current_file());
    for (ShardWrite& write : mine) writes.push_back(std::move(write));
  }
  IoBatch batch(loop_, Priority::demand);
  for (const ShardWrite& write : writes) batch.write(write.file, write.offset, write.bytes.slice());
  STOKER_TRY(batch.run());
  IoBatch syncs(loop_, Priority::demand);
  {
    const std::lock_guard lock(mutex_);
    for (Node* each : led) {
      if (std::exchange(each->data_dirty, false) && !mutated(Mutation::skip_data_flush))
        syncs.sync(each->data_file);
      if (std::exchange(each->parity_dirty, false) && !mutated(Mutation::skip_parity_flush))
        syncs.sync(each->parity_file);
    }
  }
  for (const FileId log : logs) {
    if (!mutated(Mutation::skip_log_flush)) syncs.sync(log);
  }
  STOKER_TRY(syncs.run());
  for (Node* each : led) each->log->durable();
  return {};
}

}  // namespace stoker::curm
