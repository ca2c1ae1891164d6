// Rebuilder: what a shard has of a chunk is compared with what the headers of all say, and written
// where it differs.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "stoker/store/coded/logs/log_set.h"
#include "stoker/store/coded/read/reader.h"
#include "stoker/store/coded/shards/pace.h"

namespace stoker::coded {

struct Compared {
  Headers next;                    // with what was found out of this chunk
  std::vector<size_t> wrong_rows;  // whose block is not what it should be, or not known
  std::set<size_t> lost_pages;     // header pages of which no copy is intact
  std::set<size_t> wrong_pages;    // with entries that are not what they should be
  std::set<size_t> bad_copies;     // whose older copy should be intact too, and is not
  bool right() const {
    return wrong_rows.empty() && lost_pages.empty() && wrong_pages.empty() && bad_copies.empty();
  }
};

struct Piece {
  size_t first_page = 0, pages = 0;  // of a chunk's header
  size_t first = 0, rows = 0;        // that these are of
};

struct Rebuilt {
  size_t blocks = 0, pages = 0;  // that were wrong and are right now
  size_t lost = 0;               // blocks that could not be decoded
  std::string why;               // of the first of these
};

// A chunk on its way to be right on its shard, live or not, where it differs from what the others
// say: so far up to `page`.
struct Rebuilding {
  std::weak_ptr<Stripe> stripe;  // weak: what is removed meanwhile frees its slots
  size_t position = 0, page = 0;
  Rebuilt done = {};
};

// All live chunks of a stripe on their way from the shards. Its end waits for them.
struct StripeLook {
  StripeLook(Shards& shards, ScratchPtr of, const Headers& then)
      : memory(std::move(of)), headers(then), batch(shards, Priority::scrub) {}
  struct Chunk {
    size_t position;
    AlignedBytes pairs;                                 // its header pages
    std::vector<std::pair<size_t, size_t>> reads = {};  // and their blocks
  };
  const ScratchPtr memory;
  const Headers headers;  // as they were when it began: what changes later counts as not right
  std::vector<Chunk> chunks;
  ShardBatch batch;
};

// Writer thread, and for it others: one thread a stripe. What it moves is spent of `pace`.
class Rebuilder {
 public:
  Rebuilder(CommittedMap& map, Shards& shards, Reader& reader, LogSet& logs, Pace& pace)
      : map_(map),
        shards_(shards),
        shape_(shards.shape()),
        reader_(reader),
        logs_(logs),
        pace_(pace) {}

  // Every row of this piece of the chunk with what the headers of all say.
  Result<Compared> compare(const StripePtr& stripe, size_t position, const Piece& piece);
  // Begins to read all chunks of a stripe, once each. Null: that would be more than a step, or
  // finds no memory, or no headers.
  std::unique_ptr<StripeLook> begin_look(const StripePtr& stripe);
  // The positions of those chunks that are what the headers of all say, down to each copy of their
  // pages. All others are for rebuild_step().
  uint32_t right_chunks(const Stripe& stripe, StripeLook& look) const;
  // about kRowsRebuilt rows; false: that was the last
  Result<bool> rebuild_step(Rebuilding& chunk);
  Result<Rebuilt> rebuild(const StripePtr& stripe, size_t position);  // all steps
  // How many chunks to rebuild beside each other, where nothing holds that back: the disks wait for
  // each chunk several times. 1: a chunk takes more than a step, or too much of the cap.
  size_t at_once() const;
  // Before a page is written whose copies could not be read: on the disk they may have higher
  // counters than the next one, and count again when the others are gone.
  Status mend_unread(const StripePtr& stripe);
  void note_loss(const StripePtr& stripe, size_t position, const std::string& why);
  Status load_headers_paced(const StripePtr& stripe);

 private:
  struct Own {
    AlignedBytes pairs;                         // its header pages; zeros where there are none
    std::vector<std::optional<uint32_t>> crcs;  // by row: of its block; none: it could not be read
  };
  Compared judge(const Stripe& stripe, size_t position, const Piece& piece, const Own& own,
                 const RawHeaders& raw, Headers headers) const;
  bool is_blank(const Headers& headers, size_t position, size_t row) const;
  bool is_known(const Headers& headers, size_t position) const;
  bool adopt(Headers& headers, const RawHeaders& own, size_t position) const;
  void read_chunk(const Stripe& stripe, size_t position, StripeLook& look);
  void install(const StripePtr& stripe, Headers headers);
  Result<Own> read_own(const Stripe& stripe, size_t position, const Piece& piece, RawHeaders& raw);
  Status rebuild_piece(const StripePtr& stripe, size_t position, const Piece& piece, Rebuilt& done);

  CommittedMap& map_;
  Shards& shards_;
  const Shape& shape_;
  Reader& reader_;
  LogSet& logs_;
  Pace& pace_;
};

}  // namespace stoker::coded
