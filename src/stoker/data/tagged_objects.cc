#include "stoker/data/tagged_objects.h"

#include <memory>

#include "stoker/base/clock.h"
#include "stoker/store/read_many.h"

namespace stoker::data {
namespace {

Result<uint64_t> answered(const Status& status) {
  if (status) return Clock::real().now_ns();
  if (status.error().code != Code::conflict) return status.error();
  return fail(Code::mismatch,
              "{}: it was replaced since the data was opened, and batches must not mix both; put "
              "the old object back, or open the data again",
              status.error().what);
}

}  // namespace

TaggedObjects::TaggedObjects(Store& store, const std::vector<std::string>& keys,
                             std::span<const std::string> tags)
    : store_(store),
      keys_(keys),
      tags_(tags),
      tagged_(tags.empty() ? nullptr : dynamic_cast<TaggedReads*>(&store)) {}

Future<uint64_t> TaggedObjects::read(std::span<const Piece> pieces, Slice into) const {
  if (tagged_ == nullptr || pieces.empty())
    return store_.read_many(keys_, pieces, into).then(answered);
  if (const Status fits = check_pieces(keys_.size(), pieces, into.size); !fits) return fits.error();
  const auto rest = std::make_shared<Countdown>(pieces.size());
  const Future<void> all = rest->future();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const std::string& key = keys_[piece.object];
    const std::string& tag = tags_[piece.object];
    const Slice place = into.sub(piece.into, piece.bytes);
    const bool plain = tag.empty() || piece.bytes == 0;  // nothing is read, or nothing compared
    const Future<void> read = plain ? store_.read(key, piece.offset, place)
                                    : tagged_->read_tagged(key, tag, piece.offset, place);
    read.on_done([rest, i](const Status& status) { rest->done(i, status); });
  }
  return all.then(answered);
}

}  // namespace stoker::data
