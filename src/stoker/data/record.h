// Record: the bytes of one sample that holds several columns, and where each column lies in them.
//
// This is how MDS shards keep a sample: a u32 for each column of no fixed size (its bytes, in the
// order of the columns), then the columns one behind the other. Little-endian, nothing between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace stoker::data {

// Bytes within something larger.
struct Place {
  uint64_t offset = 0, bytes = 0;
};

// Bytes of each column; 0: each record says. Of no columns: a record is not split.
using RecordLayout = std::vector<uint64_t>;

// Appends the place of each column, counted from the record's first byte. False, and nothing is
// appended, where the columns do not fill the record exactly. Any bytes may be given.
bool split_record(const RecordLayout& layout, std::span<const std::byte> record,
                  std::vector<Place>& places);

}  // namespace stoker::data
