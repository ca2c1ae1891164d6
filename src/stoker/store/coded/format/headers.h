// Header pages read from the shards, before they are merged to what a stripe's headers say
// together.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "stoker/store/coded/format/stripe.h"

namespace stoker::coded {

struct RawHeaders {
  // By position of the chunk, then by row; none: no intact page of this stripe covers the row.
  std::vector<std::vector<std::optional<DataEntry>>> data;
  std::vector<std::vector<std::optional<ParityEntry>>> parity;
  std::vector<uint64_t> counters;  // chunk * pages + page
  bool damaged = false;            // a copy of a page is neither intact nor blank, or not readable

  explicit RawHeaders(const Shape& shape);
  // Takes the header pages of the chunk at this position: pairs of copies, one after the other.
  void take(const Shape& shape, const StoreId& store, uint64_t stripe, size_t position,
            std::span<const std::byte> pairs);
  Headers merge(const Shape& shape) const;
  // Whether every parity tells of each data block, and all tell the same; and no copy is damaged,
  // which may be the newer one.
  bool parities_agree(const Shape& shape) const;
};

inline size_t header_bytes(const Shape& shape) { return 2 * shape.pages() * kBlock; }

// Headers of a stripe that was never written.
Headers blank_headers(const Shape& shape);
// One page as the headers say, with its next counter; of an unsound row it says that nothing is
// known.
HeaderPage page_of(const Shape& shape, uint64_t stripe, const Headers& headers, size_t position,
                   size_t page);

// All data blocks of the row are zeros that were never written; then so is the parity.
bool row_is_blank(const Shape& shape, const Headers& headers, size_t row);

}  // namespace stoker::coded
