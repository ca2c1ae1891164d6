// Which disks a path lies on: things on one disk are lost together.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "stoker/base/result.h"

namespace stoker {

struct Disks {
  // of the devices, as the kernel numbers them: of the disks, or of what stands in for disks that
  // are not told
  std::set<uint64_t> numbers;
  bool told = true;  // false: which disks they are the kernel does not tell

  // one disk at least: what it holds of both is lost together
  bool shares(const Disks& other) const;
};

// The disks of a block device, or of the file system that a file lies on: a partition is on its
// disk, and what is put together of others (LVM, RAID, dm-crypt, bcache) on all of those. Not told
// is a file system that has no device of its own (btrfs, ZFS, NFS, overlay): two paths on one of
// these are still known to share it. A loop device counts as a disk. `sysfs` is where the kernel
// tells it; tests have another.
Result<Disks> disks_of(const std::string& path, const std::string& sysfs = "/sys");
Disks disks_of_device(unsigned major, unsigned minor, const std::string& sysfs);

}  // namespace stoker
