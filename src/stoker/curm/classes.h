#pragma once
#include <cstdint>
namespace stoker::curm {
// What an object is expected to see.
enum class Class : uint8_t { read_only, write_only, read_write };
}  // namespace stoker::curm
