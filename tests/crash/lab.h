// Lab: local stores on simulated disks, opened, broken and opened again thousands of times a
// second.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/store/local/store.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/recording.h"
#include "stoker/testing/sim_engine.h"

namespace stoker {

// --soak: how many times more to do than in CI. Set by main().
extern uint64_t soak_factor;
// Crash cases recovered and checked so far, for the summary.
extern uint64_t cases_checked;
// --seed=N: this story only (coded_sim_test.cc), told step by step. 0: all of them; while one of
// them is played, its seed.
extern uint64_t story_seed;

struct LabOptions {
  size_t volumes = 1;
  uint64_t capacity_bytes = 7 * 64 * kKiB;  // what the scripts keep, and three spare extents
  uint64_t area_bytes = 64 * kKiB;          // a journal area is full after about a dozen records
};

class Lab {
 public:
  explicit Lab(const LabOptions& options = {}, uint64_t seed = 1);

  Result<std::unique_ptr<Store>> open(bool read_only = false);
  SimDisk& disk() { return *disk_; }
  const std::vector<std::string>& volumes() const { return volumes_; }
  Images images() const;
  void put(const Images& images);
  // All volumes as they are before the store is made.
  Images blank();

  // Opens what is on the disks and compares it with the timeline. The point found, or what is
  // wrong.
  Result<size_t> recover(const Timeline& timeline, Admissible range);
  // What fsck finds must be clean: a crash leaves notes, never problems. `finished`: the store was
  // certainly made.
  Status fsck(bool finished);
  // The store must work on: one more commit, and it is there after opening again.
  Status works(const Timeline& timeline, size_t point);

 private:
  const LabOptions options_;
  std::shared_ptr<SimDisk> disk_;
  std::vector<std::string> volumes_;
  std::unique_ptr<RuntimeOwner> runtime_;
};

}  // namespace stoker
