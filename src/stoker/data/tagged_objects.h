// TaggedObjects: reads of the objects of one source, which must stay those that it was opened with.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "stoker/base/future.h"
#include "stoker/store/store.h"
#include "stoker/store/tagged_reads.h"

namespace stoker::data {

// Any thread. All that it is given outlives it and its reads.
class TaggedObjects {
 public:
  // tags: of each key, which the store compares if it can (TaggedReads); or nothing.
  TaggedObjects(Store& store, const std::vector<std::string>& keys,
                std::span<const std::string> tags);

  // As Store::read_many(); when the store had answered, in the nanoseconds of Clock::real().
  // mismatch: an object was replaced.
  Future<uint64_t> read(std::span<const Piece> pieces, Slice into) const;

 private:
  Store& store_;
  const std::vector<std::string>& keys_;
  const std::span<const std::string> tags_;
  TaggedReads* const tagged_;  // nullptr: nothing is compared
};

}  // namespace stoker::data
