#include "stoker/data/source_reads.h"

#include "stoker/base/clock.h"

namespace stoker::data {

SourceReads::SourceReads(Store& store, std::shared_ptr<const SampleTable> table,
                         uint64_t unpacked_bytes, Pool& pool)
    : store_(store), table_(std::move(table)) {
  if (table_->has_packed()) packed_.emplace(store_, table_, unpacked_bytes, pool);
}

Future<uint64_t> SourceReads::read(std::span<const Piece> pieces, Slice into) {
  if (packed_) return packed_->read(pieces, into);
  return store_.read_many(table_->keys(), pieces, into)
      .then([](const Status& status) -> Result<uint64_t> {
        if (!status) return status.error();
        return Clock::real().now_ns();
      });
}

std::pair<uint64_t, uint64_t> SourceReads::take_asked() {
  return packed_ ? packed_->take_asked() : std::pair<uint64_t, uint64_t>();
}

}  // namespace stoker::data
