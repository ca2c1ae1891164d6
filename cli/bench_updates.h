// Updates that several writers make durable, one at a time each: of a coded store, and of plain
// files beside it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench.h"
#include "stoker/store/store.h"

namespace stoker::cli {

// A range of one of the objects that a target has.
struct UpdatePiece {
  size_t object = 0;
  uint64_t offset = 0, bytes = 0;
};
using Update = std::vector<UpdatePiece>;  // durable together

// Takes updates. Any thread; never two at once of one object.
class UpdateTarget {
 public:
  virtual ~UpdateTarget() = default;
  // Returns when it is durable. `from` holds as many bytes as the largest piece.
  virtual Status update(const Update& update, Slice from) = 0;
};

// Objects "0", "1", ... of a store.
std::unique_ptr<UpdateTarget> store_target(Store& store);
// Files "0", "1", ... of a folder, made by it, each of so many bytes: pwrite, then fdatasync.
Result<std::unique_ptr<UpdateTarget>> plain_target(const std::string& folder, size_t files,
                                                   uint64_t bytes);

struct UpdateRun {
  uint64_t updates = 0, bytes = 0;
  double seconds = 0;
  double p50_us = 0, p99_us = 0, max_us = 0;

  double per_second() const { return static_cast<double>(updates) / seconds; }
};

// Each writer asks `next` for its updates until there are none, from its own thread.
Result<UpdateRun> run_updates(UpdateTarget& target, size_t writers, size_t objects,
                              const std::function<std::optional<Update>(size_t writer)>& next);

Json to_json(const UpdateRun& run);

}  // namespace stoker::cli
