// What the files of `stoker curm` share.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "bench.h"
#include "command.h"
#include "curm/trace.h"

namespace stoker::cli {

void add_curm_replay(CLI::App& curm, ExitStatus& status);

// Lines that were skipped are told on stderr.
Result<curm::Trace> read_trace_and_tell(const std::string& path, bool lenient);

// The results of a replay as one SVG: a panel for each measure, a group of bars for each trace.
std::string replay_svg(const Json& replay);

}  // namespace stoker::cli
