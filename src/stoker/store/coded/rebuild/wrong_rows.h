// WrongRows: rows of a chunk that are not what they should be are decoded from the others of their
// stripe and written.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "stoker/store/coded/read/row_reads.h"
#include "stoker/store/coded/rebuild/rebuilder.h"

namespace stoker::coded {

// Writer thread. While some rows are decoded and written the next ones are on their way from the
// shards. Memory for that comes from the cap: at most thrice the rows that are read at once.
class WrongRows {
 public:
  static constexpr size_t kRowsAtOnce = 64;
  static constexpr size_t kRowsMost = 3 * kRowsAtOnce;  // in memory: read, decoded, written
  // Of `found` the wrong rows are taken; those that are right at the end stand in their place, with
  // their checksums.
  WrongRows(CommittedMap& map, Shards& shards, Reader& reader, Pace& pace, const Stripe& stripe,
            size_t position, Compared& found, Rebuilt& done);
  // Rows that cannot be decoded stay erasures, and are no reason to go without the rest. Nothing is
  // flushed. An error: the shard cannot be written, or the cap has no room for a row.
  Status run();

 private:
  // Rows that are read, decoded and written at once.
  struct Part {
    ScratchPtr memory;
    std::vector<RowsWanted> rows;
    std::optional<RowReads> reads;
  };
  struct Writing {
    Writing(ScratchPtr of, Shards& shards)
        : memory(std::move(of)), transfers(shards, Priority::scrub, nullptr) {}
    ScratchPtr memory;
    ShardTransfers transfers;
  };
  Status pass();
  Result<std::unique_ptr<Part>> begin();
  Status finish(Part& part);
  void take(const RowsWanted& rows);
  void read_again(const RowsWanted& rows);
  void lose(const RowsWanted& rows);
  Status written();

  CommittedMap& map_;
  Shards& shards_;
  const Shape& shape_;
  Reader& reader_;
  Pace& pace_;
  const Stripe& stripe_;
  const size_t position_;
  Compared& found_;
  Rebuilt& done_;
  std::vector<size_t> wrong_;  // rows of this pass
  size_t at_ = 0;              // of these, that is read next
  size_t rows_;                // at once, at most
  // each by itself: it stood with others that cannot be decoded, or in memory that is lost
  std::vector<size_t> again_;
  std::optional<Writing> writing_;  // its end waits for what is under way
};

}  // namespace stoker::coded
