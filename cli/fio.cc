#include "fio.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

extern char** environ;

namespace stoker::cli {
namespace {

constexpr const char* kHugePages = "/proc/sys/vm/nr_hugepages";

// Runs a program found on PATH and gives back what it printed; an error if it cannot start or ends
// badly.
Result<std::string> output_of(std::vector<std::string> arguments) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return fail(errno, "cannot make a pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (std::string& each : arguments) argv.push_back(each.data());
  argv.push_back(nullptr);
  pid_t child = 0;
  const int error = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  std::string text;
  std::array<char, 4096> chunk{};
  for (ssize_t got = 0; error == 0 && (got = read(ends[0], chunk.data(), chunk.size())) != 0;) {
    if (got > 0)
      text.append(chunk.data(), static_cast<size_t>(got));
    else if (errno != EINTR)
      break;
  }
  close(ends[0]);
  if (error == ENOENT)
    return fail(Code::not_found, "'{}' is not installed; install it (apt-get install {})",
                arguments[0], arguments[0]);
  if (error != 0) return fail(error, "cannot start '{}'", arguments[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    return fail(Code::io, "'{}' failed: {}", arguments[0], text.substr(0, 500));
  return text;
}

uint64_t read_number(const char* path) {
  uint64_t value = 0;
  std::ifstream(path) >> value;
  return value;
}

bool write_number(const char* path, uint64_t value) {
  std::ofstream file(path);
  file << value << std::flush;
  return static_cast<bool>(file);
}

uint64_t free_huge_pages() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("HugePages_Free:", 0) == 0) return std::stoull(line.substr(15));
  }
  return 0;
}

}  // namespace

Result<std::string> fio_version() {
  STOKER_ASSIGN(std::string text, output_of({"fio", "--version"}));
  return text.substr(0, text.find('\n'));
}

Result<FioResult> run_fio(const std::string& path, const Load& load, bool huge) {
  const std::string kind = load.kind == Load::Kind::mixed ? "rw" : std::string(name(load.kind));
  const auto number = [](uint64_t value) { return std::to_string(value); };
  STOKER_ASSIGN(const std::string text,
                output_of({"fio", "--name=peer", "--output-format=json", "--ioengine=io_uring",
                           "--direct=1", "--registerfiles=1", "--fixedbufs=1", "--filename=" + path,
                           "--rw=" + kind, "--rwmixread=50", "--bs=" + number(load.block_bytes),
                           "--iodepth=" + number(load.depth), "--size=" + number(load.file_bytes),
                           "--scramble_buffers=0", "--gtod_reduce=1", "--time_based",
                           "--runtime=" + number(load.limit_ns / 1'000'000) + "ms",
                           std::string("--iomem=") + (huge ? "shmhuge" : "malloc")}));
  try {
    // Warnings may stand before the JSON.
    const auto job =
        nlohmann::json::parse(text.substr(std::min(text.find('{'), text.size()))).at("jobs").at(0);
    FioResult result;
    for (const char* side : {"read", "write"}) {
      result.bytes_per_second += job.at(side).at("bw_bytes").get<double>();
      result.bytes += job.at(side).at("io_bytes").get<double>();
    }
    const double seconds = job.at("job_runtime").get<double>() / 1e3;
    result.cpu_seconds =
        (job.at("usr_cpu").get<double>() + job.at("sys_cpu").get<double>()) / 100 * seconds;
    return result;
  } catch (const nlohmann::json::exception& error) {
    return fail(Code::unsupported,
                "cannot read the output of this version of fio ({}); install another version",
                error.what());
  }
}

HugePages::HugePages() : before_(read_number(kHugePages)) {}

HugePages::~HugePages() {
  if (changed_) write_number(kHugePages, before_);
}

bool HugePages::provide(uint64_t pages) {
  const uint64_t free = free_huge_pages();
  if (free >= pages) return true;
  changed_ = write_number(kHugePages, read_number(kHugePages) + pages - free) || changed_;
  return free_huge_pages() >= pages;
}

}  // namespace stoker::cli
