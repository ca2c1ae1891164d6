// Reader: reads of a coded store. What is newer comes from the logs, all else from the bases; what
// is lost or rotten is decoded. Nothing is written here.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "stoker/codec/erasure.h"
#include "stoker/memory/budget.h"
#include "stoker/store/coded/format/headers.h"
#include "stoker/store/coded/format/rows.h"
#include "stoker/store/coded/map/committed_map.h"
#include "stoker/store/coded/shards/shards.h"
#include "stoker/store/coded/shards/spare_memory.h"

namespace stoker::coded {

class RowReads;

// A piece of a read: blocks that stand together in one place.
struct Run {
  enum class From : uint8_t { zeros, log, base };
  From from = From::zeros;
  StripePtr stripe;
  size_t chunk = 0, first = 0, count = 0;
  ValRef val;
  size_t index = 0;           // of the first block in the VAL
  std::byte* into = nullptr;  // in AlignedBytes
  HeadersPtr headers = {};    // of a base: what it is read by
  Run part(size_t from_block, size_t blocks) const {
    return {from,
            stripe,
            chunk,
            first + from_block,
            blocks,
            val,
            index + from_block,
            into + from_block * kBlock,
            headers};
  }
};

// Memory for some blocks of each of `rows` rows. Shared with reads into it that are left behind.
struct Scratch {
  Grant grant;
  SparePiece bytes;
  size_t rows = 0;
};
using ScratchPtr = std::shared_ptr<Scratch>;

// What the live header pages of a stripe say.
struct HeaderRead {
  const Stripe* stripe;
  RawHeaders raw;
  uint32_t positions = UINT32_MAX;  // of these, those that are live
  bool any = false;                 // could be read
  std::string why = {};             // something could not
};

// Any thread but the Loop's: all of it waits for I/O.
class Reader {
 public:
  Reader(CommittedMap& map, Shards& shards, const codec::ErasureCode& code, Budget& budget,
         SpareMemory& spare)
      : map_(map),
        shards_(shards),
        shape_(shards.shape()),
        code_(code),
        budget_(budget),
        spare_(spare) {}

  // [offset, offset + size) of the object as it is at one moment; null: as the table has it.
  Status read(std::string_view key, const ObjectPtr& given, uint64_t offset, Slice into,
              Priority priority);
  // Where the newest bytes of these rows are, as runs; zeros are filled in at once. With the map
  // locked.
  void plan_chunk(const StripePtr& stripe, size_t chunk, size_t first, size_t count,
                  std::byte* into, std::vector<Run>& runs) const;
  // Whoever finds its memory lost() after it, whatever it says, does it again into other memory: a
  // disk was given up, and refuses at once from then on.
  // `doubted`: stripes with headers of the parities alone of which something has to be decoded.
  // Then not all has been read, and it takes their headers whole. Null: all are.
  Status fetch(std::vector<Run> runs, Priority priority, std::vector<StripePtr>* doubted = nullptr);
  // Blocks of a VAL, from whichever log has them.
  Result<AlignedBytes> read_val(const StripePtr& stripe, const ValRef& val, size_t index,
                                size_t count, Priority priority);
  // Whole VALs for another log.
  void fetch_records(const std::vector<Run>& runs, Priority priority);
  // From the cap: for so many rows, or fewer where it does not allow that; for one at least.
  Result<ScratchPtr> take_scratch(size_t rows, size_t blocks_a_row, std::string_view who) const;
  // So many rows, or as many as a share of the cap has room for.
  size_t rows_of_share(size_t rows, size_t blocks_a_row) const;
  // Bases, of all of these at once; each has its own answer. `memory` as in RowReads; where it is
  // lost() then, as in fetch().
  void read_rows(std::span<RowsWanted> all, std::shared_ptr<const void> memory, Priority priority);
  void finish_rows(RowReads& reads);
  // header_reads.cc
  Status load_headers(const StripePtr& stripe, Priority priority);
  // Of all of these that have not all of them in memory. Why not, by stripe, of those of which
  // nothing could be read.
  std::map<uint64_t, Error> load_headers(std::span<const StripePtr> stripes, Priority priority);
  // Likewise, but only what reading takes: the pages of the parities, where they tell all.
  std::map<uint64_t, Error> load_for_reading(std::span<const StripePtr> stripes, Priority priority);
  void read_headers(std::span<HeaderRead> all, Priority priority);
  // The next stripes, for load_ahead(), where somebody reads an object from its begin on and will
  // soon need headers that are not in memory. Empty: none, or others are being loaded.
  std::vector<StripePtr> needed_ahead(std::string_view key, uint64_t offset, size_t bytes);
  void load_ahead(std::span<const StripePtr> stripes, Priority priority);

 private:
  template <typename Take>
  void each_header_read(std::span<const StripePtr> stripes, uint32_t positions, Priority priority,
                        const Take& take);
  struct Reading;
  Status plan(Reading& reading, std::string_view key, const ObjectPtr& given, uint64_t offset,
              size_t bytes, Priority priority);
  Status load_unknown(Reading& reading, const std::vector<StripePtr>& unknown,
                      const std::vector<Run>& likely, Priority priority);
  void take_pieces(Reading& reading, const Object& object, uint64_t begin, uint64_t end);
  void release(Reading& reading);
  template <typename Take>
  void each_piece(const Object& object, uint64_t begin, uint64_t end, std::byte* memory,
                  const Take& take) const;
  std::vector<Run> likely_bases(const MapState& map, const Object& object, uint64_t begin,
                                uint64_t end, std::byte* memory) const;
  bool is_there(const Run& run) const;
  bool has_zeros(const Run& piece) const;
  std::vector<uint32_t> crcs_of(const Run& run) const;
  std::vector<Run> wrong_of(const std::vector<Run>& runs, const std::vector<size_t>& ops,
                            const ShardBatch& batch) const;
  std::vector<Run> take_lost_rows(std::vector<Run>& runs, ShardSet live_now) const;
  bool is_lost_in(ShardSet live, const Run& run) const;
  Status fetch_from_logs(std::vector<Run> left, Priority priority);
  Status fetch_degraded(const std::vector<Run>& runs, Priority priority);
  Status take_rows(std::span<const Run> runs, const RowsWanted& rows);

  CommittedMap& map_;
  Shards& shards_;
  const Shape& shape_;
  const codec::ErasureCode& code_;
  Budget& budget_;
  SpareMemory& spare_;
  std::atomic<bool> loading_ahead_ = false;
};

}  // namespace stoker::coded
