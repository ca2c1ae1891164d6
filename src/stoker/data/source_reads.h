// SourceReads: how the bytes of one source's samples come, whatever its objects look like.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "stoker/base/future.h"
#include "stoker/data/packed_objects.h"
#include "stoker/data/pipeline_threads.h"
#include "stoker/data/sample_table.h"
#include "stoker/data/tagged_objects.h"
#include "stoker/store/store.h"

namespace stoker::data {

// Any thread. Destroy it when all reads are done, and after the tasks.
class SourceReads {
 public:
  // tags: of each object, or nothing. unpacked_bytes: memory for objects that are compressed.
  SourceReads(Store& store, std::shared_ptr<const SampleTable> table,
              std::span<const std::string> tags, uint64_t unpacked_bytes, PipelineTasks& tasks);

  const SampleTable& table() const { return *table_; }
  // As Store::read_many(), but an object with another tag is `mismatch`; when the store had
  // answered, in the nanoseconds of Clock::real(). What is compressed is unpacked then.
  Future<uint64_t> read(std::span<const Piece> pieces, Slice into);
  // Bytes and ranges that compressed objects cost since the last call; 0 where there are none.
  std::pair<uint64_t, uint64_t> take_asked();

 private:
  const std::shared_ptr<const SampleTable> table_;
  const TaggedObjects objects_;
  std::optional<PackedObjects> packed_;
};

}  // namespace stoker::data
