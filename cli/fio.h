// fio, the peer of `stoker bench io`: run as a program of its own, with the settings of a careful
// user.
#pragma once

#include <cstdint>
#include <string>

#include "stoker/base/result.h"
#include "stoker/io/load.h"

namespace stoker::cli {

struct FioResult {
  double bytes_per_second = 0;
  // user + system of the job while it ran, by fio's own getrusage: start-up is not counted
  double cpu_seconds = 0;
  double bytes = 0;
};

// "fio-3.33"; not_found with what to do if there is none.
Result<std::string> fio_version();
// One job over `path` with load's kind, block size, depth and time. `huge`: buffers in reserved 2
// MiB pages.
Result<FioResult> run_fio(const std::string& path, const Load& load, bool huge);

// Reserves 2 MiB pages for as long as it lives, if we may (root), and puts the number back.
class HugePages {
 public:
  HugePages();
  ~HugePages();
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

  // Makes sure that `pages` of them are free just now: other programs may have taken some since.
  // False where we may not.
  bool provide(uint64_t pages);

 private:
  const uint64_t before_;
  bool changed_ = false;
};

}  // namespace stoker::cli
