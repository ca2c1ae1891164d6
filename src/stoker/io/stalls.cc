#include "stoker/io/stalls.h"

#include <cerrno>

#include "stoker/base/log.h"

namespace stoker {
namespace {

std::string seconds(uint64_t ns) {
  return std::to_string((ns + 500'000'000) / 1'000'000'000) + " s";
}

}  // namespace

void Stalls::opened(FileId file, const std::string& path) {
  MutexLock lock(mutex_);
  files_[file] = File{path, false, std::nullopt, 0};
}

Status Stalls::closed(FileId file) {
  MutexLock lock(mutex_);
  const auto found = files_.find(file);
  if (found == files_.end()) return {};
  if (found->second.orphans > 0) {
    return fail(Code::busy,
                "'{}' cannot be closed: its disk has not answered, and the kernel still has {} "
                "transfers of it; it stays locked until this process ends",
                found->second.path, found->second.orphans);
  }
  files_.erase(found);
  return {};
}

std::optional<Error> Stalls::given_up(FileId file) const {
  if (!any()) return std::nullopt;
  MutexLock lock(mutex_);
  const auto found = files_.find(file);
  return found == files_.end() ? std::nullopt : found->second.error;
}

void Stalls::slow(FileId file, uint64_t age_ns, uint64_t error_ns) {
  MutexLock lock(mutex_);
  File& state = files_[file];
  if (state.slow) return;
  state.slow = true;
  any_ = true;
  log().warn(
      "the disk of '{}' has not answered for {}; it is waited for, and given up with an error "
      "after {} (stall_seconds sets that)",
      state.path, seconds(age_ns), seconds(error_ns));
}

void Stalls::answered(FileId file, uint64_t age_ns) {
  MutexLock lock(mutex_);
  File& state = files_[file];
  if (!state.slow || state.error) return;
  state.slow = false;
  log().warn("the disk of '{}' answers again, after {}", state.path, seconds(age_ns));
}

void Stalls::orphaned(FileId file) {
  MutexLock lock(mutex_);
  ++files_[file].orphans;
}

Error Stalls::give_up(FileId file, uint64_t age_ns) {
  MutexLock lock(mutex_);
  File& state = files_[file];
  if (!state.error) {
    any_ = true;
    state.error = Error{Code::io, ETIMEDOUT,
                        "the disk of '" + state.path + "' has not answered for " + seconds(age_ns) +
                            " and was given up (stall_seconds sets when); look at the kernel's "
                            "log, and start again when the disk works"};
    log().error("{}", state.error->what);
  }
  return *state.error;
}

void Stalls::landed(FileId file) {
  MutexLock lock(mutex_);
  --files_[file].orphans;
}

}  // namespace stoker
