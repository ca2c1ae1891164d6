#include "bench.h"

#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "stoker/base/bytes.h"

namespace stoker::cli {
namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

// Of the instructions that the kernels of the codec choose among, those that the processor has.
std::string cpu_features() {
  std::ifstream file("/proc/cpuinfo");
  std::string flags;
  for (std::string line; flags.empty() && std::getline(file, line);) {
    if (line.rfind("flags", 0) == 0) flags = line + " ";
  }
  std::string known;
  for (const char* name : {"sse4_2", "pclmulqdq", "avx2", "avx512bw", "gfni", "vpclmulqdq"}) {
    if (flags.find(" " + std::string(name) + " ") != std::string::npos)
      known += (known.empty() ? "" : " ") + std::string(name);
  }
  return known;
}

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

Result<codec::ErasureCode> parse_code(const std::string& text) {
  int k = 0;
  int m = 0;
  int used = 0;
  if (std::sscanf(text.c_str(), "%4d+%4d%n", &k, &m, &used) != 2 ||
      static_cast<size_t>(used) != text.size()) {
    return fail(Code::invalid_argument, "`{}` is not a code: give data and parity chunks as in 6+3",
                text);
  }
  return codec::ErasureCode::make(k, m);
}

Json bench_machine() {
  utsname kernel{};
  uname(&kernel);
  return {{"kernel", kernel.release},
          {"cpu", cpu_model()},
          {"features", cpu_features()},
          {"cores", std::thread::hardware_concurrency()},
          {"stoker", STOKER_VERSION}};
}

std::string load_average() {
  std::array<double, 3> load{};
  if (getloadavg(load.data(), 3) != 3) return "unknown";
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.2f %.2f %.2f", load[0], load[1], load[2]);
  return text.data();
}

std::string pages_text(const PageReport& pages) {
  if (pages.large_bytes < pages.total_bytes)
    return "4 KiB (" + human_bytes(pages.large_bytes) + " of " + human_bytes(pages.total_bytes) +
           " in 2 MiB)";
  return pages.kind == PageReport::Kind::hugetlb ? "2 MiB (reserved)" : "2 MiB (transparent)";
}

}  // namespace stoker::cli
