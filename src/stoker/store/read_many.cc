#include "stoker/store/read_many.h"

#include <memory>
#include <string>

#include "stoker/base/check.h"

namespace stoker {
namespace {

Status check(size_t keys, const Piece& piece, size_t number, size_t memory) {
  const std::string name = "piece " + std::to_string(number) + " of a batch";
  if (piece.object >= keys) {
    return fail(Code::invalid_argument, "{} is of object {}, but there are {} keys", name,
                piece.object, keys);
  }
  if (piece.into > memory || piece.bytes > memory - piece.into) {
    return fail(Code::invalid_argument, "{} ends behind the {} bytes of memory", name, memory);
  }
  return {};
}

}  // namespace

Status check_pieces(size_t keys, std::span<const Piece> pieces, size_t memory) {
  for (size_t i = 0; i < pieces.size(); ++i) STOKER_TRY(check(keys, pieces[i], i, memory));
  return {};
}

void Countdown::done(size_t piece, const Status& status) {
  MutexLock lock(mutex_);
  STOKER_CHECK(left_ > 0);
  if (!status && piece < first_failed_) {
    first_failed_ = piece;
    error_ = status.error();
  }
  if (--left_ != 0) return;
  const Status all = error_ ? Status(*std::move(error_)) : Status();
  lock.unlock();
  promise_.complete(all);
}

Future<void> Store::read_many(std::span<const std::string> keys, std::span<const Piece> pieces,
                              Slice into, ReadOptions options) {
  if (const Status status = check_pieces(keys.size(), pieces, into.size); !status)
    return status.error();
  if (pieces.empty()) return Status();
  const auto rest = std::make_shared<Countdown>(pieces.size());
  Future<void> all = rest->future();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    read(keys[piece.object], piece.offset, into.sub(piece.into, piece.bytes), options)
        .on_done([rest, i](const Status& status) { rest->done(i, status); });
  }
  return all;
}

}  // namespace stoker
