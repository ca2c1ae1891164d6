#include "stoker/store/folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace stoker {
namespace {

Status flush_folder(const std::filesystem::path& folder) {
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int error = fd < 0 || fsync(fd) != 0 ? errno : 0;
  if (fd >= 0) ::close(fd);
  // EINVAL: cannot be flushed
  return error == 0 || error == EINVAL
             ? Status()
             : fail(error, "cannot make a folder in '{}' durable", folder.string());
}

}  // namespace

Result<std::filesystem::file_status> look_at(const std::filesystem::path& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!error || error.value() == ENOENT) return status;
  return fail(error.value(), "cannot look at '{}'", path.string());
}

// A new name survives power loss once the folder that it stands in was flushed.
Status make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  if (folder.empty() || std::filesystem::exists(folder, error)) return {};
  STOKER_TRY(make_folder(folder.parent_path()));
  std::filesystem::create_directory(folder, error);
  if (error) return fail(error.value(), "cannot make the folder '{}'", folder.string());
  return flush_folder(folder.parent_path());
}

}  // namespace stoker
