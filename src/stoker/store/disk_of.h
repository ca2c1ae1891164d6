// Which disk a path lies on: things on one disk are lost together.
#pragma once

#include <cstdint>
#include <string>

#include "stoker/base/result.h"

namespace stoker {

// A number that two paths share if they lie on one disk, as far as the kernel tells: the device of a block device or of a file's file
// system, and where that is a partition the disk that it is on. What is put together of several disks (LVM, RAID) counts as one.
Result<uint64_t> disk_of(const std::string& path);

}  // namespace stoker
