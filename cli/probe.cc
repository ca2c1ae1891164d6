// stoker probe DIR: measures the disk of a folder and keeps the result there. Of an NVMe namespace
// ("nvme:...") it measures what reads cost by each engine that reaches it, with --gpu what it costs
// to reach the memory of a GPU; both keep nothing.
#include "stoker/io/probe.h"

#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>

#include "command.h"
#include "stoker/base/bytes.h"
#include "stoker/io/gpu/probe.h"
#include "stoker/io/nvme/command.h"
#include "stoker/io/nvme/probe.h"

namespace stoker::cli {
namespace {

struct ProbeArguments {
  std::string folder;
  std::string engine = "auto";
  double seconds = 8;
  int gpu = -1;
  bool json = false;
};

// One line on a terminal, rewritten as the probe goes on; nothing elsewhere.
void show_progress(std::string_view doing, double fraction) {
  if (isatty(STDERR_FILENO) == 0) return;
  std::fprintf(stderr, "\r\033[Kprobing %3.0f %%  %.*s%s", fraction * 100,
               static_cast<int>(doing.size()), doing.data(), fraction >= 1 ? "\n" : "");
  std::fflush(stderr);
}

void print_table(const Probe& probe) {
  std::printf("engine %s, %s, memory in %s pages, file of %s\n", probe.engine.c_str(),
              probe.direct ? "direct I/O" : "through the page cache", probe.pages.c_str(),
              human_bytes(probe.file_bytes).c_str());
  std::printf("first write of reserved space %6.2f GB/s\n",
              probe.first_write_bytes_per_second / 1e9);
  std::printf("%-6s %10s %6s %10s %12s\n", "op", "block", "depth", "GB/s", "latency us");
  for (const ProbePoint& point : probe.points) {
    std::printf("%-6s %10s %6u %10.2f %12.0f\n", std::string(name(point.kind)).c_str(),
                human_bytes(point.block_bytes).c_str(), point.depth, point.bytes_per_second / 1e9,
                point.latency_us);
  }
}

Status run_nvme(const ProbeArguments& arguments) {
  if (arguments.engine != "auto")
    return fail(
        Code::invalid_argument,
        "--engine is for folders: the name of an nvme: target decides which engines can reach it");
  STOKER_ASSIGN(const auto points,
                nvme::probe_reads(arguments.folder, {arguments.seconds, show_progress}));
  if (arguments.json) {
    std::fputs(nvme::reads_json(arguments.folder, points).c_str(), stdout);
    return {};
  }
  std::printf("reads of %s; CPU of the whole process\n", arguments.folder.c_str());
  std::printf("%-12s %8s %6s %10s %8s %8s %8s %8s %8s %10s %10s\n", "engine", "block", "depth",
              "IOPS", "GB/s", "p50 us", "p99 us", "p999 us", "CPU s/GB", "syscalls", "copies");
  for (const nvme::ReadPoint& point : points) {
    std::printf("%-12s %8s %6u %10.0f %8.3f %8.0f %8.0f %8.0f %8.2f %10.3f %10.0f\n",
                point.engine.c_str(), human_bytes(point.block_bytes).c_str(), point.depth,
                point.iops, point.bytes_per_second / 1e9, point.p50_us, point.p99_us, point.p999_us,
                point.cpu_seconds_per_gb, point.syscalls_per_transfer, point.copies_per_transfer);
  }
  return {};
}

Status run_gpu(const ProbeArguments& arguments) {
  if (arguments.engine != "auto" || nvme::is_target(arguments.folder))
    return fail(Code::invalid_argument,
                "--gpu is for folders, and has engines of its own: leave --engine out");
  STOKER_ASSIGN(const auto gpu, gpu::Gpu::open(arguments.gpu));
  STOKER_ASSIGN(const gpu::GpuProbe probe,
                gpu::probe_gpu(arguments.folder, gpu,
                               {.seconds = arguments.seconds, .progress = show_progress}));
  if (arguments.json) {
    std::fputs(gpu::gpu_probe_json(probe).c_str(), stdout);
    return {};
  }
  std::printf("%s and %s\n", arguments.folder.c_str(), probe.device.c_str());
  if (!probe.why_no_cufile.empty())
    std::printf("without cuFile: %s\n", probe.why_no_cufile.c_str());
  if (probe.bounced_bytes > 0 && probe.why_no_cufile.empty())
    std::printf("cuFile refused %s, which went through host memory\n",
                human_bytes(probe.bounced_bytes).c_str());
  std::printf("%-8s %-6s %10s %6s %10s\n", "way", "op", "block", "depth", "GB/s");
  for (const gpu::GpuPoint& point : probe.points) {
    std::printf("%-8s %-6s %10s %6u %10.2f\n", point.way.c_str(),
                std::string(name(point.kind)).c_str(), human_bytes(point.block_bytes).c_str(),
                point.depth, point.bytes_per_second / 1e9);
  }
  return {};
}

Status run(const ProbeArguments& arguments) {
  if (arguments.gpu >= 0) return run_gpu(arguments);
  if (nvme::is_target(arguments.folder)) return run_nvme(arguments);
  STOKER_ASSIGN(const Probe probe, run_probe(arguments.folder, {.engine = arguments.engine,
                                                                .seconds = arguments.seconds,
                                                                .progress = show_progress}));
  STOKER_TRY(save_probe(arguments.folder, probe));
  if (arguments.json) {
    std::fputs(probe_json(probe).c_str(), stdout);
  } else {
    print_table(probe);
    std::printf("kept in %s\n", probe_path(arguments.folder).c_str());
  }
  return {};
}

}  // namespace

void add_probe(CLI::App& app, ExitStatus& status) {
  const auto arguments = std::make_shared<ProbeArguments>();
  CLI::App* command = app.add_subcommand(
      "probe", "Measure a folder's disk in under 10 seconds and keep the result there");
  command
      ->add_option(
          "DIR", arguments->folder,
          "The folder; it needs 128 MiB of free space. Or an NVMe namespace, nvme:/dev/ng0n1 or "
          "nvme:0000:00:04.0: its reads by each engine are measured, nothing is kept")
      ->required();
  command->add_option("--engine", arguments->engine, "auto, uring or posix")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "uring", "posix"}));
  command
      ->add_option(
          "--gpu", arguments->gpu,
          "The number of a GPU (0 is the first): measures transfers between the folder and "
          "its memory, by cuFile and through host memory; nothing is kept")
      ->check(CLI::Range(0, 1023));
  command->add_option("--seconds", arguments->seconds, "About how long it may take")
      ->capture_default_str()
      ->check(number(1.0, 600.0));
  command->add_flag("--json", arguments->json, "Print the result as JSON");
  command->callback([arguments, &status] {
    if (const Status done = run(*arguments); !done) tell(status, done.error());
  });
}

}  // namespace stoker::cli
