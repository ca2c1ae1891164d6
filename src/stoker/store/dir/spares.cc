#include "stoker/store/dir/spares.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/log.h"
#include "stoker/store/dir/beneath.h"

namespace stoker::dir {
namespace {

constexpr size_t kMostFiles = 128;  // each is an open file

// Nobody else has it open or mapped. A lease for writing is granted to the only one. The kernel
// sends a signal when somebody opens the file meanwhile: SIGIO, unless told so, ends the program.
bool alone(const Fd& file) {
  if (fcntl(file.get(), F_SETSIG, SIGURG) != 0) return false;  // which is ignored
  if (fcntl(file.get(), F_SETLEASE, F_WRLCK) != 0) return false;
  return fcntl(file.get(), F_SETLEASE, F_UNLCK) == 0;
}

}  // namespace

bool spares_gain(const Fd& file) {
  struct statfs fs {};
  return fstatfs(file.get(), &fs) == 0 &&
         (fs.f_type == EXT4_SUPER_MAGIC || fs.f_type == XFS_SUPER_MAGIC);
}

bool Spares::fits(uint64_t bytes) const {
  return bytes <= limit_ && held_ <= limit_ - bytes && spares_.size() < kMostFiles;
}

void Spares::keep(uint64_t bytes) {
  {
    const MutexLock lock(mutex_);
    limit_ = bytes;
  }
  keep_at_most(bytes);
}

void Spares::keep_at_most(uint64_t bytes) {
  std::vector<Spare> gone;  // closed without the mutex: that gives the space back
  {
    const MutexLock lock(mutex_);
    while (held_ > bytes) {
      STOKER_CHECK(!spares_.empty() && held_ >= spares_.back().bytes);
      gone.push_back(std::move(spares_.back()));
      spares_.pop_back();
      held_ -= gone.back().bytes;
    }
  }
  for (const Spare& each : gone) {  // emptied, as a forked child may have it open
    if (is_ours(each) && ftruncate(each.file.get(), 0) != 0)
      log().warn("cannot empty '{}'", each.name);
    unlinkat(folder_.get(), each.name.c_str(), 0);
  }
}

std::optional<Spare> Spares::hold(const Fd& folder, const std::string& name) const {
  {
    const MutexLock lock(mutex_);
    if (limit_ == 0) return {};
  }
  Spare spare;
  spare.file = Fd(openat(folder.get(), name.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat status {};
  if (!spare.file || fstat(spare.file.get(), &status) != 0 || !S_ISREG(status.st_mode)) return {};
  spare.bytes = static_cast<uint64_t>(status.st_size);
  {
    const MutexLock lock(mutex_);
    if (spare.bytes < smallest_ || !fits(spare.bytes)) return {};
  }
  if (!spares_gain(spare.file) || flock(spare.file.get(), LOCK_EX | LOCK_NB) != 0) return {};
  spare.name = make_own_name();
  return spare;
}

// Its only name is the one we gave it, and nobody else has it open.
bool Spares::is_ours(const Spare& spare) const {
  if (!alone(spare.file)) return false;  // who could give it another name would have it open
  struct stat named {
  }, opened{};
  return fstatat(folder_.get(), spare.name.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0 &&
         fstat(spare.file.get(), &opened) == 0 && opened.st_nlink == 1 &&
         named.st_ino == opened.st_ino && named.st_dev == opened.st_dev;
}

std::optional<Fd> Spares::add(Spare spare) {
  // Where it lies now, more people may look for it than where it was.
  if (is_ours(spare) && fchmod(spare.file.get(), S_IRUSR | S_IWUSR) == 0) {
    const MutexLock lock(mutex_);
    if (fits(spare.bytes)) {
      held_ += spare.bytes;
      spares_.push_back(std::move(spare));
      return {};
    }
  }
  unlinkat(folder_.get(), spare.name.c_str(), 0);
  return std::move(spare.file);
}

std::optional<Spare> Spares::take(uint64_t bytes) {
  if (bytes < smallest_) return {};
  const MutexLock lock(mutex_);
  const auto far = [bytes](const Spare& spare) {
    return spare.bytes > bytes ? spare.bytes - bytes : bytes - spare.bytes;
  };
  const auto nearest =
      std::min_element(spares_.begin(), spares_.end(),
                       [&](const Spare& a, const Spare& b) { return far(a) < far(b); });
  if (nearest == spares_.end()) return {};
  Spare spare = std::move(*nearest);
  spares_.erase(nearest);
  STOKER_CHECK(held_ >= spare.bytes);
  held_ -= spare.bytes;
  if (is_ours(spare)) return spare;
  unlinkat(folder_.get(), spare.name.c_str(), 0);  // somebody found it here
  return {};
}

}  // namespace stoker::dir
