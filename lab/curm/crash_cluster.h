// A cluster that crashes when it is told to, for tests of update schemes.
#pragma once

#include <functional>
#include <set>
#include <vector>

#include "curm/substrate.h"

namespace stoker::curm {

class CrashCluster : public Substrate {
 public:
  // A bug, for the tests of the tests: changes each round before it runs.
  virtual void mutate(std::function<void(Round&)> bug) = 0;
  // The power goes about so many steps from now; run() fails from then on, until restart().
  virtual void crash_after(uint64_t steps) = 0;
  virtual bool crashed() const = 0;
  // Each unflushed thing survives, vanishes or (a write) is torn; the nodes in `lost` come back
  // blank.
  virtual void restart(const std::set<NodeId>& lost) = 0;
  // The scheme has recovered what was lost.
  virtual Status recovered() { return {}; }
  virtual std::vector<std::byte> base(const Chunk& chunk) = 0;
  virtual uint64_t records() const = 0;  // still in the logs, epochs apart
  // The node is blank from now on, while everything goes on.
  virtual void wipe(NodeId node) = 0;
};

}  // namespace stoker::curm
