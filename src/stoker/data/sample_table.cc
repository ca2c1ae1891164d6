#include "stoker/data/sample_table.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "stoker/base/check.h"

namespace stoker::data {
namespace {

constexpr const char* kWhere = "data/sample_table";

Error unknown_object(uint64_t object, size_t keys) {
  return make_error(Code::invalid_argument,
                    "samples lie in object " + std::to_string(object) + ", but there are " +
                        std::to_string(keys) + " keys",
                    kWhere);
}

}  // namespace

Result<SampleTable> SampleTable::equal(std::vector<std::string> keys,
                                       const std::vector<EqualRun>& runs, uint64_t stride,
                                       uint64_t bytes) {
  SampleTable table(std::move(keys));
  if (bytes == 0)
    return make_error(Code::invalid_argument, "samples have at least one byte", kWhere);
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
  uint64_t samples = 0;
  for (const EqualRun& run : runs) {
    if (run.object >= table.keys_.size()) return unknown_object(run.object, table.keys_.size());
    const bool fits =
        run.offset <= kMost && bytes <= kMost - run.offset &&
        (run.samples <= 1 ||
         (run.samples - 1 <= kMost && stride <= (kMost - run.offset - bytes) / (run.samples - 1)));
    if (!fits || run.samples > kMost - samples)
      return make_error(Code::invalid_argument, "samples lie beyond the largest offset", kWhere);
    samples += run.samples;
    table.ends_.push_back(samples);
  }
  table.runs_ = runs;
  table.stride_ = stride;
  table.bytes_ = bytes;
  return table;
}

Result<SampleTable> SampleTable::ranges(std::vector<std::string> keys, std::vector<uint64_t> starts,
                                        std::vector<Piece> parts) {
  SampleTable table(std::move(keys));
  if (starts.empty() || starts.front() != 0 || starts.back() != parts.size() ||
      !std::is_sorted(starts.begin(), starts.end()))
    return make_error(Code::invalid_argument, "the parts of samples do not follow one another",
                      kWhere);
  for (const Piece& part : parts) {
    if (part.object >= table.keys_.size()) return unknown_object(part.object, table.keys_.size());
  }
  table.starts_ = std::move(starts);
  table.parts_ = std::move(parts);
  return table;
}

uint64_t SampleTable::samples() const {
  if (bytes_ == 0) return starts_.size() - 1;
  return ends_.empty() ? 0 : ends_.back();
}

uint64_t SampleTable::append(uint64_t sample, uint64_t into, std::vector<Piece>& pieces) const {
  STOKER_CHECK(sample < samples());
  if (bytes_ != 0) {
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), sample);
    const auto run = static_cast<size_t>(end - ends_.begin());
    const uint64_t before = run == 0 ? 0 : ends_[run - 1];
    const EqualRun& of = runs_[run];
    pieces.push_back({of.object, of.offset + (sample - before) * stride_, bytes_, into});
    return into + bytes_;
  }
  for (uint64_t part = starts_[sample]; part < starts_[sample + 1]; ++part) {
    pieces.push_back(parts_[part]);
    pieces.back().into = into;
    into += parts_[part].bytes;
  }
  return into;
}

}  // namespace stoker::data
