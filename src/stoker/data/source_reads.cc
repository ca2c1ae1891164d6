#include "stoker/data/source_reads.h"

namespace stoker::data {

SourceReads::SourceReads(Store& store, std::shared_ptr<const SampleTable> table,
                         std::span<const std::string> tags, uint64_t unpacked_bytes,
                         PipelineTasks& tasks)
    : table_(std::move(table)), objects_(store, table_->keys(), tags) {
  if (table_->has_packed()) packed_.emplace(objects_, table_, unpacked_bytes, tasks);
}

Future<uint64_t> SourceReads::read(std::span<const Piece> pieces, Slice into) {
  if (packed_) return packed_->read(pieces, into);
  return objects_.read(pieces, into);
}

std::pair<uint64_t, uint64_t> SourceReads::take_asked() {
  return packed_ ? packed_->take_asked() : std::pair<uint64_t, uint64_t>();
}

}  // namespace stoker::data
