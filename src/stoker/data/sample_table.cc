#include "stoker/data/sample_table.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"

namespace stoker::data {
namespace {

Error unknown_object(uint64_t object, size_t keys) {
  return fail(Code::invalid_argument,
              "a sample names object number {}, but only {} objects were given", object, keys);
}

Error impossible(uint64_t sample) {
  return fail(Code::corruption,
              "the index has impossible values for sample {}: make the index again", sample);
}

}  // namespace

Result<SampleTable> SampleTable::equal(std::vector<std::string> keys,
                                       const std::vector<EqualRun>& runs, uint64_t stride,
                                       uint64_t bytes) {
  SampleTable table(std::move(keys));
  if (bytes == 0)
    return fail(Code::invalid_argument, "samples must have at least one byte, but these have none");
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
  uint64_t samples = 0;
  for (const EqualRun& run : runs) {
    if (run.object >= table.keys_.size()) return unknown_object(run.object, table.keys_.size());
    const bool fits =
        run.offset <= kMost && bytes <= kMost - run.offset &&
        (run.samples <= 1 ||
         (run.samples - 1 <= kMost && stride <= (kMost - run.offset - bytes) / (run.samples - 1)));
    if (!fits || run.samples > kMost - samples)
      return fail(Code::invalid_argument,
                  "{} samples from byte {} of '{}' lie beyond the largest offset: make the index "
                  "again",
                  run.samples, run.offset, table.keys_[run.object]);
    samples += run.samples;
    table.ends_.push_back(samples);
  }
  table.runs_ = runs;
  table.stride_ = stride;
  table.bytes_ = bytes;
  return table;
}

Result<SampleTable> SampleTable::rows(std::vector<std::string> keys, std::vector<RowRun> runs,
                                      std::vector<uint64_t> row_bytes) {
  SampleTable table(std::move(keys));
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
  if (row_bytes.empty() || std::ranges::count(row_bytes, uint64_t{0}) != 0)
    return fail(Code::invalid_argument, "every array must have at least one byte in each row");
  uint64_t samples = 0;
  for (const RowRun& run : runs) {
    if (run.object >= table.keys_.size()) return unknown_object(run.object, table.keys_.size());
    if (run.offsets.size() != row_bytes.size())
      return fail(Code::invalid_argument,
                  "a run has offsets for {} arrays, but there are {} arrays", run.offsets.size(),
                  row_bytes.size());
    for (size_t i = 0; i < row_bytes.size(); ++i) {
      if (run.offsets[i] > kMost || run.samples > (kMost - run.offsets[i]) / row_bytes[i])
        return fail(Code::invalid_argument,
                    "{} rows from byte {} of '{}' lie beyond the largest offset: make the index "
                    "again",
                    run.samples, run.offsets[i], table.keys_[run.object]);
    }
    if (run.samples > kMost - samples)
      return fail(Code::invalid_argument, "there are more rows than can be counted");
    samples += run.samples;
    table.ends_.push_back(samples);
  }
  table.row_runs_ = std::move(runs);
  table.row_bytes_ = std::move(row_bytes);
  return table;
}

Result<SampleTable> SampleTable::ranges(std::vector<std::string> keys,
                                        std::vector<uint64_t> object_bytes, RangeArrays arrays,
                                        RecordLayout record, std::vector<PackedObject> packed) {
  SampleTable table(std::move(keys));
  const size_t parts = arrays.objects.size();
  const bool fits = object_bytes.size() == table.keys_.size() &&
                    (packed.empty() || packed.size() == table.keys_.size()) &&
                    !arrays.starts.empty() && arrays.starts.front() == 0 &&
                    arrays.starts.back() == parts && arrays.offsets.size() == parts &&
                    arrays.bytes.size() == parts &&
                    (arrays.crcs.empty() || arrays.crcs.size() == parts);
  if (!fits)
    return fail(Code::invalid_argument,
                "the arrays of the index have different lengths: make the index again");
  table.object_bytes_ = std::move(object_bytes);
  table.arrays_ = std::move(arrays);
  table.record_ = std::move(record);
  table.packed_ = std::move(packed);
  return table;
}

uint64_t SampleTable::samples() const {
  if (bytes_ == 0 && row_bytes_.empty()) return arrays_.starts.size() - 1;
  return ends_.empty() ? 0 : ends_.back();
}

Result<uint64_t> SampleTable::append(uint64_t sample, uint64_t into,
                                     std::vector<Piece>& pieces) const {
  STOKER_CHECK(sample < samples());
  if (bytes_ != 0 || !row_bytes_.empty()) {
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), sample);
    const auto run = static_cast<size_t>(end - ends_.begin());
    const uint64_t before = run == 0 ? 0 : ends_[run - 1];
    if (bytes_ == 0) {
      const RowRun& rows = row_runs_[run];
      for (size_t i = 0; i < row_bytes_.size(); ++i) {
        const uint64_t bytes = row_bytes_[i];
        pieces.push_back({rows.object, rows.offsets[i] + (sample - before) * bytes, bytes, into});
        into += bytes;
      }
      return into;
    }
    const EqualRun& of = runs_[run];
    pieces.push_back({of.object, of.offset + (sample - before) * stride_, bytes_, into});
    return into + bytes_;
  }
  const uint64_t first = arrays_.starts[sample], last = arrays_.starts[sample + 1];
  if (first > last || last > arrays_.objects.size()) return impossible(sample);
  if (has_records() && last - first != 1) return impossible(sample);
  for (uint64_t part = first; part < last; ++part) {
    const Piece piece{arrays_.objects[part], arrays_.offsets[part], arrays_.bytes[part], into};
    if (piece.object >= keys_.size()) return impossible(sample);
    const uint64_t most = object_bytes_[piece.object];
    if (piece.offset > most || piece.bytes > most - piece.offset) return impossible(sample);
    pieces.push_back(piece);
    into += piece.bytes;
  }
  return into;
}

Result<std::vector<PlanRun>> SampleTable::plan() const {
  std::vector<PlanRun> plan;
  for (const EqualRun& run : runs_) {
    if (run.samples > 0) plan.push_back({run.object, run.offset, bytes_, run.samples, stride_});
  }
  if (bytes_ != 0 || !row_bytes_.empty() || has_packed()) return plan;
  std::vector<Piece> parts;
  for (uint64_t sample = 0; sample < samples(); ++sample) {
    parts.clear();
    STOKER_TRY(append(sample, 0, parts));
    PlanRun item;
    uint64_t end = 0;
    for (const Piece& part : parts) {
      if (item.bytes != 0 && part.object != item.object) return std::vector<PlanRun>();
      item.object = part.object;
      item.offset = item.bytes == 0 ? part.offset : std::min(item.offset, part.offset);
      end = std::max(end, part.offset + part.bytes);
      item.bytes = end - item.offset;
    }
    if (item.bytes != 0) plan.push_back(item);
  }
  return plan;
}

Status SampleTable::verify(uint64_t sample, size_t number, std::span<const std::byte> read) const {
  const uint64_t part = arrays_.starts[sample] + number;
  if (crc32c(read.data(), read.size()) == arrays_.crcs[part]) return {};
  return damaged(sample, part, "differ from the index; fetch that object again, or index it again");
}

Status SampleTable::split(uint64_t sample, std::span<const std::byte> read,
                          std::vector<Place>& places) const {
  if (split_record(record_, read, places)) return {};
  return damaged(sample, arrays_.starts[sample],
                 "do not hold its columns exactly; fetch that object again");
}

Error SampleTable::damaged(uint64_t sample, uint64_t part, const char* how) const {
  return fail(Code::corruption, "sample {} is damaged: bytes {} to {} of '{}' {}", sample,
              arrays_.offsets[part], arrays_.offsets[part] + arrays_.bytes[part],
              keys_[arrays_.objects[part]], how);
}

}  // namespace stoker::data
