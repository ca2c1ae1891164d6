#include "stoker/base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <memory>

#include "stoker/base/text.h"

namespace stoker {
namespace {

spdlog::level::level_enum spdlog_level(Log::Level level) {
  switch (level) {
    case Log::Level::debug:
      return spdlog::level::debug;
    case Log::Level::info:
      return spdlog::level::info;
    case Log::Level::warn:
      return spdlog::level::warn;
    case Log::Level::error:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

}  // namespace

const Log& log() {
  static const Log the_log;
  return the_log;
}

spdlog::logger& Log::logger() const {
  static const std::shared_ptr<spdlog::logger> logger = [] {
    auto made = std::make_shared<spdlog::logger>(
        "stoker", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    made->set_pattern("stoker %^%l%$: %v");
    const char* level = std::getenv("STOKER_LOG");
    made->set_level(level != nullptr ? spdlog::level::from_str(level) : spdlog::level::warn);
    return made;
  }();
  return *logger;
}

void Log::write(Level level, std::string_view line,
                std::initializer_list<std::string> words) const {
  if (!logger().should_log(spdlog_level(level))) return;
  std::string text;
  for (const std::string& word : words) {
    const size_t place = line.find("{}");
    text.append(line.substr(0, place)).append(printable(word));
    line.remove_prefix(place + 2);
  }
  logger().log(spdlog_level(level), spdlog::string_view_t(text.append(line)));
}

}  // namespace stoker
