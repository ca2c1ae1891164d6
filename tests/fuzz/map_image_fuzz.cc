// The parser of a map's items on any bytes: what it takes, it can write as an image, and read back
// as the same map.
#include <cstdint>
#include <string>
#include <vector>

#include "stoker/base/check.h"
#include "stoker/store/local/map.h"

namespace {

using namespace stoker;
using namespace stoker::local;

MapLimits limits() { return {{{16, 1 << 20}, {16, 1 << 20}}, 4096}; }

bool same(const Table& a, const Table& b) {
  if (a.size() != b.size()) return false;
  for (auto at = a.begin(), bt = b.begin(); at != a.end(); ++at, ++bt) {
    const Object& x = *at->second;
    const Object& y = *bt->second;
    if (at->first != bt->first || x.bytes != y.bytes || x.chunk_bytes != y.chunk_bytes ||
        x.version != y.version || x.chunks != y.chunks)
      return false;
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Map map(limits());
  std::vector<Extent> freed;
  if (!map.apply(std::as_bytes(std::span(data, size)), freed)) return 0;
  Map again(limits());
  const Status written = map.image(512, [&](std::string_view items) {
    return again.apply(std::as_bytes(std::span(items)), freed);
  });
  STOKER_CHECK(written.has_value());
  STOKER_CHECK(again.version() == map.version() && same(map.current(), again.current()) &&
               map.snapshots().size() == again.snapshots().size());
  for (size_t i = 0; i < map.snapshots().size(); ++i)
    STOKER_CHECK(same(map.snapshots()[i].table, again.snapshots()[i].table));
  return 0;
}
