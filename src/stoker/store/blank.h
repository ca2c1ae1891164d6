// Whether a file or device holds nothing at all, so that a store may be made of it.
#pragma once

#include <cstdint>
#include <optional>

#include "stoker/base/result.h"
#include "stoker/io/loop.h"

namespace stoker {

// A block at or behind `from` (a multiple of 4 KiB) that is not all zeros, as its offset; none if
// there is none. `fd` is a descriptor of the same file, or -1: the file system tells by it which
// ranges were never written, and these are not read. Waits for reads.
Result<std::optional<uint64_t>> first_written(Loop& loop, const FileInfo& file, int fd,
                                              uint64_t from);

}  // namespace stoker
