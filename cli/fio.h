// fio, the peer of `stoker bench io`: run as a program of its own, with the settings of a careful user.
#pragma once

#include <cstdint>
#include <string>

#include "stoker/base/result.h"
#include "stoker/io/load.h"

namespace stoker::cli {

struct FioResult {
  double bytes_per_second = 0;
  double cpu_seconds = 0;  // user + system of the job while it ran, by fio's own getrusage: start-up is not counted
  double bytes = 0;
};

// "fio-3.33"; not_found with what to do if there is none.
Result<std::string> fio_version();
// One job over `path` with load's kind, block size, depth and time. `huge`: buffers in reserved 2 MiB pages.
Result<FioResult> run_fio(const std::string& path, const Load& load, bool huge);

// Reserves 2 MiB pages for as long as it lives, if we may (root), and puts the number back.
class HugePages {
 public:
  explicit HugePages(uint64_t pages);
  ~HugePages();
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;
  bool reserved() const { return reserved_; }

 private:
  uint64_t before_ = 0;
  bool changed_ = false;
  bool reserved_ = false;
};

}  // namespace stoker::cli
