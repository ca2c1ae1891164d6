/* A disk that misbehaves where and how a test says. To be preloaded (LD_PRELOAD); Python calls
   misbehave() by ctypes. It stands before the system calls of the posix engine, so all of Stoker is
   as in any run. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum {
  WELL,
  READS_FAIL,
  READS_END,
  READS_ARE_SHORT,
  ALL_FAILS,
  WRITES_ARE_SLOW,
  WRITES_FAIL,
  WRITES_ARE_SHORT,
  DISK_IS_FULL
};

static char prefix[PATH_MAX];
static off_t begin_at, end_at;
static atomic_int way;
static atomic_long met;

/* From now on, files whose path begins so, in bytes [begin, end). `how` is WELL, or it was until
 * now: other threads may be looking at the rest. */
void misbehave(int how, const char *path, long begin, long end) {
  way = WELL;
  if (how == WELL) return;
  snprintf(prefix, sizeof prefix, "%s", path);
  begin_at = begin;
  end_at = end;
  met = 0;
  way = how;
}

/* How many calls it met. */
long misbehaved(void) { return met; }

static int how_to(int fd, off_t at, size_t bytes) {
  char link[64], path[PATH_MAX];
  const int how = way;
  if (how == WELL || at >= end_at || at + (off_t)bytes < begin_at + 1) return WELL;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return WELL;
  path[length] = '\0';
  if (strncmp(path, prefix, strlen(prefix)) != 0) return WELL;
  return how;
}

static ssize_t fails(void) {
  ++met;
  errno = EIO;
  return -1;
}

ssize_t pread(int fd, void *into, size_t bytes, off_t at) {
  ssize_t (*call)(int, void *, size_t, off_t) =
      (ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
  const int how = how_to(fd, at, bytes);
  if (how == READS_FAIL || how == ALL_FAILS) return fails();
  if (how == READS_END) {
    ++met;
    return 0;
  }
  if (how == READS_ARE_SHORT && bytes >= 8192) {
    ++met;
    bytes = bytes / 2 / 4096 * 4096;
  }
  return call(fd, into, bytes, at);
}

ssize_t pwrite(int fd, const void *from, size_t bytes, off_t at) {
  ssize_t (*call)(int, const void *, size_t, off_t) =
      (ssize_t(*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
  const int how = how_to(fd, at, bytes);
  if (how == ALL_FAILS || how == WRITES_FAIL) return fails();
  if (how == DISK_IS_FULL) {
    ++met;
    errno = ENOSPC;
    return -1;
  }
  if (how == WRITES_ARE_SHORT && bytes >= 8192) {
    ++met;
    bytes = bytes / 2 / 4096 * 4096;
  }
  if (how == WRITES_ARE_SLOW) {
    ++met;
    usleep(20000);
  }
  return call(fd, from, bytes, at);
}

int fdatasync(int fd) {
  int (*call)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
  return how_to(fd, begin_at, 1) == ALL_FAILS ? (int)fails() : call(fd);
}

ssize_t pread64(int fd, void *into, size_t bytes, off_t at) __attribute__((alias("pread")));
ssize_t pwrite64(int fd, const void *from, size_t bytes, off_t at) __attribute__((alias("pwrite")));
