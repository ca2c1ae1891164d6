#include "stoker/data/source_reads.h"

namespace stoker::data {

Future<uint64_t> SourceReads::read(std::span<const Piece> pieces, Slice into) {
  if (packed_ != nullptr) return packed_->read(number_, pieces, into);
  return objects_.read(pieces, into);
}

std::pair<uint64_t, uint64_t> SourceReads::take_asked() {
  return packed_ != nullptr ? packed_->take_asked(number_) : std::pair<uint64_t, uint64_t>();
}

}  // namespace stoker::data
