#include "stoker/data/record.h"

#include <cstring>

namespace stoker::data {

bool split_record(const RecordLayout& layout, std::span<const std::byte> record,
                  std::vector<Place>& places) {
  uint64_t sizes = 0;  // bytes of the sizes in front
  for (const uint64_t fixed : layout) sizes += fixed == 0 ? sizeof(uint32_t) : 0;
  if (sizes > record.size()) return false;
  const size_t before = places.size();
  const std::byte* size_at = record.data();
  uint64_t at = sizes;
  for (const uint64_t fixed : layout) {
    uint64_t bytes = fixed;
    if (fixed == 0) {
      uint32_t said = 0;
      std::memcpy(&said, size_at, sizeof(said));
      size_at += sizeof(said);
      bytes = said;
    }
    if (bytes > record.size() - at) {
      places.resize(before);
      return false;
    }
    places.push_back({at, bytes});
    at += bytes;
  }
  if (at == record.size()) return true;
  places.resize(before);
  return false;
}

}  // namespace stoker::data
