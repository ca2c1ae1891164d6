#include "command.h"

#include <charconv>
#include <cmath>
#include <cstdio>

namespace stoker::cli {

CLI::Validator whole(uint64_t least, uint64_t most) {
  const auto check = [least, most](const std::string& text) -> std::string {
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool all = error == std::errc() && end == text.data() + text.size();
    if (all && value >= least && value <= most) return {};
    return "`" + text + "` is not a whole number from " + std::to_string(least) + " to " +
           std::to_string(most);
  };
  return CLI::Validator(check, "");
}

CLI::Validator number(double least, double most) {
  const auto check = [least, most](const std::string& text) -> std::string {
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool all = error == std::errc() && end == text.data() + text.size();
    if (all && std::isfinite(value) && value >= least && value <= most) return {};
    const auto plain = [](double limit) {
      char shown[32];
      std::snprintf(shown, sizeof shown, "%g", limit);
      return std::string(shown);
    };
    return "`" + text + "` is not a number from " + plain(least) + " to " + plain(most);
  };
  return CLI::Validator(check, "");
}

CLI::Validator named() {
  return {[](const std::string& text) {
            return std::string(text.empty() ? "the path is empty: give a path" : "");
          },
          ""};
}

void tell(ExitStatus& status, const Error& error) {
  std::fprintf(stderr, "stoker: %s\n", printable(error.message()).c_str());
  status.code = 1;
}

}  // namespace stoker::cli
