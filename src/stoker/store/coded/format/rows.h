// RowSet: which blocks of some rows of a stripe are there and right, what is to be read for those
// that are not, and decoding them. Knows of no disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "stoker/codec/erasure.h"
#include "stoker/store/coded/format/headers.h"

namespace stoker::coded {

constexpr bool is_set(uint32_t set, size_t position) { return (set >> position & 1) != 0; }

// Rows of one stripe of which the bases of some chunks are wanted.
struct RowsWanted {
  const Stripe* stripe = nullptr;
  size_t first = 0, count = 0;
  uint32_t wanted = 0;  // positions
  // in AlignedBytes of whoever asks, who keeps them still: chunk c goes to c * count * kBlock; the
  // wanted ones are there at the end
  std::span<std::byte> blocks;
  uint32_t avoid = 0;  // positions that are not read
  // The answer.
  Status status = {};
  size_t blocks_read = 0;
  uint32_t wrong = 0;  // wanted positions of which a block did not come, or not right
};

class RowSet {
 public:
  // `shape`, and the headers of the stripe, outlive it. `available`: the positions that may be
  // read, of which those that are `lagging` only where it takes them. `spare`: one more is read
  // than it takes, so that the last one, or a wrong one, is not waited for.
  RowSet(const Shape& shape, const RowsWanted& rows, uint32_t available, uint32_t lagging = 0,
         bool spare = false);

  // The positions to read now: first what is wanted. Where that does not give all of it, as many
  // others as it takes (and a spare one), data before parity. (They come together with what is
  // wanted where some of that cannot be read.) Then whatever is left. 0: there is enough, or
  // nothing that would help. Until took() nothing of them is there.
  uint32_t next();
  // Where the block of chunk c in the r-th row goes.
  std::byte* at(size_t c, size_t r) const { return blocks_.data() + (c * count_ + r) * kBlock; }
  // What was read of chunk c (or failed to be: `ok`) is taken where it is right.
  void took(size_t c, bool ok);
  // Every row has what is wanted, or can be decoded, whatever becomes of the reads that are under
  // way.
  bool enough() const;
  // Fills in what is wanted and was not read. Rows that stand together and have the same blocks
  // take one call of the codec, as each call makes tables of its own. `lost`: a row of which too
  // little is there, or the result is wrong.
  struct Decoded {
    uint64_t blocks = 0, calls = 0;
    std::optional<size_t> lost;
  };
  Decoded complete(const codec::ErasureCode& code);
  size_t there(size_t r) const;              // blocks of the row
  uint32_t wrong() const { return wrong_; }  // as RowsWanted has it

 private:
  bool all_have(size_t c) const;
  bool surely_decodes() const;
  bool known(size_t c, size_t r) const;
  bool intact(size_t c, size_t r) const;
  bool zeros(size_t c, size_t r) const;  // never written: known without being read
  std::optional<size_t> decode(const codec::ErasureCode& code, size_t begin, size_t end);

  const Shape& shape_;
  const Headers& headers_;
  const size_t first_, count_;
  const uint32_t wanted_, available_, lagging_;
  const bool spare_;
  const std::span<std::byte> blocks_;
  std::vector<uint32_t> have_;  // by row
  uint32_t tried_ = 0, under_way_ = 0, wrong_ = 0;
  int turn_ = 0;
};

}  // namespace stoker::coded
