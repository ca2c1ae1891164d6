#include "stoker/base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>

#include <cstdlib>

namespace stoker {

spdlog::logger& log() {
  static const std::shared_ptr<spdlog::logger> logger = [] {
    auto made = std::make_shared<spdlog::logger>("stoker", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    made->set_pattern("stoker %^%l%$: %v");
    const char* level = std::getenv("STOKER_LOG");
    made->set_level(level != nullptr ? spdlog::level::from_str(level) : spdlog::level::warn);
    return made;
  }();
  return *logger;
}

}  // namespace stoker
