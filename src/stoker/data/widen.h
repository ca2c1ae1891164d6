// Integers of any width as int64, which torch takes for indices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace stoker::data {

enum class Integer : uint8_t { u8, i8, u16, i16, u32, i32, i64 };

// By numpy's name ("uint16"); nothing for what is no such integer.
std::optional<Integer> integer_of(std::string_view name);
size_t bytes_of(Integer kind);
// Little-endian integers at any address. `to` does not overlap `from`.
void widen(Integer kind, const std::byte* from, size_t count, int64_t* to);

}  // namespace stoker::data
