// stoker bench io: our engine beside fio on the same file, with the same block sizes, depth and
// pages, taking turns.
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench.h"
#include "command.h"
#include "fio.h"
#include "stoker/base/bytes.h"
#include "stoker/io/load.h"

namespace stoker::cli {
namespace {

constexpr size_t kBlockMax = 4 * kMiB;

struct BenchArguments {
  std::string folder = ".";
  std::string engine = "auto";
  uint32_t depth = 32;
  double seconds = 1.5;
  int repetitions = 5;
  std::string file_size = "2GiB";
  bool json = false;
};

// 2 MiB pages for fio's buffers, and some for what it keeps beside them.
uint64_t peer_pages(const BenchArguments& arguments) {
  return arguments.depth * kBlockMax / (2 * kMiB) + 16;
}

// Set by SIGINT and SIGTERM: the run in progress ends, the reserved pages go back, then we go.
std::atomic<int> interrupted{0};

struct Samples {
  std::vector<double> gbps;
  std::vector<double> cpu_seconds_per_gb;

  void add(double bytes_per_second, double cpu_seconds, double bytes) {
    gbps.push_back(bytes_per_second / 1e9);
    cpu_seconds_per_gb.push_back(cpu_seconds / (bytes / 1e9));
  }
};

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);  // the kernel's io_uring workers count as ours
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// The benchmark with all it holds open.
class Bench {
 public:
  Bench(const BenchArguments& arguments, Loop& loop, const FileInfo& file, const std::string& path,
        const Slice& memory, HugePages* pages)
      : arguments_(arguments),
        loop_(loop),
        file_(file),
        path_(path),
        memory_(memory),
        pages_(pages) {}

  // The first pass over the reserved file, then a second one: what never written blocks cost.
  Result<Json> first_pass() {
    Json passes;
    for (const char* pass : {"first_gbps", "second_gbps"}) {
      STOKER_ASSIGN(const LoadResult result,
                    run_load(loop_, file_.id, memory_,
                             {Load::Kind::write, kMiB, arguments_.depth, file_.bytes}));
      passes[pass] = result.bytes_per_second() / 1e9;
    }
    return passes;
  }

  Result<Json> compare(Load::Kind kind, size_t block) {
    const Load load{kind, block, arguments_.depth, file_.bytes,
                    static_cast<uint64_t>(arguments_.seconds * 1e9)};
    Samples ours;
    Samples fio;
    // The first pair only warms up. Who goes first alternates, so that neither always follows the
    // other's work.
    for (int i = 0; i <= arguments_.repetitions; ++i) {
      for (const bool mine : {i % 2 == 0, i % 2 != 0}) {
        if (interrupted != 0) return fail(Code::cancelled, "interrupted");
        STOKER_TRY(mine ? run_ours(load, ours) : run_peer(load, fio));
      }
      if (i == 0) ours = fio = {};
      std::fprintf(stderr, ".");
    }
    return row(load, ours, fio);
  }

 private:
  Status run_ours(const Load& load, Samples& samples) {
    const double cpu = cpu_seconds();
    STOKER_ASSIGN(const LoadResult result, run_load(loop_, file_.id, memory_, load));
    samples.add(result.bytes_per_second(), cpu_seconds() - cpu,
                static_cast<double>(result.read_bytes + result.written_bytes));
    return {};
  }
  Status run_peer(const Load& load, Samples& samples) {
    if (pages_ != nullptr && !pages_->provide(peer_pages(arguments_))) {
      return fail(Code::over_budget,
                  "other programs took the 2 MiB pages that fio needs; run the benchmark again "
                  "when the machine is quiet");
    }
    STOKER_ASSIGN(const FioResult result, run_fio(path_, load, pages_ != nullptr));
    samples.add(result.bytes_per_second, result.cpu_seconds, result.bytes);
    return {};
  }

  static Json row(const Load& load, const Samples& ours, const Samples& fio) {
    Json row = {{"op", std::string(name(load.kind))},
                {"block_bytes", load.block_bytes},
                {"depth", load.depth}};
    row["ours_gbps"] = median(ours.gbps);
    row["fio_gbps"] = median(fio.gbps);
    row["ratio"] = median(ours.gbps) / median(fio.gbps);
    row["ours_cpu_seconds_per_gb"] = median(ours.cpu_seconds_per_gb);
    row["fio_cpu_seconds_per_gb"] = median(fio.cpu_seconds_per_gb);
    row["cpu_ratio"] = median(ours.cpu_seconds_per_gb) / median(fio.cpu_seconds_per_gb);
    row["repetitions"] = ours.gbps.size();
    row["ours_gbps_all"] = ours.gbps;
    row["fio_gbps_all"] = fio.gbps;
    row["ours_cpu_all"] = ours.cpu_seconds_per_gb;
    row["fio_cpu_all"] = fio.cpu_seconds_per_gb;
    return row;
  }

  const BenchArguments& arguments_;
  Loop& loop_;
  const FileInfo file_;
  const std::string path_;
  const Slice memory_;
  HugePages* const pages_;  // null: fio gets ordinary pages
};

Result<Json> run_all(Bench& bench) {
  Json results = Json::array();
  for (const size_t block : {1 * kMiB, kBlockMax}) {
    for (const Load::Kind kind : {Load::Kind::read, Load::Kind::write, Load::Kind::mixed}) {
      std::fprintf(stderr, "%s of %s ", std::string(name(kind)).c_str(),
                   human_bytes(block).c_str());
      auto row = bench.compare(kind, block);
      std::fprintf(stderr, "\n");
      if (!row) return row.error();
      results.push_back(std::move(*row));
    }
  }
  return results;
}

Result<Json> run_bench(const BenchArguments& arguments) {
  STOKER_ASSIGN(const std::string fio, fio_version());
  STOKER_ASSIGN(const uint64_t bytes, parse_bytes(arguments.file_size));
  const uint64_t memory_bytes = arguments.depth * kBlockMax;
  HugePages pages;
  const bool huge = pages.provide(memory_bytes / (2 * kMiB) + peer_pages(arguments));
  Budget budget(memory_bytes);
  STOKER_ASSIGN(const auto arena, Arena::make(memory_bytes, budget));
  STOKER_ASSIGN(const Buffer buffer, arena->take(memory_bytes));
  std::memset(buffer.data(), 0x5A, buffer.size());
  STOKER_ASSIGN(auto engine, make_engine(arguments.engine, arguments.depth));
  STOKER_ASSIGN(const auto loop,
                Loop::make(std::move(engine), {.depth = arguments.depth, .background_bytes = 0}));
  STOKER_TRY(loop->adopt(*arena));

  const std::string path = arguments.folder + "/.stoker.bench." + std::to_string(getpid());
  // fio opens the file by name, so it keeps its name until the end.
  const std::unique_ptr<const char, void (*)(const char*)> remove_file(
      path.c_str(), [](const char* name) { unlink(name); });
  STOKER_ASSIGN(const FileInfo file,
                loop->open({.path = path, .create = true, .reserve_bytes = bytes}));
  Bench bench(arguments, *loop, file, path, buffer.slice(), huge ? &pages : nullptr);
  const std::string load_before = load_average();
  STOKER_ASSIGN(const Json passes, bench.first_pass());
  STOKER_ASSIGN(const Json results, run_all(bench));
  Json machine = bench_machine();
  machine["peer"] = fio;
  Json json = {
      {"machine", machine},
      {"engine", loop->traits().name},
      {"direct", file.direct},
      {"file_bytes", bytes},
      {"seconds_per_run", arguments.seconds},
      {"ours_pages", pages_text(arena->pages())},
      {"fio_pages", huge ? "2 MiB (reserved)" : "4 KiB: huge pages may be reserved by root only"},
      {"load_average_before", load_before},
      {"load_average_after", load_average()},
      {"write_of_reserved_space", passes},
      {"results", results}};
  STOKER_TRY(loop->close(file.id));
  STOKER_TRY(loop->unadopt(*arena));
  return json;
}

void print_table(const Json& json) {
  std::printf("engine %s; pages: ours %s, fio %s\n", json["engine"].get<std::string>().c_str(),
              json["ours_pages"].get<std::string>().c_str(),
              json["fio_pages"].get<std::string>().c_str());
  std::printf("write of reserved space: first pass %.2f GB/s, second %.2f GB/s\n",
              json["write_of_reserved_space"]["first_gbps"].get<double>(),
              json["write_of_reserved_space"]["second_gbps"].get<double>());
  std::printf("%-6s %8s %10s %10s %7s %14s %14s\n", "op", "block", "ours GB/s", "fio GB/s", "ratio",
              "ours CPU s/GB", "fio CPU s/GB");
  for (const Json& row : json["results"]) {
    std::printf(
        "%-6s %8s %10.3f %10.3f %7.3f %14.4f %14.4f\n", row["op"].get<std::string>().c_str(),
        human_bytes(row["block_bytes"].get<uint64_t>()).c_str(), row["ours_gbps"].get<double>(),
        row["fio_gbps"].get<double>(), row["ratio"].get<double>(),
        row["ours_cpu_seconds_per_gb"].get<double>(), row["fio_cpu_seconds_per_gb"].get<double>());
  }
}

void run(const BenchArguments& arguments, ExitStatus& status) {
  struct sigaction action {};
  action.sa_handler = [](int number) { interrupted = number; };
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  const auto json = run_bench(arguments);
  if (!json) {
    tell(status, json.error());
    if (interrupted != 0) status.code = 128 + interrupted;
  } else if (arguments.json) {
    std::printf("%s\n", json->dump(2).c_str());
  } else {
    print_table(*json);
  }
}

}  // namespace

void add_bench_io(CLI::App& bench, ExitStatus& status) {
  const auto arguments = std::make_shared<BenchArguments>();
  CLI::App* command = bench.add_subcommand(
      "io", "Measure our disk I/O beside fio on the same file (about 2.5 minutes)");
  command->add_option("DIR", arguments->folder, "The folder whose disk is measured")
      ->capture_default_str();
  command->add_option("--engine", arguments->engine, "auto, uring or posix")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "uring", "posix"}));
  command->add_option("--depth", arguments->depth, "Operations under way")
      ->capture_default_str()
      ->check(whole(1, 256));
  command->add_option("--seconds", arguments->seconds, "Length of one run")
      ->capture_default_str()
      ->check(number(0.1, 600.0));
  command
      ->add_option("--repetitions", arguments->repetitions,
                   "Pairs of runs that count; one more warms up")
      ->capture_default_str()
      ->check(whole(1, 100));
  command->add_option("--file-size", arguments->file_size, "Size of the temporary file")
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print the results as JSON");
  command->callback([arguments, &status] { run(*arguments, status); });
}

}  // namespace stoker::cli
