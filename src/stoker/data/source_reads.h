// SourceReads: how the bytes of one source's samples come, whatever its objects look like.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "stoker/base/future.h"
#include "stoker/data/packed_objects.h"
#include "stoker/data/sample_table.h"
#include "stoker/data/tagged_objects.h"
#include "stoker/store/store.h"

namespace stoker::data {

// Any thread. All that it is given outlives it.
class SourceReads {
 public:
  // packed: where the compressed objects of the reader's source `number` come from; null: it has
  // none.
  SourceReads(const TaggedObjects& objects, std::shared_ptr<const SampleTable> table,
              PackedObjects* packed, uint32_t number)
      : table_(std::move(table)), objects_(objects), packed_(packed), number_(number) {}

  const SampleTable& table() const { return *table_; }
  // As Store::read_many(), but an object with another tag is `mismatch`; when the store had
  // answered, in the nanoseconds of Clock::real(). What is compressed is unpacked then.
  Future<uint64_t> read(std::span<const Piece> pieces, Slice into);
  // Bytes and ranges that compressed objects cost since the last call; 0 where there are none.
  std::pair<uint64_t, uint64_t> take_asked();

 private:
  const std::shared_ptr<const SampleTable> table_;
  const TaggedObjects& objects_;
  PackedObjects* const packed_;
  const uint32_t number_;
};

}  // namespace stoker::data
