// The `stoker` command: one --help for what is C++ (needs no Python) and what is Python (needs torch).
#include <cstdio>
#include <exception>
#include <span>

#include "command.h"
#include "python_command.h"

namespace {

int run(int argc, char** argv) {
  using namespace stoker::cli;
  // Before any parsing: a Python subcommand has options of its own, its --help too.
  const int status_of_python = run_python_command({argv, static_cast<size_t>(argc)});
  if (status_of_python >= 0) return status_of_python;

  CLI::App app("Stoker keeps AI training fed: weights, gradients and optimizer state on disk, under a hard memory cap.", "stoker");
  app.set_version_flag("--version", "stoker " STOKER_VERSION);
  app.require_subcommand(1);
  app.footer("`stoker COMMAND --help` tells the options of one command.");
  ExitStatus status;
  CLI::App* bench = app.add_subcommand("bench", "Measure, beside the device's ceiling and a peer");
  bench->require_subcommand(1);
  add_probe(app, status);
  add_bench_io(*bench, status);
  add_ls(app, status);
  add_fsck(app, status);
  add_export(app, status);
  add_python_commands(app, *bench);

  const auto named = [&](const CLI::App* command) { return argc > 1 && command->get_name() == argv[1]; };
  if (argc > 1 && argv[1][0] != '-' && app.get_subcommands(named).empty()) {
    std::fprintf(stderr, "stoker: there is no command `%s`; `stoker --help` lists them\n", argv[1]);
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
