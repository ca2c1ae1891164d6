// A reduced chunk of any bytes; and that any bytes come back.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "stoker/base/check.h"
#include "stoker/codec/reduction.h"

using namespace stoker::codec;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const std::span bytes = std::as_bytes(std::span(data + 2, size - 2));
  std::vector<std::byte> into(size_t{data[1]} * 257);
  (void)expand(bytes, data[0] % 10, into);

  std::vector<std::byte> from;  // long enough to be worth it
  for (size_t i = 0; i < 8 && !bytes.empty(); ++i)
    from.insert(from.end(), bytes.begin(), bytes.end());
  std::vector<std::byte> stored(from.size());
  const Reduced how = reduce(from, stored);
  STOKER_CHECK(how.bytes <= from.size());
  std::vector<std::byte> back(from.size());
  const std::span<const std::byte> there = how.width == 0 ? from : stored;
  STOKER_CHECK(expand(there.first(how.bytes), how.width, back).has_value());
  STOKER_CHECK(back == from);
  return 0;
}
