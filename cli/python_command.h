// The subcommands that need torch: they stand in the one --help, and run in the Python that stoker
// is installed in.
#pragma once

#include <CLI/CLI.hpp>
#include <span>

namespace stoker::cli {

// Adds the Python subcommands to the help of the app and of those of its commands that have some.
// These stand there already.
void add_python_commands(CLI::App& app);

// Where the arguments name a Python subcommand, becomes that Python (its own --help included) and
// does not return; if it cannot, says why and returns the exit status. Returns -1 where the command
// is not Python's.
int run_python_command(std::span<char* const> arguments);

}  // namespace stoker::cli
