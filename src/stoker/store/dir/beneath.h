// Beneath: a folder out of which no name leads, and the names that objects may have in it. See
// docs/stores/dir.md.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "stoker/base/fd.h"
#include "stoker/base/result.h"

namespace stoker::dir {

// invalid_argument, in a sentence, unless the key is a path of plain names: no "..", no empty part,
// none of the store's own names.
Status check_key(std::string_view key);

bool is_own_name(std::string_view name);  // of a temporary file
std::string make_own_name();              // a random one

// The folder of a key ("" for the store's own) and its last name.
std::pair<std::string, std::string> split_key(std::string_view key);

// Any thread.
class Beneath {
 public:
  // `openat2` false: as on a kernel that has none.
  static Result<Beneath> open(const std::string& path, bool openat2);

  // What stands at `path` below the folder ("" is the folder itself), or -errno. ELOOP: a link
  // stands in the way.
  Result<Fd> open_at(std::string_view path, int flags) const;
  // The folder `path`, made with all above it if it is not there. `made` is told the path of each,
  // once its parent was flushed.
  Result<Fd> make_folder(const std::string& path,
                         const std::function<void(const std::string&)>& made) const;
  const std::string& path() const { return path_; }
  // A description of the folder of its own, for a lock.
  Result<Fd> again() const;

 private:
  Beneath(std::string path, Fd fd, bool openat2)
      : path_(std::move(path)), fd_(std::move(fd)), openat2_(openat2) {}
  int open_raw(std::string_view path, int flags) const;

  std::string path_;
  Fd fd_;
  bool openat2_;
};

// Flushes a folder; a file system that cannot (EINVAL) has nothing to flush.
Status sync_folder(int fd, const std::string& path);

}  // namespace stoker::dir
