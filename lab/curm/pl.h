// PL, parity logging: the data chunk is overwritten in place, the difference appended to a log at
// each parity. PLR keeps that log in space reserved behind each parity chunk: parity and log are
// read in one go, each append is a random write, and a full reserve is folded at once.
//
// safe: the new bytes are durable at the data node as an intent, and the difference at all
// parities, before the chunk is overwritten.
#pragma once

#include "curm/delta_log.h"

namespace stoker::curm {

class ParityLogging : public DeltaLog {
 public:
  using DeltaLog::DeltaLog;
  Status update(const Update& update) override;

 private:
  Status fold_data(uint64_t stripe, uint64_t fold_seq) override;
  Status redo(const Survivor& survivor, bool alive) override;
  std::function<void()> rebuilt(const Chunk& lost, Errand& errand) override;

  Intents intents_;  // of data chunks
};

class ReservedParityLogging final : public ParityLogging {
 public:
  using ParityLogging::ParityLogging;
  Status update(const Update& update) override;

 private:
  bool reserves() const override { return true; }
};

}  // namespace stoker::curm
