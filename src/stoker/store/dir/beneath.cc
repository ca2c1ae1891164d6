#include "stoker/store/dir/beneath.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <random>

#include "stoker/base/log.h"

namespace stoker::dir {
namespace {

constexpr std::string_view kOwnPrefix = ".stoker-";
constexpr std::string_view kOwnSuffix = ".tmp";
constexpr int kMakeTries =
    16;  // a folder may be removed by another writer, being empty, before there is anything in it

int openat2_beneath(int folder, const char* path, int flags) {
  open_how how{};
  how.flags = static_cast<uint64_t>(flags | O_CLOEXEC);
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
  for (;;) {
    const auto fd = static_cast<int>(syscall(SYS_openat2, folder, path, &how, sizeof how));
    if (fd >= 0) return fd;
    if (errno != EAGAIN && errno != EINTR)
      return -errno;  // EAGAIN: something was renamed meanwhile
  }
}

bool is_link(int folder, const std::string& name) {
  struct stat status {};
  return fstatat(folder, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
         S_ISLNK(status.st_mode);
}

// One name at a time, none of which may be a link.
int walk_beneath(int root, std::string_view path, int flags) {
  Fd at;
  for (;;) {
    const size_t slash = path.find('/');
    const std::string name(path.substr(0, slash));
    const bool last = slash == std::string_view::npos;
    const int folder = at ? at.get() : root;
    const int next = openat(folder, name.c_str(),
                            (last ? flags : O_PATH | O_DIRECTORY) | O_NOFOLLOW | O_CLOEXEC);
    if (next < 0) {
      const int error = errno;
      return is_link(folder, name) ? -ELOOP : -error;
    }
    Fd opened(next);
    struct stat status {};
    if (fstat(opened.get(), &status) == 0 && S_ISLNK(status.st_mode)) return -ELOOP;
    if (last) return opened.release();
    at = std::move(opened);
    path.remove_prefix(slash + 1);
  }
}

Error bad_key(std::string_view key, const std::string& why) {
  return fail(Code::invalid_argument, "'{}' is not a name of an object in a folder: {}", key, why);
}

}  // namespace

bool is_own_name(std::string_view name) { return name.starts_with(kOwnPrefix); }

std::string make_own_name() {
  std::random_device random;
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%08x%08x", random(), random());
  return std::string(kOwnPrefix) + digits.data() + std::string(kOwnSuffix);
}

std::pair<std::string, std::string> split_key(std::string_view key) {
  const size_t slash = key.rfind('/');
  if (slash == std::string_view::npos) return {"", std::string(key)};
  return {std::string(key.substr(0, slash)), std::string(key.substr(slash + 1))};
}

Status check_key(std::string_view key) {
  if (key.empty()) return bad_key(key, "it is empty");
  if (key.size() >= PATH_MAX)
    return bad_key(key.substr(0, 40),
                   "it has more than " + std::to_string(PATH_MAX - 1) + " bytes");
  if (key.find('\0') != std::string_view::npos)
    return bad_key(key.substr(0, key.find('\0')), "it holds a zero byte");
  for (std::string_view rest = key;;) {
    const size_t slash = rest.find('/');
    const std::string_view name = rest.substr(0, slash);
    if (name.empty())
      return bad_key(key, "it begins or ends with '/', or has two of them together");
    if (name == "." || name == "..")
      return bad_key(key, "it holds '" + std::string(name) + "' as a part");
    if (name.size() > NAME_MAX)
      return bad_key(key, "a part of it has more than " + std::to_string(NAME_MAX) + " bytes");
    if (is_own_name(name))
      return bad_key(key, "names that begin with .stoker- are the store's own");
    if (slash == std::string_view::npos) return {};
    rest.remove_prefix(slash + 1);
  }
}

Result<Beneath> Beneath::open(const std::string& path, bool openat2) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) {
    const int error = errno;
    const std::string why = error == ENOTDIR  ? ": it is not a folder; name a folder"
                            : error == ENOENT ? ": there is no such folder; check the path"
                                              : "";
    return fail(error, "cannot open the folder '{}'{}", path, why);
  }
  if (openat2) {
    const int probed = openat2_beneath(fd.get(), ".", O_PATH | O_DIRECTORY);
    openat2 = probed >= 0;
    if (probed >= 0) ::close(probed);
    if (probed < 0)
      log().info("the kernel has no openat2: names below '{}' are followed folder by folder", path);
  }
  return Beneath(path, std::move(fd), openat2);
}

int Beneath::open_raw(std::string_view path, int flags) const {
  const std::string text = path.empty() ? "." : std::string(path);
  return openat2_ ? openat2_beneath(fd_.get(), text.c_str(), flags)
                  : walk_beneath(fd_.get(), text, flags);
}

Result<Fd> Beneath::open_at(std::string_view path, int flags) const {
  const int fd = open_raw(path, flags);
  if (fd >= 0) return Fd(fd);
  const std::string name = "'" + std::string(path) + "' in '" + path_ + "'";
  switch (-fd) {
    case ENOENT:
      return fail(ENOENT, "there is no {}", name);
    case ENOTDIR:
      return Error{Code::not_found, ENOTDIR,
                   "there is no " + name + ": a part of it is a file, not a folder"};
    case ELOOP:
    case EXDEV:
      return Error{Code::not_found, ELOOP,
                   name +
                       " is behind a link, and links are not followed; put the file itself "
                       "there"};
    default:
      return fail(-fd, "cannot open {}", name);
  }
}

Result<Fd> Beneath::make_folder(const std::string& path,
                                const std::function<void(const std::string&)>& made) const {
  for (int attempt = 0; attempt < kMakeTries; ++attempt) {
    auto there = open_at(path, O_RDONLY | O_DIRECTORY);
    if (there) return there;
    if (there.error().sys_errno == ENOTDIR) {
      return Error{Code::invalid_argument, ENOTDIR,
                   "'" + path + "' or a part of it is an object in '" + path_ +
                       "', so nothing can lie below it; take another name"};
    }
    if (there.error().sys_errno == ELOOP)
      return Error{Code::invalid_argument, ELOOP, there.error().what};
    if (there.error().sys_errno != ENOENT) return there;
    const auto [above, name] = split_key(path);
    STOKER_ASSIGN(const Fd parent, make_folder(above, made));
    if (mkdirat(parent.get(), name.c_str(), 0777) == 0) {
      STOKER_TRY(sync_folder(parent.get(), above));
      made(path);
    } else if (errno != EEXIST && errno != ENOENT) {
      return fail(errno, "cannot make the folder '{}' in '{}'", path, path_);
    }
  }
  return fail(Code::busy, "the folder '{}' in '{}' is removed repeatedly by others; try later",
              path, path_);
}

Result<Fd> Beneath::again() const {
  Fd fd(openat(fd_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return fail(errno, "cannot open the folder '{}'", path_);
  return fd;
}

Status sync_folder(int fd, const std::string& path) {
  if (fsync(fd) == 0 || errno == EINVAL) return {};
  return fail(errno, "cannot make the names in the folder '{}' durable", path);
}

}  // namespace stoker::dir
