// What an object is expected to see. Being wrong about it costs speed only.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace stoker {

enum class Class : uint8_t { read_only, write_only, read_write };
inline constexpr std::array<std::string_view, 3> kClasses = {"read_only", "write_only",
                                                             "read_write"};

// None: no class has this name.
constexpr std::optional<Class> class_of(std::string_view name) {
  for (size_t i = 0; i < kClasses.size(); ++i) {
    if (kClasses[i] == name) return static_cast<Class>(i);
  }
  return {};
}

}  // namespace stoker
