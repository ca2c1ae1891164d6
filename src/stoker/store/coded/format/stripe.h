// What a coded store keeps in memory of a stripe: where its chunks are, what its headers say, and
// which blocks are newer in the log.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/classes/class.h"
#include "stoker/memory/budget.h"
#include "stoker/store/coded/format/format.h"

namespace stoker::coded {

// A segment of a shard's log. Whoever needs a record in it holds a reference; without any it is
// free to be begun anew.
struct Segment {
  size_t shard = 0, index = 0;
};
using SegmentRef = std::shared_ptr<const Segment>;

struct Place {
  size_t shard = 0;
  uint64_t offset = 0;  // in the shard's file
};

// The frames that tell of records: needed as long as these.
struct Told {
  std::vector<SegmentRef> held;
};

// A COMMIT in the logs.
struct CommitRecord {
  Stamp stamp = 0;
  std::vector<SegmentRef> held;
  std::shared_ptr<const Told> told = nullptr;
};

// New blocks of one chunk in the logs of its data shard and its parities. Immutable once readers
// can see it, but for `told`, which is the writer thread's.
struct Val {
  Stamp stamp = 0;
  uint64_t stripe = 0;
  size_t chunk = 0, first = 0;
  std::vector<uint32_t> crcs;
  std::vector<Place> places;  // of the first block; the data shard's first, if it has it
  std::vector<SegmentRef> held;
  std::shared_ptr<CommitRecord> commit;        // none: it counts by itself
  std::shared_ptr<const Told> told = nullptr;  // none: no frame tells of it

  // The nth of its copies on live shards; null: there are no more.
  const Place* live_place(ShardSet live, size_t nth) const;
};
using ValRef = std::shared_ptr<Val>;

// What all header pages of a stripe say together.
struct Headers {
  std::vector<Stamp> versions;  // row * k + chunk
  std::vector<uint32_t> crcs;   // row * n + chunk, data and parity
  // row * m + parity: this parity's block is not at these versions, or not known
  std::vector<bool> unsound;
  // chunk * pages + page: of the newest copy of a page; 0: never written. Empty: they come from the
  // pages of the parities alone. A block that matches these is what it should be; nothing else is
  // done by them.
  std::vector<uint64_t> counters;
  bool whole() const { return !counters.empty(); }
};
using HeadersPtr = std::shared_ptr<Headers>;

// That they take in memory.
inline uint64_t headers_bytes(const Shape& shape) {
  return shape.rows() * (12 * shape.k + 4 * shape.m) + 8 * shape.n() * shape.pages();
}

// A block of the base that a committed fold has changed, but that lies in the log still. Only a
// store that may not write keeps it so.
struct Override {
  Place place;
  ValRef val;        // of a data block
  size_t index = 0;  // of the block in it
};

// The free slots of all shards. Any thread. Stripes of objects that are rewritten take them from
// the first one on, and all others from the middle on: what is written once stays in the order in
// which it was written, and is read in that order.
class Slots {
 public:
  explicit Slots(const Shape& shape);
  // One slot on each of these shards, or none at all.
  std::optional<std::vector<uint32_t>> take(const std::vector<size_t>& shards, Class expected);
  // A slot that the table names. False: another stripe has it.
  bool take(const std::vector<size_t>& shards, const std::vector<uint32_t>& slots);
  void give(const std::vector<size_t>& shards, const std::vector<uint32_t>& slots);
  uint64_t used() const;

 private:
  mutable Mutex mutex_;
  std::vector<std::vector<bool>> free_ GUARDED_BY(mutex_);
  std::vector<size_t> free_count_ GUARDED_BY(mutex_);
  // where to look first: for what is rewritten, for all else
  std::array<std::vector<size_t>, 2> next_ GUARDED_BY(mutex_);
};

class Stripe {
 public:
  Stripe(uint64_t the_id, std::vector<size_t> on_shards, std::vector<uint32_t> in_slots,
         Slots& owner)
      : id(the_id), shards(std::move(on_shards)), slots(std::move(in_slots)), owner_(owner) {}
  ~Stripe() { owner_.give(shards, slots); }
  Stripe(const Stripe&) = delete;
  Stripe& operator=(const Stripe&) = delete;

  const uint64_t id;
  const std::vector<size_t> shards;  // by position of the chunk
  const std::vector<uint32_t> slots;

  // Guarded by the CommittedMap's mutex. Whole headers change only while `folding` is set and
  // nobody reads; so a reader that is counted may look without it. Others are replaced by whole
  // ones at any time: who reads by them holds them.
  HeadersPtr headers;
  bool has_whole_headers() const { return headers && headers->whole(); }
  size_t readers = 0;
  // Threads that load the headers or work with them: those in memory stay meanwhile. What a thread
  // has loaded may be older than a fold.
  size_t header_pins = 0;
  // the HeaderCache's: it looks at them; since then they were used; their share of the cap
  bool headers_cached = false, headers_used = false;
  Grant headers_grant;
  bool folding = false;
  uint64_t object = 0;  // whose it is: its class_id
  uint64_t misses = 0;  // reads that had to be decoded
  struct Newer {
    ValRef val;
    size_t index = 0;  // of the block in it
  };
  std::map<size_t, Newer> overlay;       // by row * k + chunk
  std::map<size_t, Override> overrides;  // by row * n + chunk

  // The positions of its chunks that are on one of these shards.
  uint32_t positions_on(ShardSet set) const;

 private:
  Slots& owner_;
};
using StripePtr = std::shared_ptr<Stripe>;

// The shards of the chunks of a stripe, by position.
std::vector<size_t> placement(const Shape& shape, uint64_t stripe);

}  // namespace stoker::coded
