// stoker repair and stoker scrub: bring the shards of a coded store up to date, replace lost ones,
// find and mend what is damaged.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "command.h"
#include "stoker/base/bytes.h"
#include "stoker/store/coded/store.h"
#include "stoker/store/runtime.h"

namespace stoker::cli {
namespace {

using Seconds = std::chrono::duration<double>;

struct RepairArguments {
  std::string store;
  std::vector<std::string> replace;
  std::string rate = "0";
  bool scrub = false, same_disk = false, json = false;
};

// One line on a terminal, rewritten as it goes on: chunks, rate, the time that is left.
class ProgressLine {
 public:
  void show(const RepairProgress& progress) {
    if (isatty(STDERR_FILENO) == 0 || progress.what.empty()) return;
    const auto now = std::chrono::steady_clock::now();
    if (progress.what != what_ || progress.bytes < first_bytes_) {
      what_ = progress.what;
      begun_ = now;
      first_bytes_ = progress.bytes;
      first_done_ = progress.done;
    }
    const double seconds = Seconds(now - begun_).count();
    const double chunks_a_second =
        seconds > 0 ? static_cast<double>(progress.done - first_done_) / seconds : 0;
    std::fprintf(stderr, "\r\033[K%s: %llu of %llu chunks", what_.c_str(),
                 static_cast<unsigned long long>(progress.done),
                 static_cast<unsigned long long>(progress.total));
    if (chunks_a_second > 0) {
      std::fprintf(stderr, ", %.0f MB/s, %.0f s left",
                   static_cast<double>(progress.bytes - first_bytes_) / seconds / 1e6,
                   static_cast<double>(progress.total - progress.done) / chunks_a_second);
    }
    std::fflush(stderr);
    shown_ = true;
  }
  void end() const {
    if (shown_) std::fputs("\r\033[K", stderr);
  }

 private:
  std::string what_;
  std::chrono::steady_clock::time_point begun_;
  uint64_t first_bytes_ = 0, first_done_ = 0;
  bool shown_ = false;
};

void print_json(const RepairReport& report, bool scrub, double seconds) {
  nlohmann::json json = {{"clean", report.problems.empty()},
                         {"problems", report.problems},
                         {"advice", report.advice},
                         {"rebuilt_bytes", report.rebuilt_bytes},
                         {"committed_version", report.committed},
                         {"seconds", seconds}};
  if (scrub) {
    const ScrubReport& found = report.scrub;
    json["scrub"] = {{"chunks", found.chunks},
                     {"bytes", found.bytes},
                     {"mended",
                      {{"blocks", found.blocks},
                       {"header_pages", found.pages},
                       {"log_records", found.records},
                       {"tables", found.tables},
                       {"superblocks", found.superblocks}}}};
  }
  std::printf("%s\n", json.dump(2).c_str());
}

void print_text(const RepairReport& report, bool scrub, double seconds) {
  for (const std::string& problem : report.problems) {
    std::printf("problem: %s\n", printable(problem).c_str());
  }
  for (const std::string& advice : report.advice) {
    std::printf("to do: %s\n", printable(advice).c_str());
  }
  if (scrub) {
    const ScrubReport& found = report.scrub;
    std::printf(
        "looked at %llu chunks, %s; mended %llu blocks, %llu header pages, %llu log records, %llu "
        "tables, %llu superblocks\n",
        static_cast<unsigned long long>(found.chunks), human_bytes(found.bytes).c_str(),
        static_cast<unsigned long long>(found.blocks), static_cast<unsigned long long>(found.pages),
        static_cast<unsigned long long>(found.records),
        static_cast<unsigned long long>(found.tables),
        static_cast<unsigned long long>(found.superblocks));
  }
  if (report.rebuilt_bytes > 0 || !scrub)
    std::printf("rebuilt %s\n", human_bytes(report.rebuilt_bytes).c_str());
  const std::string state =
      report.problems.empty() ? "clean" : std::to_string(report.problems.size()) + " problems left";
  std::printf("%s, committed version %llu, %.1f s\n", state.c_str(),
              static_cast<unsigned long long>(report.committed), seconds);
}

Result<bool> run(const RepairArguments& arguments) {
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make());
  STOKER_ASSIGN(const auto plan, coded_plan(arguments.store));
  if (!plan) {
    return fail(Code::invalid_argument,
                "'{}' is not a coded store, and only coded stores can be repaired: check others "
                "with `stoker fsck`",
                arguments.store);
  }
  STOKER_ASSIGN(const uint64_t rate, parse_bytes(arguments.rate));
  ProgressLine line;
  const auto begun = std::chrono::steady_clock::now();
  RepairOptions options{.scrub = arguments.scrub,
                        .replace = arguments.replace,
                        .same_disk = arguments.same_disk,
                        .rate = rate,
                        .plan = {},
                        .progress = {}};
  options.plan = [](const std::string& sentence) {
    std::fprintf(stderr, "%s\n", sentence.c_str());
  };
  options.progress = [&line](const RepairProgress& progress) { line.show(progress); };
  const auto report = repair_coded_store(*plan, runtime->runtime(), options);
  line.end();
  if (!report) return report.error();
  const double seconds = Seconds(std::chrono::steady_clock::now() - begun).count();
  if (arguments.json) {
    print_json(*report, arguments.scrub, seconds);
  } else {
    print_text(*report, arguments.scrub, seconds);
  }
  return report->problems.empty();
}

CLI::App* add(CLI::App& app, ExitStatus& status, const char* name, const char* what,
              const std::shared_ptr<RepairArguments>& arguments) {
  CLI::App* command = app.add_subcommand(name, what);
  command
      ->add_option("STORE", arguments->store, "The store, as it was made: coded(6+3, /disk{0..8})")
      ->required();
  command
      ->add_option("--rate", arguments->rate,
                   "Read and write at most so many bytes a second (64MiB, say), so that others who "
                   "use the disks are not kept waiting; 0: as fast as it goes")
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print the result as JSON");
  command->callback([arguments, &status] {
    const auto clean = run(*arguments);
    if (!clean) return tell(status, clean.error());
    if (!*clean) status.code = 1;
  });
  return command;
}

}  // namespace

void add_repair(CLI::App& app, ExitStatus& status) {
  const auto arguments = std::make_shared<RepairArguments>();
  CLI::App* command =
      add(app, status, "repair",
          "Bring all disks of a coded store up to date, and replace lost ones", arguments);
  command
      ->add_option("--replace", arguments->replace,
                   "Disks of STORE that are lost for good: where there is nothing now (no file, or "
                   "a blank one), a new shard is made and rebuilt from the others")
      ->expected(1, 64);
  command->add_flag(
      "--same-disk", arguments->same_disk,
      "A replaced shard may share a disk with another one, although they are then lost together");
  command->footer(
      "Says first what it will do. Nothing is made where --replace does not name it: a disk that "
      "is not there may only not be mounted. A new disk in another\n"
      "place stands in STORE where the lost one stood. Interrupted, it goes on when it is called "
      "again. Exit status: 0 all disks are up to date, 1 some are not,\n"
      "or something could not be repaired.");
}

void add_scrub(CLI::App& app, ExitStatus& status) {
  const auto arguments = std::make_shared<RepairArguments>();
  arguments->scrub = true;
  CLI::App* command =
      add(app, status, "scrub",
          "Read everything on the disks of a coded store, and mend what is damaged from the others",
          arguments);
  command->footer(
      "Also does what `stoker repair` does. To look without changing anything: `stoker fsck`. A "
      "store that is open also scrubs itself; what\n"
      "that finds only the program knows that has it open (its log, Store.health() in Python). "
      "When a scrub last ended: `stoker fsck`. Exit status: 0 all is right now, 1 something could "
      "not be mended.");
}

}  // namespace stoker::cli
