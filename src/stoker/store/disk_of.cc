#include "stoker/store/disk_of.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <optional>

namespace stoker {
namespace {

namespace fs = std::filesystem;

constexpr int kLevelsMax = 16;  // of devices on devices

std::optional<uint64_t> number_at(const fs::path& node) {
  unsigned high = 0, low = 0;
  char colon = 0;
  if (!(std::ifstream(node / "dev") >> high >> colon >> low) || colon != ':') return {};
  return makedev(high, low);
}

// `node` is the folder of a block device: .../sda, .../sda/sda1 (with a file `partition`),
// .../virtual/block/dm-0 (with links to what it is made of in `slaves`).
void add_disks(const fs::path& node, int levels, Disks& disks) {
  std::error_code error;
  const fs::path whole = fs::exists(node / "partition", error) ? node.parent_path() : node;
  bool composed = false;
  for (auto at = fs::directory_iterator(whole / "slaves", error);
       !error && at != fs::directory_iterator(); at.increment(error)) {
    composed = true;
    std::error_code lost;
    const fs::path below = fs::canonical(at->path(), lost);
    if (lost || levels == 0) {
      disks.told = false;
    } else {
      add_disks(below, levels - 1, disks);
    }
  }
  if (composed) return;
  const auto number = number_at(whole);
  if (number) disks.numbers.insert(*number);
  disks.told = disks.told && number.has_value();
}

}  // namespace

bool Disks::shares(const Disks& other) const {
  return std::any_of(numbers.begin(), numbers.end(),
                     [&](uint64_t number) { return other.numbers.contains(number); });
}

Disks disks_of_device(unsigned major, unsigned minor, const std::string& sysfs) {
  Disks disks;
  std::error_code error;
  const fs::path node = fs::canonical(
      sysfs + "/dev/block/" + std::to_string(major) + ":" + std::to_string(minor), error);
  if (!error) add_disks(node, kLevelsMax, disks);
  if (disks.numbers.empty()) {
    disks.numbers.insert(makedev(major, minor));
    disks.told = false;
  }
  return disks;
}

Result<Disks> disks_of(const std::string& path, const std::string& sysfs) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return fail(errno, "cannot look at '{}'", path);
  const dev_t device = S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev;
  return disks_of_device(major(device), minor(device), sysfs);
}

}  // namespace stoker
