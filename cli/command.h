// What the subcommands share: how each adds itself to the command line, and how it says that it
// failed.
//
// A subcommand is one file with one function add_NAME(app, status): it adds its options to `app`
// and a callback that does the work and puts the exit status in `status`. Results go to stdout,
// everything else to stderr.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <string>
#include <string_view>

#include "stoker/base/error.h"
#include "stoker/base/text.h"

namespace stoker::cli {

// 0 done, 1 it failed or found a problem, 2 the command line is wrong.
struct ExitStatus {
  int code = 0;
};

// A whole number from `least` to `most`. CLI11 alone takes -1 for a very large one.
CLI::Validator whole(uint64_t least, uint64_t most);
// A number from `least` to `most`. CLI::Range takes nan.
CLI::Validator number(double least, double most);

// The name of a file or folder, which is not empty.
CLI::Validator named();

// Prints "stoker: <sentence>" on stderr and sets the status to 1.
void tell(ExitStatus& status, const Error& error);

// Outlive the parse: `app` and `status` are referred to by the callbacks.
void add_probe(CLI::App& app, ExitStatus& status);
void add_bench_io(CLI::App& bench, ExitStatus& status);
void add_bench_codec(CLI::App& bench, ExitStatus& status);
void add_bench_repair(CLI::App& bench, ExitStatus& status);
void add_bench_coded(CLI::App& bench, ExitStatus& status);
void add_bench_cache(CLI::App& bench, ExitStatus& status);
void add_ls(CLI::App& app, ExitStatus& status);
void add_fsck(CLI::App& app, ExitStatus& status);
void add_export(CLI::App& app, ExitStatus& status);
void add_cp(CLI::App& app, ExitStatus& status);
void add_create(CLI::App& app, ExitStatus& status);
void add_put(CLI::App& app, ExitStatus& status);
void add_rm(CLI::App& app, ExitStatus& status);
void add_repair(CLI::App& app, ExitStatus& status);
void add_scrub(CLI::App& app, ExitStatus& status);
void add_serve(CLI::App& app, ExitStatus& status);
void add_nvme(CLI::App& app, ExitStatus& status);
void add_curm(CLI::App& app, ExitStatus& status);

}  // namespace stoker::cli
