#include "curm/memory_cluster.h"

#include <algorithm>

#include "stoker/base/check.h"

namespace stoker::curm {
namespace {

bool durable(Step::Kind kind) { return kind != Step::Kind::read && kind != Step::Kind::derive; }

std::vector<std::byte> payload(const Record& record) {
  std::vector<std::byte> bytes;
  for (const auto* ranges : {&record.ranges, &record.before}) {
    for (const Record::Range& range : *ranges)
      bytes.insert(bytes.end(), range.value.bytes().begin(), range.value.bytes().end());
  }
  return bytes;
}

}  // namespace

Result<Value> MemoryCluster::read(const Node& node, const Step& step) const {
  std::vector<std::byte> bytes;
  for (const Step::Part& part : step.parts) {
    std::vector<std::byte> from;
    if (part.logged) {
      const auto found = node.now.log.find(part.place.id);
      if (found == node.now.log.end())
        return fail(Code::not_found, "a record is read that was released");
      from = payload(found->second);
    } else if (const auto found = node.now.base.find(step.chunk); found != node.now.base.end()) {
      from = found->second;
    } else {
      from.resize(geometry_.chunk_bytes);
    }
    if (part.offset + part.bytes > from.size())
      return fail(Code::invalid_argument, "a read goes beyond a chunk or a record");
    bytes.insert(bytes.end(), from.begin() + static_cast<ptrdiff_t>(part.offset),
                 from.begin() + static_cast<ptrdiff_t>(part.offset + part.bytes));
  }
  return Value::of(std::move(bytes));
}

void MemoryCluster::apply(Contents& contents, const Change& change, bool torn) {
  if (change.kind == Step::Kind::write) {
    auto& base = contents.base[change.chunk];
    base.resize(geometry_.chunk_bytes);
    STOKER_CHECK(change.offset + change.value.size() <= base.size());
    bool keeps = true;
    for (uint64_t i = 0; i < change.value.size(); ++i) {
      if (torn && (i == 0 || (change.offset + i) % 512 == 0)) keeps = random_() % 2 == 0;
      if (keeps) base[change.offset + i] = change.value.bytes()[i];
    }
  } else if (change.kind == Step::Kind::append) {
    contents.log[change.id] = change.record;
  } else if (change.kind == Step::Kind::mark) {
    contents.folded[change.chunk] = std::max(contents.folded[change.chunk], change.seq);
    if (change.said) contents.said[change.chunk] = {change.seq, *change.said};
  } else {
    for (const LogPlace& place : change.released) contents.log.erase(place.id);
    contents.settled = std::max(contents.settled, change.seq);
  }
}

Status MemoryCluster::step(Node& node, NodeId id, Step& step) {
  switch (step.kind) {
    case Step::Kind::read: {
      STOKER_ASSIGN(*step.value, read(node, step));
      return {};
    }
    case Step::Kind::derive:
      *step.value = step.compute();
      return {};
    case Step::Kind::flush:
      for (const Change& change : node.pending) apply(node.durable, change, false);
      node.pending.clear();
      return {};
    default:
      break;
  }
  Change change{step.kind, step.chunk, step.offset, step.seq, 0, {}, {}, step.released, step.said};
  if (step.kind == Step::Kind::write) change.value = *step.value;
  if (step.kind == Step::Kind::append) {
    change.record = step.record();
    change.id = ++ids_;
    *step.place = {id, change.id, step.reserved};
  }
  // record by record: each may stay, whatever becomes of the others
  if (step.kind == Step::Kind::release) {
    for (const LogPlace& place : step.released) {
      change.released = {place};
      apply(node.now, change, false);
      node.pending.push_back(change);
    }
    return {};
  }
  apply(node.now, change, false);
  node.pending.push_back(std::move(change));
  return {};
}

Status MemoryCluster::run(Round& round) {
  if (bug_) bug_(round);
  std::vector<std::pair<Errand*, size_t>> open;
  for (Errand& errand : round.errands) {
    if (!errand.steps.empty()) open.emplace_back(&errand, 0);
  }
  while (!open.empty()) {
    const size_t turn = random_() % open.size();
    auto& [errand, next] = open[turn];
    Step& current = errand->steps[next++];
    if (durable(current.kind) && left_ && (*left_)-- == 0) crashed_ = true;
    if (crashed_) return fail(Code::cancelled, "the power is gone");
    STOKER_TRY(step(nodes_[static_cast<size_t>(errand->node)], errand->node, current));
    if (next == errand->steps.size()) open.erase(open.begin() + static_cast<ptrdiff_t>(turn));
  }
  return {};
}

void MemoryCluster::restart(const std::set<NodeId>& lost) {
  for (size_t id = 0; id < nodes_.size(); ++id) {
    Node& node = nodes_[id];
    for (const Change& change : node.pending) {
      const uint64_t fate = random_() % 3;
      if (fate != 0) apply(node.durable, change, fate == 1 && change.kind == Step::Kind::write);
    }
    node.pending.clear();
    node.now = node.durable;
    if (lost.count(static_cast<NodeId>(id)) != 0) node = {};
  }
  crashed_ = false;
  left_.reset();
}

Result<NodeState> MemoryCluster::scan(NodeId id) {
  const Contents& contents = nodes_[static_cast<size_t>(id)].now;
  NodeState state;
  for (const auto& [place, record] : contents.log)
    state.records.push_back({{id, place, false}, record});
  state.folded = contents.folded;
  state.said = contents.said;
  state.settled = contents.settled;
  return state;
}

std::vector<std::byte> MemoryCluster::base(const Chunk& chunk) {
  const Contents& contents = nodes_[static_cast<size_t>(geometry_.node(chunk))].now;
  const auto found = contents.base.find(chunk);
  return found == contents.base.end() ? std::vector<std::byte>(geometry_.chunk_bytes)
                                      : found->second;
}

uint64_t MemoryCluster::records() const {
  uint64_t count = 0;
  for (const Node& node : nodes_)
    count += static_cast<uint64_t>(
        std::count_if(node.now.log.begin(), node.now.log.end(),
                      [](const auto& each) { return each.second.kind != Record::Kind::epoch; }));
  return count;
}

}  // namespace stoker::curm
