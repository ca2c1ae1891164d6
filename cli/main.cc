// The `stoker` command: one --help for what is C++ (needs no Python) and what is Python (needs
// torch).
#include <cstdio>
#include <exception>
#include <span>
#include <string>

#include "command.h"
#include "python_command.h"

namespace {

// The first word that should name a command and does not; empty where there is none. CLI11 would
// only say that one is required.
std::string unknown_command(const CLI::App& app, std::span<char* const> arguments) {
  const CLI::App* at = &app;
  for (char* const word : arguments) {
    if (at->get_require_subcommand_min() == 0 || *word == '-') break;
    const auto named = at->get_subcommands(
        [word](const CLI::App* command) { return command->get_name() == word; });
    if (named.empty()) return word;
    at = named[0];
  }
  return {};
}

// What is wrong with a command line, and where its options are told.
std::string usage_error(const CLI::App* app, const CLI::Error& error) {
  std::string command = "stoker";
  for (auto parsed = app->get_subcommands(); !parsed.empty(); parsed = parsed[0]->get_subcommands())
    command += " " + parsed[0]->get_name();
  return "stoker: " + std::string(error.what()) + "; `" + command +
         " --help` tells what it takes\n";
}

int run(int argc, char** argv) {
  using namespace stoker::cli;
  // Before any parsing: a Python subcommand has options of its own, its --help too.
  const int status_of_python = run_python_command({argv, static_cast<size_t>(argc)});
  if (status_of_python >= 0) return status_of_python;

  CLI::App app(
      "Stoker keeps AI training fed: weights, gradients and optimizer state on disk, under a hard "
      "memory cap.",
      "stoker");
  app.set_version_flag("--version", "stoker " STOKER_VERSION);
  app.require_subcommand(1);
  app.footer(
      "`stoker COMMAND --help` tells the options of one command.\nExit status: 0 done, 1 it failed "
      "or found a problem, 2 the command line is wrong, 130 or 143 ended by SIGINT or SIGTERM.");
  app.failure_message(usage_error);
  ExitStatus status;
  CLI::App* bench = app.add_subcommand("bench",
                                       "Measure beside the device's ceiling and a peer: bench io, "
                                       "bench codec, bench coded, bench cache, bench repair, "
                                       "bench offload, bench plan");
  bench->require_subcommand(1);
  add_probe(app, status);
  add_bench_io(*bench, status);
  add_bench_codec(*bench, status);
  add_bench_repair(*bench, status);
  add_bench_coded(*bench, status);
  add_bench_cache(*bench, status);
  add_create(app, status);
  add_cp(app, status);
  add_put(app, status);
  add_export(app, status);
  add_rm(app, status);
  add_ls(app, status);
  add_fsck(app, status);
  add_repair(app, status);
  add_scrub(app, status);
  add_serve(app, status);
  add_nvme(app, status);
  add_curm(app, status);
  add_python_commands(app);

  if (const std::string word =
          unknown_command(app, std::span(argv, static_cast<size_t>(argc)).subspan(1));
      !word.empty()) {
    std::fprintf(stderr, "stoker: there is no command `%s`; `stoker --help` lists them\n",
                 word.c_str());
    return 2;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;  // prints the help, the version or what is wrong
  }
  return status.code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stoker: %s\n", error.what());
    return 1;
  }
}
