// FL, full logging: the new bytes are appended to a log at the data node, their difference to the
// newest bytes to a log at each parity. Nothing is overwritten in the foreground. The old bytes are
// read where the newest are: in the log, else in the base.
#pragma once

#include "curm/delta_log.h"

namespace stoker::curm {

class FullLogging : public DeltaLog {
 public:
  using DeltaLog::DeltaLog;
  Status update(const Update& update) override;
  Result<Value> read(const Chunk& chunk, uint64_t offset, uint64_t bytes) override;

 protected:
  virtual Slot read_newest(Errand& errand, const Chunk& chunk, uint64_t offset,
                           uint64_t bytes) const;

 private:
  Status fold_data(uint64_t stripe, uint64_t fold_seq) override;
  Status redo(const Survivor& survivor, bool alive) override;
  Slot logical(Errand& errand, const Chunk& chunk) override;
  std::function<void()> rebuilt(const Chunk& lost, Errand& errand) override;
  void index(const Chunk& chunk, uint64_t offset, uint64_t bytes, const LogPlace& place);

  struct Logged {
    RangeMap<LogPlace> newest;
    // with their bytes: the fold reads the log from end to end
    std::vector<std::pair<LogPlace, uint64_t>> all;
  };
  std::map<Chunk, Logged> logged_;  // by data chunk
};

}  // namespace stoker::curm
