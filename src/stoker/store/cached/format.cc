// The encoding of docs/formats/cache.md.
#include "stoker/store/cached/format.h"

#include <openssl/sha.h>

#include <cstdio>
#include <map>
#include <unordered_set>

#include "stoker/base/bytes.h"
#include "stoker/base/crc32c.h"

namespace stoker::cached {
namespace {

constexpr std::string_view kMagic = "STKCACHE";
constexpr uint32_t kVersion = 1;

std::array<std::byte, 32> sha256(std::string_view text) {
  std::array<std::byte, 32> digest;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  return digest;
}

Error damaged(const std::string& what) {
  return fail(Code::corruption, "the map of the cache is damaged: {}", what);
}

uint32_t crc_at(std::span<const std::byte> bytes) { return ByteReader(bytes).get<uint32_t>(); }

}  // namespace

std::array<std::byte, 32> identity(std::string_view composition) { return sha256(composition); }

BlockId block_id(std::string_view key, std::string_view tag, uint64_t block) {
  ByteWriter name;
  name.put_string(key);
  name.put_string(tag);
  name.put(block);
  const auto digest = sha256(name.bytes());
  BlockId id;
  std::memcpy(id.data(), digest.data(), sizeof(id));
  return id;
}

std::string slots_key(uint64_t slot) {
  std::array<char, 32> name;
  const int size = std::snprintf(name.data(), name.size(), "cache/slots-%04llu",
                                 static_cast<unsigned long long>(slot / kSlotsPerObject));
  return {name.data(), static_cast<size_t>(size)};
}

std::string encode(const Header& header) {
  ByteWriter out;
  out.put_bytes(std::as_bytes(std::span(kMagic)));
  out.put(kVersion);
  out.put(header.block_bytes);
  out.put(header.slots);
  out.put_bytes(header.slow);
  std::string bytes = out.take();
  bytes.resize(kHeaderBytes - sizeof(uint32_t));
  ByteWriter crc;
  crc.put(crc32c(bytes.data(), bytes.size()));
  return bytes + crc.bytes();
}

std::string encode(std::span<const Record> records) {
  std::string all;
  all.reserve(records.size() * kRecordBytes);
  for (const Record& record : records) {
    ByteWriter out;
    out.put(record.id[0]);
    out.put(record.id[1]);
    out.put(record.slot);
    out.put(record.bytes);
    out.put(uint32_t{0});
    out.put(crc32c(out.bytes().data(), out.size()));
    all += out.bytes();
  }
  return all;
}

Result<Map> decode(std::span<const std::byte> bytes) {
  if (bytes.size() < kHeaderBytes || (bytes.size() - kHeaderBytes) % kRecordBytes != 0)
    return damaged("it has " + std::to_string(bytes.size()) + " bytes");
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0)
    return damaged("it does not begin with " + std::string(kMagic));
  constexpr size_t kCrcAt = kHeaderBytes - sizeof(uint32_t);
  if (crc32c(bytes.data(), kCrcAt) != crc_at(bytes.subspan(kCrcAt)))
    return damaged("the header differs from its checksum");
  ByteReader head(bytes.subspan(kMagic.size(), kCrcAt - kMagic.size()));
  const auto version = head.get<uint32_t>();
  if (version != kVersion)
    return fail(Code::mismatch, "the cache has format {}, but this Stoker reads format {}", version,
                kVersion);
  Map map;
  map.header.block_bytes = head.get<uint32_t>();
  map.header.slots = head.get<uint64_t>();
  const auto slow = head.get_bytes(map.header.slow.size());
  std::memcpy(map.header.slow.data(), slow.data(), slow.size());
  std::map<uint32_t, Record> last;  // by slot
  for (size_t at = kHeaderBytes; at < bytes.size(); at += kRecordBytes, ++map.records) {
    const auto each = bytes.subspan(at, kRecordBytes);
    constexpr size_t kBefore = kRecordBytes - sizeof(uint32_t);
    const std::string which = "record " + std::to_string(map.records);
    if (crc32c(each.data(), kBefore) != crc_at(each.subspan(kBefore)))
      return damaged(which + " differs from its checksum");
    ByteReader in(each);
    Record record;
    record.id[0] = in.get<uint64_t>();
    record.id[1] = in.get<uint64_t>();
    record.slot = in.get<uint32_t>();
    record.bytes = in.get<uint32_t>();
    if (record.slot >= map.header.slots || record.bytes > map.header.block_bytes)
      return damaged(which + " is of a slot that cannot be");
    last[record.slot] = record;
  }
  std::unordered_set<BlockId, BlockIdHash> ids;
  for (const auto& [slot, record] : last) {
    if (record.bytes == 0) continue;
    if (!ids.insert(record.id).second)
      return damaged("two slots hold one block, one of them slot " + std::to_string(slot));
    map.used.push_back(record);
  }
  return map;
}

}  // namespace stoker::cached
