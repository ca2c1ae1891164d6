// SampleTable: where the bytes of each sample of a source lie.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "stoker/store/store.h"

namespace stoker::data {

// A number of equal samples in one object.
struct EqualRun {
  uint64_t object = 0;  // which of the keys
  uint64_t samples = 0;
  uint64_t offset = 0;  // of the first
};

// Immutable; any thread.
class SampleTable {
 public:
  // Samples of `bytes` each, `stride` apart (less, where neighbours share bytes), numbered through
  // the runs.
  static Result<SampleTable> equal(std::vector<std::string> keys, const std::vector<EqualRun>& runs,
                                   uint64_t stride, uint64_t bytes);
  // Samples of any ranges: sample i has parts [starts[i], starts[i + 1]), each (object, offset,
  // bytes); `Piece::into` counts for nothing. starts has one more than there are samples.
  static Result<SampleTable> ranges(std::vector<std::string> keys, std::vector<uint64_t> starts,
                                    std::vector<Piece> parts);

  uint64_t samples() const;
  const std::vector<std::string>& keys() const { return keys_; }
  // Bytes of every sample, where they are equal; else 0.
  uint64_t equal_bytes() const { return bytes_; }
  // Appends the parts of a sample, with their places from `into` on; the place behind them.
  // sample: less than samples().
  uint64_t append(uint64_t sample, uint64_t into, std::vector<Piece>& pieces) const;

 private:
  explicit SampleTable(std::vector<std::string> keys) : keys_(std::move(keys)) {}

  std::vector<std::string> keys_;
  // equal samples
  std::vector<EqualRun> runs_;
  std::vector<uint64_t> ends_;  // samples of each run and those before it
  uint64_t stride_ = 0, bytes_ = 0;
  // ranges
  std::vector<uint64_t> starts_;
  std::vector<Piece> parts_;
};

}  // namespace stoker::data
