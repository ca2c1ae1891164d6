// What the benchmarks share: the middle of repeated runs, and what a reader of their figures must
// know of the machine.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "stoker/codec/erasure.h"
#include "stoker/memory/arena.h"

namespace stoker::cli {

using Json = nlohmann::ordered_json;

// Of at least one value.
double median(std::vector<double> values);

// "6+3": data and parity chunks.
Result<codec::ErasureCode> parse_code(const std::string& text);
// Kernel, processor, cores, version of Stoker.
Json bench_machine();
// Of the last one, five and fifteen minutes: who reads the figures sees whether the machine had
// other work.
std::string load_average();
// The writes of a trace, in its order.
struct TraceWrites {
  struct Write {
    uint32_t object = 0;  // a volume, or a file
    uint64_t offset = 0, bytes = 0;
  };
  std::string name;
  std::vector<Write> writes;
};
// Of a trace that `stoker curm` reads. In a build without the lab an error that says so.
Result<TraceWrites> read_trace_writes(const std::string& path);
// What kind of pages an arena got.
std::string pages_text(const PageReport& pages);

}  // namespace stoker::cli
