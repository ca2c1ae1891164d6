#include "stoker/data/widen.h"

#include <array>
#include <cstring>

namespace stoker::data {
namespace {

struct Kind {
  std::string_view name;
  size_t bytes;
};
constexpr std::array<Kind, 7> kKinds = {{{"uint8", 1},
                                         {"int8", 1},
                                         {"uint16", 2},
                                         {"int16", 2},
                                         {"uint32", 4},
                                         {"int32", 4},
                                         {"int64", 8}}};

template <typename T>
void widen_as(const std::byte* from, size_t count, int64_t* to) {
  for (size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + i * sizeof(T), sizeof(T));
    to[i] = int64_t{value};
  }
}

}  // namespace

std::optional<Integer> integer_of(std::string_view name) {
  for (size_t i = 0; i < kKinds.size(); ++i) {
    if (kKinds[i].name == name) return static_cast<Integer>(i);
  }
  return std::nullopt;
}

size_t bytes_of(Integer kind) { return kKinds[static_cast<size_t>(kind)].bytes; }

void widen(Integer kind, const std::byte* from, size_t count, int64_t* to) {
  switch (kind) {
    case Integer::u8:
      return widen_as<uint8_t>(from, count, to);
    case Integer::i8:
      return widen_as<int8_t>(from, count, to);
    case Integer::u16:
      return widen_as<uint16_t>(from, count, to);
    case Integer::i16:
      return widen_as<int16_t>(from, count, to);
    case Integer::u32:
      return widen_as<uint32_t>(from, count, to);
    case Integer::i32:
      return widen_as<int32_t>(from, count, to);
    case Integer::i64:
      return widen_as<int64_t>(from, count, to);
  }
}

}  // namespace stoker::data
