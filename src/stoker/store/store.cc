#include "stoker/store/store.h"

#include <algorithm>

#include "stoker/base/bytes.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/condition.h"

namespace stoker {
namespace {

constexpr uint64_t kCopyPiece = 4 * kMiB;

}  // namespace

Status check_required(std::string_view key, std::string_view tag, std::string_view found) {
  if (tag == found) return {};
  const std::string name = "'" + std::string(key) + "'";
  const std::string what = found.empty() ? name + " is gone"
                           : tag.empty() ? name + " is there already"
                                         : name + " was changed meanwhile";
  return fail(Code::conflict, "{}: nothing was committed; look at the object, then decide", what);
}

Status Transaction::require(std::string_view key, std::string_view /*tag*/) {
  return fail(Code::unsupported,
              "this store has no conditional writes, so no condition can be set for '{}'; use a "
              "store with features().conditional",
              key);
}

Status Transaction::name(std::string_view snapshot) {
  return fail(Code::unsupported,
              "this store has no snapshots, so no version can be named '{}'; use a store with "
              "features().snapshots",
              snapshot);
}

Future<View> Store::view(std::string_view key, uint64_t offset, size_t bytes, ReadOptions options) {
  STOKER_ASSIGN(const ObjectInfo object, stat(key, options.snapshot));  // before it takes memory
  if (offset > object.bytes || bytes > object.bytes - offset)
    return fail(Code::invalid_argument,
                "a view of '{}' ends behind its {} bytes; make the view shorter", key,
                object.bytes);
  const auto memory = std::make_shared<AlignedBytes>(std::max<size_t>(bytes, 1));
  return read(key, offset, memory->slice().sub(0, bytes), options)
      .then([memory, bytes](const Status& status) -> Result<View> {
        if (!status) return status.error();
        return View{std::shared_ptr<const std::byte>(memory, memory->data()), bytes};
      });
}

Result<Level> Store::list_level(std::string_view prefix, std::string_view snapshot) {
  STOKER_ASSIGN(auto all, list(prefix, snapshot));
  Level level;
  for (ObjectInfo& each : all) {
    const size_t slash = each.key.find('/', prefix.size());
    if (slash == std::string::npos) {
      level.objects.push_back(std::move(each));
      continue;
    }
    each.key.resize(slash + 1);
    if (level.folders.empty() || level.folders.back() != each.key)
      level.folders.push_back(std::move(each.key));
  }
  return level;
}

Status Store::remove(const std::vector<std::string>& keys) {
  const size_t at_once = features().atomic == AtomicUnit::object ? 1 : keys.size();
  for (size_t at = 0; at < keys.size(); at += at_once) {
    STOKER_ASSIGN(const auto change, begin());
    for (size_t i = at; i < at + at_once; ++i) STOKER_TRY(change->remove(keys[i]));
    if (const auto done = change->commit(Durability::durable).wait(); !done) return done.error();
  }
  return {};
}

Result<Version> Store::copy(std::string_view from, std::string_view to) {
  STOKER_ASSIGN(const ObjectInfo source, stat(from));
  if (from == to) return fail(Code::invalid_argument, "'{}' cannot be copied to itself", from);
  STOKER_ASSIGN(const auto change, begin());
  if (features().conditional && features().atomic == AtomicUnit::transaction)
    STOKER_TRY(change->require(from, source.tag));
  if (features().update && stat(to)) STOKER_TRY(change->remove(to));
  STOKER_TRY(change->resize(to, source.bytes, source.chunk_bytes));
  const AlignedBytes memory(std::min(kCopyPiece, source.bytes));
  for (uint64_t at = 0; at < source.bytes; at += kCopyPiece) {
    const Slice piece = memory.slice().sub(0, std::min(kCopyPiece, source.bytes - at));
    STOKER_TRY(read(from, at, piece, {.priority = Priority::write_back}).wait());
    STOKER_TRY(change->write(to, at, piece).wait());
  }
  return change->commit(Durability::durable).wait();
}

}  // namespace stoker
