// FO, full overwrite: data and parities are overwritten in place before the update is acknowledged.
//
// published: D reads the old bytes and writes the new ones; each parity reads its range, adds the
// difference and writes it. safe: the new bytes of data and parities are durable as intents on all
// 1+m nodes before any is overwritten; acknowledged then. A fold flushes what was overwritten and
// lets go of the intents.
#pragma once

#include "curm/scheme.h"

namespace stoker::curm {

class FullOverwrite final : public Scheme {
 public:
  using Scheme::Scheme;
  Status update(const Update& update) override;
  Status fold(uint64_t stripe) override;
  Status recover(const std::set<NodeId>& replaced) override;

 private:
  std::function<void()> rebuilt(const Chunk& lost, Errand& errand) override;

  Intents intents_;  // of all chunks
};

}  // namespace stoker::curm
