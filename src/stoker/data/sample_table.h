// SampleTable: where the bytes of each sample of a source lie.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "stoker/data/record.h"
#include "stoker/data/unpack.h"
#include "stoker/store/plan.h"
#include "stoker/store/store.h"

namespace stoker::data {

// A number of equal samples in one object.
struct EqualRun {
  uint64_t object = 0;  // which of the keys
  uint64_t samples = 0;
  uint64_t offset = 0;  // of the first
};

// A number of samples in one object, of one row each of several arrays.
struct RowRun {
  uint64_t object = 0;
  uint64_t samples = 0;
  std::vector<uint64_t> offsets;  // of the first row of each array
};

// Sample i has parts [starts[i], starts[i + 1]). Arrays that somebody else owns, a mapped index
// say.
struct RangeArrays {
  std::span<const uint64_t> starts;  // one more than there are samples
  std::span<const uint32_t> objects;
  std::span<const uint64_t> offsets, bytes;  // of each part
  std::span<const uint32_t> crcs;            // CRC-32C of each part; or nothing
  std::shared_ptr<const void> owner;
};

// How an object lies in its store.
struct PackedObject {
  Packing packing = Packing::none;
  uint64_t bytes = 0;  // as it is stored
};

// Immutable; any thread.
class SampleTable {
 public:
  // Samples of `bytes` each, `stride` apart (less, where neighbours share bytes), numbered through
  // the runs.
  static Result<SampleTable> equal(std::vector<std::string> keys, const std::vector<EqualRun>& runs,
                                   uint64_t stride, uint64_t bytes);
  // Samples with one part of each of several arrays, whose rows have so many bytes and follow one
  // another; numbered through the runs.
  static Result<SampleTable> rows(std::vector<std::string> keys, std::vector<RowRun> runs,
                                  std::vector<uint64_t> row_bytes);
  // Samples of any ranges in objects of so many bytes. The arrays are looked at sample by sample
  // only: they may be larger than memory. record: each sample has one part, which is split into
  // such columns once it is read. packed: of each object, where some are compressed as a whole; all
  // other numbers are of what they unpack to.
  static Result<SampleTable> ranges(std::vector<std::string> keys,
                                    std::vector<uint64_t> object_bytes, RangeArrays arrays,
                                    RecordLayout record = {},
                                    std::vector<PackedObject> packed = {});

  uint64_t samples() const;
  const std::vector<std::string>& keys() const { return keys_; }
  // Bytes of every sample, where they are equal; else 0.
  uint64_t equal_bytes() const { return bytes_; }
  // Each object has one part: no two are worth one read.
  bool apart() const { return bytes_ == 0 && arrays_.objects.size() == keys_.size(); }
  bool has_packed() const { return !packed_.empty(); }
  // Where has_packed().
  const PackedObject& packed(uint64_t object) const { return packed_[object]; }
  uint64_t object_bytes(uint64_t object) const { return object_bytes_[object]; }
  // Appends the parts of a sample, with their places from `into` on; the place behind them.
  // sample: less than samples(). corruption: its ranges cannot be.
  Result<uint64_t> append(uint64_t sample, uint64_t into, std::vector<Piece>& pieces) const;
  // Each sample as an item of a Plan, from its first byte to its last. Nothing if one is of several
  // objects, of rows of several arrays, or in a compressed object. corruption: its ranges cannot
  // be.
  Result<std::vector<PlanRun>> plan() const;
  bool has_crcs() const { return !arrays_.crcs.empty(); }
  bool has_records() const { return !record_.empty(); }
  // Compares a part of a sample that append() gave a place, the number-th of it.
  Status verify(uint64_t sample, size_t number, std::span<const std::byte> read) const;
  // Appends where the columns of a sample lie, counted from its first byte. corruption: they do not
  // fill it.
  Status split(uint64_t sample, std::span<const std::byte> read, std::vector<Place>& places) const;

 private:
  explicit SampleTable(std::vector<std::string> keys) : keys_(std::move(keys)) {}
  Error damaged(uint64_t sample, uint64_t part, const char* how) const;

  std::vector<std::string> keys_;
  // equal samples
  std::vector<EqualRun> runs_;
  std::vector<uint64_t> ends_;  // samples of each run and those before it
  uint64_t stride_ = 0, bytes_ = 0;
  // rows
  std::vector<RowRun> row_runs_;
  std::vector<uint64_t> row_bytes_;
  // ranges
  std::vector<uint64_t> object_bytes_;
  std::vector<PackedObject> packed_;
  RangeArrays arrays_;
  RecordLayout record_;
};

}  // namespace stoker::data
