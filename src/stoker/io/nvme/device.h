// The kernel's side of NVMe: /dev/ngXnY takes the drive's own commands, without the block layer.
#pragma once

#include <string>
#include <vector>

#include "stoker/io/engine.h"
#include "stoker/io/file_table.h"
#include "stoker/io/nvme/command.h"

namespace stoker::nvme {

// Opens the target of "nvme:/dev/ng0n1" and asks the drive what it is. The id is not filled in.
Result<FileTable::File> open_device(const OpenFile& request);

// The file of a target's range in its namespace; the path and the rights as requested.
Status fill_in(FileTable::File& file, const OpenFile& request, const Target& target,
               const Space& space);

// The block device of the same namespace: "/dev/nvme0n1" of "/dev/ng0n1".
std::string block_device_of(const std::string& device);

// One NVMe controller on the PCI bus.
struct Drive {
  std::string address;               // "0000:00:04.0"
  std::string driver;                // "nvme", "vfio-pci", or empty: none
  std::string model;                 // known where the kernel drives it
  std::vector<std::string> devices;  // "/dev/ng0n1"
};
// In the order of their addresses. `sys` is where sysfs is mounted.
Result<std::vector<Drive>> list_drives(const std::string& sys = "/sys");

// Takes the drive from the kernel's driver and gives it to vfio-pci, or back. Refuses while
// something uses one of its block devices.
Status bind_drive(const std::string& address, const std::string& sys = "/sys");
Status unbind_drive(const std::string& address, const std::string& sys = "/sys");

}  // namespace stoker::nvme
