#include "stoker/store/writer_lock.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "stoker/base/holders.h"
#include "stoker/base/log.h"
#include "stoker/base/mutex.h"

namespace stoker {
namespace {

// The descriptors that hold locks. fork() copies them, and a lock lives until it is let go of or
// the last copy is closed. A child closes its copies at once, or a DataLoader's worker would keep
// the store when its parent was killed; and whoever took a lock lets go of it, because a child
// that just began, or has yet to exec, still has its copy.
class Held {
 public:
  static Held& all() {
    static Held* const held = [] {
      auto* made = new Held;  // for good: a thread may let go of a store while the program ends
      pthread_atfork([]() NO_THREAD_SAFETY_ANALYSIS { all().mutex_.lock(); },
                     []() NO_THREAD_SAFETY_ANALYSIS { all().mutex_.unlock(); },
                     [] { all().forked(); });
      return made;
    }();
    return *held;
  }
  int add(int fd) {
    MutexLock lock(mutex_);
    fds_.insert(fd);
    return fd;
  }
  void drop(int fd) {
    MutexLock lock(mutex_);
    if (fds_.erase(fd) == 0) return;
    flock(fd, LOCK_UN);
    ::close(fd);
  }

 private:
  // In the child: the fork took the mutex.
  void forked() NO_THREAD_SAFETY_ANALYSIS {
    for (const int fd : fds_) ::close(fd);
    fds_.clear();
    mutex_.unlock();
  }
  Mutex mutex_;
  std::set<int> fds_ GUARDED_BY(mutex_);
};

std::string read_holder(int fd) {
  char text[kHolderBytes] = {};
  const ssize_t got = pread(fd, text, sizeof text - 1, static_cast<off_t>(kHolderAt));
  if (got > 0 && text[0] != '\0') return text;
  const std::string holder = lock_holder(fd);  // a device has no place for a name
  return holder.empty() ? "another process" : holder;
}

// Who is in the way of a lock that was refused; readers leave no name. Empty: nobody any more, and
// the lock is ours.
std::string in_the_way(int fd, bool read_only) {
  if (read_only || flock(fd, LOCK_SH | LOCK_NB) != 0) return "in use by " + read_holder(fd);
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) return {};
  return "being read by another process (`stoker ls`, `fsck` or `export`, say)";
}

}  // namespace

void write_holder(int fd, const std::string& name) {
  char text[kHolderBytes] = {};
  std::memcpy(text, name.data(), std::min(name.size(), sizeof text - 1));
  if (pwrite(fd, text, sizeof text, static_cast<off_t>(kHolderAt)) < 0)
    log().info("cannot note the holder of the store: {}", std::strerror(errno));
}

Result<int> lock_file(const std::string& file_path, const std::string& path, bool read_only) {
  Held::all();  // before there is a lock to be copied
  const int fd = ::open(file_path.c_str(), (read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC);
  if (fd < 0) return fail(errno, "cannot open the store '{}'", path);
  if (flock(fd, (read_only ? LOCK_SH : LOCK_EX) | LOCK_NB) == 0) return Held::all().add(fd);
  const int error = errno;
  if (error == EWOULDBLOCK) {
    const std::string who = in_the_way(fd, read_only);
    if (who.empty()) return Held::all().add(fd);
    ::close(fd);
    return fail(Code::busy, "the store '{}' is {}; wait until it ends, or use another store", path,
                who);
  }
  if (read_only) {
    log().info("the file system of '{}' has no locks: a writer at work would not be noticed", path);
    return Held::all().add(fd);
  }
  ::close(fd);
  return fail(error, "cannot lock the store '{}'", path);
}

void unlock_file(int fd) { Held::all().drop(fd); }

}  // namespace stoker
