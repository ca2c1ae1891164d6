#include "stoker/store/read_many.h"

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace stoker {
namespace {

constexpr const char* kWhere = "store/read_many";

// Counts the reads down, and keeps the error of the first piece that failed.
class Rest {
 public:
  explicit Rest(size_t reads) : left_(reads), first_failed_(reads) {}

  Future<void> future() const { return promise_.future(); }
  void done(size_t piece, const Status& status) {
    std::unique_lock lock(mutex_);
    if (!status && piece < first_failed_) {
      first_failed_ = piece;
      error_ = status.error();
    }
    if (--left_ != 0) return;
    lock.unlock();
    promise_.complete(error_ ? Status(*error_) : Status());
  }

 private:
  std::mutex mutex_;
  size_t left_;                 // guarded by mutex_
  size_t first_failed_;         // guarded by mutex_
  std::optional<Error> error_;  // guarded by mutex_ while left_ is not zero
  Promise<void> promise_;
};

Status check(size_t keys, const Piece& piece, size_t number, size_t memory) {
  const std::string name = "piece " + std::to_string(number) + " of a batch";
  if (piece.object >= keys) {
    return make_error(Code::invalid_argument,
                      name + " is of object " + std::to_string(piece.object) + ", but there are " +
                          std::to_string(keys) + " keys",
                      kWhere);
  }
  if (piece.into > memory || piece.bytes > memory - piece.into) {
    return make_error(Code::invalid_argument,
                      name + " ends behind the " + std::to_string(memory) + " bytes of memory",
                      kWhere);
  }
  return {};
}

}  // namespace

Future<void> read_many(Store& store, std::span<const std::string> keys,
                       std::span<const Piece> pieces, Slice into, const ReadOptions& options) {
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (const Status status = check(keys.size(), pieces[i], i, into.size); !status)
      return status.error();
  }
  if (pieces.empty()) return Status();
  const auto rest = std::make_shared<Rest>(pieces.size());
  Future<void> all = rest->future();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    store.read(keys[piece.object], piece.offset, into.sub(piece.into, piece.bytes), options)
        .on_done([rest, i](const Status& status) { rest->done(i, status); });
  }
  return all;
}

}  // namespace stoker
