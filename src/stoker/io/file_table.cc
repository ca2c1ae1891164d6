#include "stoker/io/file_table.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <bit>
#include <cerrno>

#include "stoker/base/bytes.h"
#include "stoker/base/log.h"
#include "stoker/io/transfer.h"

namespace stoker {
namespace {

std::string parent_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

Error open_error(int sys_errno, const OpenFile& request) {
  const std::string file = "cannot open '" + request.path + "'";
  switch (sys_errno) {
    case ENOENT:
      return fail(sys_errno, "{}{}", file,
                  request.create ? ": its folder does not exist; make the folder"
                                 : ": there is no such file; check the path");
    case EACCES:
    case EPERM:
      return fail(sys_errno, "{}{}", file, request.write ? " for writing" : "");
    case EROFS:
      return fail(sys_errno, "{} for writing: its file system is mounted read-only", file);
    case ETXTBSY:
      return Error{Code::busy, sys_errno,
                   file + ": a program runs from it; end that first, or use another file"};
    default:
      return fail(sys_errno, "{}", file);
  }
}

// Open without hanging on a pipe or taking a folder for a file.
Status check_type(const OpenFile& request) {
  struct stat st {};
  if (stat(request.path.c_str(), &st) != 0) return {};  // open(2) will say why
  if (S_ISREG(st.st_mode) || S_ISBLK(st.st_mode)) return {};
  const std::string what = S_ISDIR(st.st_mode) ? "a folder" : "neither a file nor a block device";
  return fail(Code::invalid_argument, "cannot open '{}': it is {}; name a file or a block device",
              request.path, what);
}

// open(2) with O_DIRECT where the file system has it. Returns the descriptor or -errno.
int open_direct(const char* path, int flags, bool* direct) {
  *direct = true;
  int fd = ::open(path, flags | O_DIRECT | O_CLOEXEC, 0666);
  if (fd < 0 && errno == EINVAL) {
    *direct = false;
    fd = ::open(path, (flags & ~O_EXCL) | O_CLOEXEC, 0666);  // the refused call may have created it
  }
  return fd < 0 ? -errno : fd;
}

uint64_t free_bytes(int fd) {
  struct statvfs fs {};
  return fstatvfs(fd, &fs) == 0 ? static_cast<uint64_t>(fs.f_bavail) * fs.f_frsize : 0;
}

// Gives the new file its full size in blocks that are its own, so that a full disk shows now and
// not in the middle of work. The blocks come first and then the size, which a crash leaves old or
// new: a file is missing, empty or whole, and whoever finds it empty makes it again.
Status reserve(int fd, const OpenFile& request) {
  if (request.reserve_bytes == 0) return {};
  const uint64_t free_before = free_bytes(fd);
  int error = 0;
  for (const int mode : {FALLOC_FL_KEEP_SIZE, 0}) {  // some file systems know only the second
    do {
      error = fallocate(fd, mode, 0, static_cast<off_t>(request.reserve_bytes)) == 0 ? 0 : errno;
    } while (error == EINTR);
    if (error != EOPNOTSUPP) break;
  }
  if (error == EOPNOTSUPP) {
    log().warn(
        "the file system of '{}' cannot reserve space: a full disk will show only while writing",
        request.path);
    error = request.reserve_bytes > free_before ? ENOSPC : 0;
  }
  if (error == 0 && ftruncate(fd, static_cast<off_t>(request.reserve_bytes)) != 0) error = errno;
  if (error == 0) return {};
  const std::string need = human_bytes(request.reserve_bytes) + " for '" + request.path + "'";
  if (error == ENOSPC || error == EDQUOT) {
    return fail(error, "cannot reserve {}: only {} are free; free some space or ask for less", need,
                human_bytes(free_before));
  }
  if (error == EFBIG)
    return Error{Code::out_of_space, error,
                 "cannot reserve " + need +
                     ": the file system allows no file of that size; use several folders, or ask "
                     "for less"};
  return fail(error, "cannot reserve {}", need);
}

// A new name survives power loss only once its folder was flushed.
Status make_durable(int fd, const std::string& path) {
  const std::string folder = parent_of(path);
  const int dir = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int error = fsync(fd) != 0 || dir < 0 || fsync(dir) != 0 ? errno : 0;
  if (dir >= 0) ::close(dir);
  // Some file systems cannot flush a folder; they say so with EINVAL.
  return error == 0 || error == EINVAL ? Status{}
                                       : fail(error, "cannot make the new file '{}' durable", path);
}

Status prepare_new(int fd, const OpenFile& request) {
  STOKER_TRY(reserve(fd, request));
  return make_durable(fd, request.path);
}

bool is_empty_file(int fd) {
  struct stat st {};
  return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size == 0;
}

Result<uint64_t> size_of(int fd, const std::string& path) {
  struct stat st {};
  if (fstat(fd, &st) != 0) return fail(errno, "cannot tell the size of '{}'", path);
  if (!S_ISBLK(st.st_mode)) return static_cast<uint64_t>(st.st_size);
  uint64_t bytes = 0;
  if (ioctl(fd, BLKGETSIZE64, &bytes) != 0)
    return fail(errno, "cannot tell the size of the device '{}'", path);
  return bytes;
}

// Fills in fd and info (but not the id).
Status open_file(const OpenFile& request, FileTable::File* file) {
  if (request.create && !request.write)
    return fail(Code::invalid_argument, "'{}' cannot be created read-only; open it for writing",
                request.path);
  STOKER_TRY(check_type(request));
  const int access = request.write ? O_RDWR : O_RDONLY;
  bool created = false;
  int fd = open_direct(request.path.c_str(), access, &file->info.direct);
  if (fd == -ENOENT && request.create) {
    fd = open_direct(request.path.c_str(), access | O_CREAT | O_EXCL, &file->info.direct);
    created = fd >= 0;
  }
  if (fd < 0) return open_error(-fd, request);
  file->path = request.path;
  file->write = request.write;
  const bool fresh = created || (request.create && is_empty_file(fd));
  Status status = fresh ? prepare_new(fd, request) : Status{};
  if (!status && created)
    unlink(request.path.c_str());
  else if (!status && fresh && ftruncate(fd, 0) != 0)
    log().info("'{}' keeps a part of the size it was to have", request.path);
  auto bytes = size_of(fd, request.path);
  if (status && !bytes) status = bytes.error();
  if (!status) {
    ::close(fd);
    return status;
  }
  file->fd = fd;
  file->info.bytes = *bytes;
  if (!file->info.direct)
    log().info("'{}' lies on a file system without direct I/O: transfers go through the page cache",
               request.path);
  return {};
}

}  // namespace

FileTable::~FileTable() {
  for (size_t id = 0; id < places_; ++id) {
    if (place(id).open) ::close(place(id).file.fd);
  }
}

size_t FileTable::room_of(size_t place) {
  return static_cast<size_t>(std::bit_width(place / kFirst + 1)) - 1;
}

FileTable::Place& FileTable::place(size_t id) const {
  const size_t room = room_of(id);
  return rooms_[room][id + kFirst - (kFirst << room)];
}

size_t FileTable::free_place() {
  const size_t all = places_;
  for (size_t id = 0; id < all; ++id) {
    if (!place(id).open) return id;
  }
  const size_t room = room_of(all);
  STOKER_CHECK(room < kRooms);
  rooms_[room] = std::vector<Place>(kFirst << room);
  places_.store(all + (kFirst << room), std::memory_order_release);
  return all;
}

Result<FileInfo> FileTable::open(const OpenFile& request) {
  File file;
  if (nvme::is_target(request.path))
    return fail(
        Code::unsupported,
        "cannot open '{}': this engine sends no NVMe commands; uring does, on Linux 5.19 or newer",
        request.path);
  STOKER_TRY(open_file(request, &file));
  return add(std::move(file));
}

FileInfo FileTable::add(File file) {
  MutexLock lock(mutex_);
  const size_t id = free_place();
  Place& free = place(id);
  file.info.id = static_cast<FileId>(id);
  free.file = std::move(file);
  free.open.store(true, std::memory_order_release);
  return free.file.info;
}

Status FileTable::close(FileId id) {
  MutexLock lock(mutex_);
  if (find(id) == nullptr)
    return fail(Code::invalid_argument, "no file is open under the id {}", id);
  Place& closed = place(static_cast<size_t>(id));
  closed.open = false;
  const int result = ::close(closed.file.fd);
  const int error = errno;
  const std::string path = std::move(closed.file.path);
  closed.file = File{};
  return result == 0 || error == EINTR ? Status{} : fail(error, "closing '{}' failed", path);
}

const FileTable::File* FileTable::find(FileId id) const {
  if (id < 0 || static_cast<size_t>(id) >= places_.load(std::memory_order_acquire)) return nullptr;
  const Place& found = place(static_cast<size_t>(id));
  return found.open.load(std::memory_order_acquire) ? &found.file : nullptr;
}

bool startable(Op& op, const FileTable::File* file) {
  if (file == nullptr) {
    op.result = fail(Code::invalid_argument, "no file is open under the id {}", op.file);
    return false;
  }
  if (!file->write && (op.kind == Op::Kind::write || op.kind == Op::Kind::trim)) {
    op.result = fail(Code::read_only, "'{}' was opened read-only; open it for writing", file->path);
    return false;
  }
  if (Status status = check_op(op, file->info.align, file->path); !status) {
    op.result = status.error();
    return false;
  }
  return true;
}

}  // namespace stoker
