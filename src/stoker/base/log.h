// The one leveled log (spdlog on stderr). The level comes from the environment variable STOKER_LOG
// (trace, debug, info, warn, error, off; default warn): the only environment variable Stoker reads.
#pragma once

#include <spdlog/spdlog.h>

namespace stoker {
spdlog::logger& log();  // any thread
}  // namespace stoker
