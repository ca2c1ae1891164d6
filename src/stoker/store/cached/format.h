// The bytes that a cache keeps in FAST: docs/formats/cache.md.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "stoker/base/result.h"
#include "stoker/store/cached/block_id.h"

namespace stoker::cached {

inline constexpr size_t kHeaderBytes = 4096;
inline constexpr size_t kRecordBytes = 32;
inline constexpr uint64_t kSlotsPerObject = 4096;
inline constexpr std::string_view kMapKey = "cache/map";

struct Header {
  uint32_t block_bytes = 0;
  uint64_t slots = 0;
  std::array<std::byte, 32> slow = {};  // identity() of SLOW

  bool operator==(const Header&) const = default;
};

struct Record {
  BlockId id = {};
  uint32_t slot = 0;
  uint32_t bytes = 0;  // 0: the slot is free

  bool operator==(const Record&) const = default;
};

// What the map says in the end.
struct Map {
  Header header;
  std::vector<Record> used;  // by slot
  uint64_t records = 0;      // that were read
};

std::array<std::byte, 32> identity(std::string_view composition);
BlockId block_id(std::string_view key, std::string_view tag, uint64_t block);
std::string slots_key(uint64_t slot);

std::string encode(const Header& header);
std::string encode(std::span<const Record> records);
// corruption, mismatch (of the version)
Result<Map> decode(std::span<const std::byte> bytes);

}  // namespace stoker::cached
