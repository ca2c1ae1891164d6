// What `stoker ls` tells of a training run that a store holds, from the run's own records.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "stoker/base/result.h"
#include "stoker/store/store.h"

namespace stoker::cli {

struct RunParameter {
  std::string name;
  std::string type;   // "bfloat16"
  std::string shape;  // "640 x 1728"; "scalar"
  std::string unit;   // whose planes hold it: w/UNIT and others
  uint64_t elements = 0;
  bool trained = false;
};

struct RunSummary {
  std::string algorithm, moments;
  std::optional<uint64_t> step;  // none: no step was committed yet
  std::vector<RunParameter> parameters;

  uint64_t elements(bool trained_only) const;
  // "bfloat16 and float32": the types of the weights, by name.
  std::string types() const;
};

// Nothing where the store holds no run, or one whose records this program does not understand.
std::optional<RunSummary> run_summary(Store& store, std::string_view snapshot);

// When the newest of these files was last written, as "2026-11-23 03:20"; empty where that is not
// known.
std::string last_written(const std::vector<std::string>& files);

}  // namespace stoker::cli
