// run_load: keeps a file busy with a given pattern and tells how fast it went. What the probe and
// the benchmark measure with.
#pragma once

#include <cstdint>
#include <string_view>

#include "stoker/io/loop.h"
#include "stoker/memory/slice.h"

namespace stoker {

struct Load {
  enum class Kind : uint8_t { read, write, mixed };  // mixed: every second operation writes

  Kind kind = Kind::read;
  size_t block_bytes = 1 << 20;
  uint32_t depth = 32;  // operations under way at any time
  // the part of the file that is used, one block after the other and again from the start
  uint64_t file_bytes = 0;
  uint64_t limit_ns = 0;  // starts nothing after that; 0: one pass over file_bytes
  uint64_t offset = 0;    // where in the file that part begins
};

std::string_view name(Load::Kind kind);

struct LoadResult {
  uint64_t ns = 0;  // from the first submission to the last completion
  uint64_t read_bytes = 0, written_bytes = 0, operations = 0;

  double bytes_per_second() const {
    return ns == 0
               ? 0.0
               : static_cast<double>(read_bytes + written_bytes) * 1e9 / static_cast<double>(ns);
  }
};

// Blocks the calling thread until all is through. `memory` holds depth * block_bytes, aligned. The
// first error ends it.
Result<LoadResult> run_load(Loop& loop, FileId file, const Slice& memory, const Load& load);

}  // namespace stoker
