#include "python_command.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace stoker::cli {
namespace {

struct PythonCommand {
  const char* parent;  // "bench", say, or null where it stands by itself
  const char* name;
  const char* module;
  const char* help;
};

constexpr std::array kCommands = {
    PythonCommand{nullptr, "train", "stoker.train",
                  "Train a language model whose states live on disk (Python, torch)"},
    PythonCommand{nullptr, "plan", "stoker.plan",
                  "Tell what training a model will take, before there is one (Python, torch)"},
    PythonCommand{nullptr, "trace", "stoker.trace",
                  "Write a Chrome trace of one step: disk, kernels, computing (Python, torch)"},
    PythonCommand{nullptr, "report", "stoker.report",
                  "Write one HTML file that shows a run, and say what would help (Python, torch)"},
    PythonCommand{nullptr, "top", "stoker.top",
                  "Watch a run: its step, what waits, disk, cache, checkpoints (Python, torch)"},
    PythonCommand{nullptr, "ckpt", "stoker.ckpt",
                  "List, verify, compare, copy and remove checkpoints (Python, torch)"},
    PythonCommand{
        nullptr, "data", "stoker.dataset",
        "Turn texts into tokens, index data sets, tell what an index holds (Python, torch)"},
    PythonCommand{"bench", "offload", "stoker.bench",
                  "Measure offloaded training against its floor (Python, torch)"},
    PythonCommand{"bench", "plan", "stoker.bench",
                  "Measure how close plans come to the steps they predict (Python, torch)"},
};

// Run by `python -P -c`: says what is missing in a sentence, else calls main() of the module's
// __main__. An interrupt comes blocked. While modules are loaded, and again once main() is done, it
// ends the process like any program: nothing is at stake, and an exception would be printed instead
// of raised in many a place of an import and of the interpreter's end. In main() the first one is
// an exception, so that it can clean up; a second one ends the process at once. Where nobody reads
// stdout any more (`| head`), it ends without a word. -P keeps the working directory off the search
// path, so that a folder named "stoker" there is not taken for the package.
constexpr const char* kLauncher = R"(
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
import importlib.util, sys
module = sys.argv[0] = sys.argv.pop(1)
for name, remedy in (("stoker", "install it there with `pip install .`"),
                     ("torch", "install it there with `pip install torch`")):
    if importlib.util.find_spec(name) is None:
        sys.exit(f"stoker: this command needs the Python package {name}, "
                 f"which {sys.executable} does not have; {remedy}")
main = importlib.import_module(module + ".__main__").main
def interrupt(number, frame):
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt
try:
    try:
        signal.signal(signal.SIGINT, interrupt)
        status = main()
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
except KeyboardInterrupt:
    status = 130
except BrokenPipeError:
    import os
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    status = 141
sys.exit(status)
)";

// `arguments` start with the program's name; a nested command is two words.
const PythonCommand* find(std::span<char* const> arguments) {
  const auto word = [&](size_t i) {
    return i < arguments.size() ? std::string_view(arguments[i]) : std::string_view();
  };
  for (const PythonCommand& command : kCommands) {
    const bool nested = command.parent != nullptr;
    if (nested ? word(1) == command.parent && word(2) == command.name : word(1) == command.name)
      return &command;
  }
  return nullptr;
}

// The interpreter in the folder of this very program: a virtual environment's bin, or the prefix it
// was installed to.
std::optional<std::filesystem::path> python_beside_us() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return std::nullopt;
  for (const char* name : {"python", "python3"}) {
    auto python = self.parent_path() / name;
    if (access(python.c_str(), X_OK) == 0) return python;
  }
  return std::nullopt;
}

}  // namespace

void add_python_commands(CLI::App& app) {
  for (const PythonCommand& command : kCommands) {
    CLI::App& parent = command.parent != nullptr ? *app.get_subcommand(command.parent) : app;
    parent.add_subcommand(command.name, command.help);
  }
}

int run_python_command(std::span<char* const> arguments) {
  const PythonCommand* command = find(arguments);
  if (command == nullptr) return -1;
  const auto python = python_beside_us();
  if (!python) {
    std::fprintf(stderr,
                 "stoker: `%s` needs Python with torch, and there is no python beside this "
                 "program; install stoker into a "
                 "Python environment with `pip install .`\n",
                 command->name);
    return 1;
  }
  std::string path = python->string(), isolate = "-P", code = "-c", launcher = kLauncher,
              module = command->module;
  std::vector<char*> words = {path.data(), isolate.data(), code.data(), launcher.data(),
                              module.data()};
  const auto rest = arguments.subspan(2);  // of a nested command, its name comes first
  words.insert(words.end(), rest.begin(), rest.end());
  words.push_back(nullptr);
  sigset_t interrupt;
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  sigprocmask(SIG_BLOCK, &interrupt, nullptr);
  execv(path.c_str(), words.data());
  sigprocmask(SIG_UNBLOCK, &interrupt, nullptr);
  std::fprintf(stderr, "stoker: %s cannot be run: %s\n", path.c_str(), std::strerror(errno));
  return 1;
}

}  // namespace stoker::cli
