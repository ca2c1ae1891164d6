// What the subcommands share: how each adds itself to the command line, and how it says that it failed.
//
// A subcommand is one file with one function add_NAME(app, status): it adds its options to `app` and a callback that
// does the work and puts the exit status in `status`. Results go to stdout, everything else to stderr.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <string_view>

#include "stoker/base/error.h"

namespace stoker::cli {

// 0 done, 1 it failed or found a problem, 2 the command line is wrong.
struct ExitStatus {
  int code = 0;
};

// As it is fit for a terminal: control characters become \xNN, for a key or a path may hold any.
std::string printable(std::string_view text);

// Prints "stoker: <sentence>" on stderr and sets the status to 1.
void fail(ExitStatus& status, const Error& error);

// A number of seconds from `least` to 600. (CLI::Range lets nan through.)
CLI::Validator seconds_from(double least);

// Outlive the parse: `app` and `status` are referred to by the callbacks.
void add_probe(CLI::App& app, ExitStatus& status);
void add_bench_io(CLI::App& bench, ExitStatus& status);
void add_bench_codec(CLI::App& bench, ExitStatus& status);
void add_bench_repair(CLI::App& bench, ExitStatus& status);
void add_ls(CLI::App& app, ExitStatus& status);
void add_fsck(CLI::App& app, ExitStatus& status);
void add_export(CLI::App& app, ExitStatus& status);
void add_cp(CLI::App& app, ExitStatus& status);
void add_create(CLI::App& app, ExitStatus& status);
void add_put(CLI::App& app, ExitStatus& status);
void add_rm(CLI::App& app, ExitStatus& status);
void add_repair(CLI::App& app, ExitStatus& status);
void add_scrub(CLI::App& app, ExitStatus& status);
void add_curm(CLI::App& app, ExitStatus& status);

}  // namespace stoker::cli
