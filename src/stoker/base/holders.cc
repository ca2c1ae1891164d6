#include "stoker/base/holders.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace stoker {
namespace {

namespace fs = std::filesystem;

std::string process(const std::string& number) {
  if (number == std::to_string(getpid())) return "this process";
  std::ifstream in("/proc/" + number + "/comm");
  std::string name;
  std::getline(in, name);
  return "process " + number + (name.empty() ? "" : " (" + name + ")");
}

bool has_open(const fs::path& process, const fs::path& file) {
  std::error_code error;
  fs::directory_iterator at(process / "fd", error);
  for (; !error && at != fs::directory_iterator(); at.increment(error)) {
    std::error_code gone;
    if (fs::read_symlink(at->path(), gone) == file) return true;
  }
  return false;
}

}  // namespace

// A line is "1: FLOCK  ADVISORY  WRITE 7 00:05:123 0 EOF".
std::string lock_holder(int fd) {
  struct stat st {};
  if (fstat(fd, &st) != 0) return {};
  std::ifstream in("/proc/locks");
  std::string number, kind, advisory, access, holder, place;
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    words >> number >> kind >> advisory >> access >> holder >> place;
    unsigned major = 0, minor = 0;
    unsigned long inode = 0;
    if (!words || kind != "FLOCK" || holder.starts_with('-') || holder == "0" ||
        std::sscanf(place.c_str(), "%x:%x:%lu", &major, &minor, &inode) != 3)
      continue;
    if (inode == st.st_ino && makedev(major, minor) == st.st_dev) return process(holder);
  }
  return {};
}

std::string opener_of(const std::string& path) {
  std::error_code error;
  const fs::path file = fs::canonical(path, error);
  if (error) return {};
  const std::string self = std::to_string(getpid());
  fs::directory_iterator at("/proc", error);
  for (; !error && at != fs::directory_iterator(); at.increment(error)) {
    const std::string number = at->path().filename();
    if (number.find_first_not_of("0123456789") != std::string::npos || number == self) continue;
    if (has_open(at->path(), file)) return process(number);
  }
  return {};
}

}  // namespace stoker
