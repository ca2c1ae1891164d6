// The XML of S3's answers on any bytes: it ends, and what it takes has a name and is not deep.
#include <algorithm>
#include <cstdint>
#include <string_view>

#include "stoker/base/check.h"
#include "stoker/store/s3/xml.h"

namespace {

size_t depth_of(const stoker::s3::Xml& xml) {
  STOKER_CHECK(!xml.name.empty());
  size_t deepest = 0;
  for (const auto& child : xml.children) deepest = std::max(deepest, depth_of(child));
  return deepest + 1;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto xml = stoker::s3::parse_xml({reinterpret_cast<const char*>(data), size});
  if (xml) STOKER_CHECK(depth_of(*xml) <= 16);
  return 0;
}
