// What of SPDK a process has once, whatever the number of its engines: the environment with the
// drives that it may see, the controllers, and the memory that they may reach.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/base/result.h"
#include "stoker/memory/arena.h"

struct spdk_nvme_ctrlr;  // NOLINT(readability-identifier-naming): SPDK's

namespace stoker::spdk {

// Any thread.
class Env {
 public:
  static Env& of_process();

  // Starts SPDK at the first call; later ones are refused for drives that it was not shown then.
  Status start(const std::vector<std::string>& addresses);
  Result<spdk_nvme_ctrlr*> attach(const std::string& address);
  void detach(const std::string& address);  // as often as it was attached
  // Makes the arena's memory known to all drives, once however many engines adopt it.
  void adopt(const Arena& arena);
  void unadopt(int32_t arena);
  bool knows(const Slice& bytes) const;

 private:
  struct Controller {
    spdk_nvme_ctrlr* controller = nullptr;
    size_t users = 0;
  };
  struct Region {
    std::byte* data = nullptr;
    uint64_t bytes = 0;
    size_t users = 0;
    bool registered = false;
  };

  mutable Mutex mutex_;
  std::vector<std::string> shown_ GUARDED_BY(mutex_);  // empty: not started
  std::map<std::string, Controller> controllers_ GUARDED_BY(mutex_);
  std::map<int32_t, Region> regions_ GUARDED_BY(mutex_);
};

}  // namespace stoker::spdk
