#include "stoker/base/bytes.h"

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace stoker {

std::string human_bytes(uint64_t bytes) {
  static constexpr std::array units = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < units.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 32> text{};
  const int digits = unit == 0 || value == std::floor(value) ? 0 : (value < 10 ? 2 : 1);
  std::snprintf(text.data(), text.size(), "%.*f %s", digits, value, units[unit]);
  return text.data();
}

Result<uint64_t> parse_bytes(std::string_view text) {
  const auto no_size = [&] {
    return fail(Code::invalid_argument,
                "'{}' is not a size; write for example 160MiB, 20GiB or 7GB", text);
  };
  double value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || !(value >= 0)) return no_size();
  std::string unit;
  for (const char* at = end; at != text.data() + text.size(); ++at) {
    if (*at != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*at)));
  }
  static constexpr std::array<std::pair<std::string_view, double>, 14> units = {
      {{"", 1},
       {"b", 1},
       {"k", 1024.0},
       {"m", 1048576.0},
       {"g", 1073741824.0},
       {"kib", 1024.0},
       {"mib", 1048576.0},
       {"gib", 1073741824.0},
       {"tib", 1099511627776.0},
       {"t", 1099511627776.0},
       {"kb", 1e3},
       {"mb", 1e6},
       {"gb", 1e9},
       {"tb", 1e12}}};
  for (const auto& [spelling, factor] : units) {
    if (unit != spelling) continue;
    const double bytes = value * factor;
    if (bytes >= 9e18) return no_size();
    return static_cast<uint64_t>(bytes);
  }
  return no_size();
}

}  // namespace stoker
