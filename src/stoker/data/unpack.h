// Bytes that were compressed as a whole, with gzip or zstd, become what they were.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "stoker/base/result.h"

namespace stoker::data {

enum class Packing : uint8_t { none, gzip, zstd };

// By the name that an index has for it ("gz", "zstd", ""); nothing for what is no such name.
std::optional<Packing> packing_of(std::string_view name);

// Fills `into` exactly. Both formats may be several members or frames, one behind another. Their
// checksums are compared where they have some. corruption: the bytes are cut or damaged, or they
// unpack to another size; the sentence does not name the object.
Status unpack(Packing packing, std::span<const std::byte> packed, std::span<std::byte> into);

// Of a size that nobody knows, up to `most`.
Result<std::vector<std::byte>> unpack_all(Packing packing, std::span<const std::byte> packed,
                                          uint64_t most);

}  // namespace stoker::data
