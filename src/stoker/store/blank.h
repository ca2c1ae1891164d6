// Whether a file or device holds nothing at all, so that a store may be made of it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "stoker/base/result.h"
#include "stoker/io/loop.h"

namespace stoker {

// A block at or behind `from` (a multiple of 4 KiB) that is not all zeros, as its offset; none if
// there is none. `fd` is a descriptor of the same file, or -1: the file system tells by it which
// ranges were never written, and these are not read. Waits for reads.
Result<std::optional<uint64_t>> first_written(Loop& loop, const FileInfo& file, int fd,
                                              uint64_t from);

// What a device seems to hold, by its first 64 KiB: "a GPT partition table", "an ext4 file system";
// "something" where it is not known.
std::string_view what_begins_with(std::span<const std::byte> head);

// Deletes what the volumes hold, namespaces ("nvme:...") or block devices, so that all of it reads
// as zeros, durably. What is mounted or in use by a store stays, with the error busy.
Status make_blank(Loop& loop, const std::vector<std::string>& devices);

}  // namespace stoker
