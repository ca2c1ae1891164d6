// Names one block of one content of one object: the key, the tag and the index, hashed.
#pragma once

#include <array>
#include <cstdint>
#include <functional>

namespace stoker::cached {

using BlockId = std::array<uint64_t, 2>;

struct BlockIdHash {
  size_t operator()(const BlockId& id) const { return id[0]; }
};

}  // namespace stoker::cached
