// Stalls: which disks have stopped answering. Counts nothing while all is well: the Loop asks it
// about an op only when that is old.
//
// Thread rules: opened() and closed() come from any thread, the rest from the Loop's.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "stoker/base/mutex.h"
#include "stoker/io/op.h"

namespace stoker {

class Stalls {
 public:
  void opened(FileId file, const std::string& path);
  // busy: transfers of the file are still with the kernel.
  Status closed(FileId file);

  // The file was given up: why. One load while none was.
  std::optional<Error> given_up(FileId file) const;
  // An op of the file has been under way for `age_ns`; says so in the log, once until answered().
  void slow(FileId file, uint64_t age_ns, uint64_t error_ns);
  // An op of the file came back after `age_ns`.
  void answered(FileId file, uint64_t age_ns);
  // From now on the file is given up.
  Error give_up(FileId file, uint64_t age_ns);
  // One more of its transfers is left with the kernel.
  void orphaned(FileId file);
  // An orphan of the file has come back.
  void landed(FileId file);
  // Some file is slow or given up.
  bool any() const { return any_.load(std::memory_order_relaxed); }

 private:
  struct File {
    std::string path;
    bool slow = false;
    std::optional<Error> error;
    size_t orphans = 0;
  };
  mutable Mutex mutex_;
  std::map<FileId, File> files_ GUARDED_BY(mutex_);
  std::atomic<bool> any_{false};
};

}  // namespace stoker
