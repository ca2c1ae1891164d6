// What an object is expected to see. Being wrong about it costs speed only.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace stoker {

enum class Class : uint8_t { read_only, write_only, read_write };
inline constexpr std::array<std::string_view, 3> kClasses = {"read_only", "write_only", "read_write"};

}  // namespace stoker
