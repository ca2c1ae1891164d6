// What the benchmarks share: the middle of repeated runs, and what a reader of their figures must
// know of the machine.
#pragma once

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
// What kind of pages an arena got.
std::string pages_text(const PageReport& pages);

}  // namespace stoker::cli
