// stoker serve STORE --listen unix:PATH: one process owns a store, others of this machine use it.
#include <signal.h>

#include <cstdio>
#include <memory>
#include <string>

#include "command.h"
#include "stoker/base/bytes.h"
#include "stoker/store/remote/server.h"
#include "stoker/store/runtime.h"

namespace stoker::cli {
namespace {

struct ServeArguments {
  std::string store, listen, prefix;
  std::string memory = "1GiB", block = "1MiB", pinned = "256MiB", mode = "0600";
  double heartbeat = 30;
  uint64_t clients = 256;
  bool read_only = false;
};

Result<ServeOptions> options_of(const ServeArguments& arguments) {
  constexpr std::string_view kScheme = "unix:";
  if (!arguments.listen.starts_with(kScheme))
    return fail(Code::invalid_argument, "'{}' is not an address to listen at: write unix:PATH",
                arguments.listen);
  ServeOptions options;
  options.path = arguments.listen.substr(kScheme.size());
  options.prefix = arguments.prefix;
  options.read_only = arguments.read_only;
  size_t used = 0;
  const unsigned long mode = arguments.mode.find_first_not_of("01234567") == std::string::npos &&
                                     !arguments.mode.empty() && arguments.mode.size() <= 4
                                 ? std::stoul(arguments.mode, &used, 8)
                                 : 01000;
  if (mode > 0777)
    return fail(Code::invalid_argument, "'{}' is not a mode of a file, such as 0660",
                arguments.mode);
  options.mode = static_cast<uint32_t>(mode);
  STOKER_ASSIGN(options.memory_bytes, parse_bytes(arguments.memory));
  STOKER_ASSIGN(const uint64_t block, parse_bytes(arguments.block));
  if (block > 8 * kMiB)
    return fail(Code::invalid_argument, "--block is {}, but a block has at most 8 MiB; give less",
                arguments.block);
  options.block_bytes = static_cast<uint32_t>(block);
  STOKER_ASSIGN(options.pinned_bytes, parse_bytes(arguments.pinned));
  options.heartbeat_ms = static_cast<uint64_t>(arguments.heartbeat * 1000);
  options.clients = arguments.clients;
  return options;
}

Status run(const ServeArguments& arguments) {
  STOKER_ASSIGN(const ServeOptions serving, options_of(arguments));
  // All threads inherit it: the signals are waited for below, and nowhere else.
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGINT);
  sigaddset(&ends, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &ends, nullptr);
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make());
  StoreOptions options;
  options.read_only = arguments.read_only && arguments.store != "memory:";
  options.holder = "stoker serve";
  STOKER_ASSIGN(const auto store, open_store(arguments.store, runtime->runtime(), options));
  STOKER_ASSIGN(auto server, serve(*store, runtime->runtime(), serving));
  std::printf("serving '%s' at '%s'\n", printable(arguments.store).c_str(),
              printable(arguments.listen).c_str());
  std::fflush(stdout);
  int which = 0;
  sigwait(&ends, &which);
  const ServeCounts counts = server->counts();
  server.reset();
  std::fprintf(stderr, "%llu requests were answered\n",
               static_cast<unsigned long long>(counts.requests));
  return {};
}

}  // namespace

void add_serve(CLI::App& app, ExitStatus& status) {
  const auto arguments = std::make_shared<ServeArguments>();
  CLI::App* command = app.add_subcommand(
      "serve", "Let other processes of this machine use a store, as unix:PATH, until SIGTERM");
  command->add_option("STORE", arguments->store, "The store; nobody else writes to it meanwhile")
      ->required();
  command->add_option("--listen", arguments->listen, "Where: unix:PATH, the path of a socket")
      ->required();
  command
      ->add_option("--memory", arguments->memory,
                   "Memory for blocks that clients read without a copy; taken at once")
      ->capture_default_str();
  command->add_option("--block", arguments->block, "A power of two from 64KiB to 8MiB")
      ->capture_default_str();
  command->add_option("--pinned", arguments->pinned, "The most of it that one client may hold")
      ->capture_default_str();
  command->add_option("--mode", arguments->mode, "Of the socket: who may connect")
      ->capture_default_str();
  command->add_option("--prefix", arguments->prefix, "Only objects whose names start with it");
  command->add_flag("--read-only", arguments->read_only, "Clients cannot change the store");
  command
      ->add_option("--heartbeat", arguments->heartbeat,
                   "Seconds after which a client that says nothing is given up")
      ->check(number(0.05, 3600))
      ->capture_default_str();
  command->add_option("--clients", arguments->clients, "So many at once")
      ->check(whole(1, 4096))
      ->capture_default_str();
  command->callback([arguments, &status] {
    if (const Status done = run(*arguments); !done) tell(status, done.error());
  });
}

}  // namespace stoker::cli
