#include "stoker/store/disk_of.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

namespace stoker {

Result<uint64_t> disk_of(const std::string& path) {
  struct stat status{};
  if (stat(path.c_str(), &status) != 0) return errno_error(errno, "cannot look at '" + path + "'", "store/disk_of");
  dev_t device = S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev;
  // /sys/dev/block/8:1 is a link to .../sda/sda1, where a partition has a file `partition`, and its disk's number stands above it.
  std::error_code error;
  const auto node = std::filesystem::canonical("/sys/dev/block/" + std::to_string(major(device)) + ":" + std::to_string(minor(device)), error);
  if (!error && std::filesystem::exists(node / "partition", error)) {
    unsigned high = 0;
    unsigned low = 0;
    char colon = 0;
    if (std::ifstream(node.parent_path() / "dev") >> high >> colon >> low && colon == ':') device = makedev(high, low);
  }
  return static_cast<uint64_t>(device);
}

}  // namespace stoker
