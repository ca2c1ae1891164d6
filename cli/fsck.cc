// stoker fsck STORE: checks a store that nobody has open; exit status 0 clean, 1 problems found.
#include "stoker/store/local/fsck.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "command.h"
#include "stoker/base/bytes.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/coded/store.h"
#include "stoker/store/runtime.h"

namespace stoker::cli {
namespace {

struct FsckArguments {
  std::string store;
  bool quick = false, repair = false, json = false;
};

void show_progress(uint64_t done, uint64_t total) {
  if (isatty(STDERR_FILENO) == 0) return;
  const bool end = done >= total;
  std::fprintf(stderr, "\r\033[Kchecking data %s of %s%s", human_bytes(done).c_str(),
               human_bytes(total).c_str(), end ? "\n" : "");
  std::fflush(stderr);
}

void print_json(const FsckReport& report) {
  nlohmann::json json = {
      {"clean", report.problems.empty()}, {"problems", report.problems},
      {"advice", report.advice},          {"notes", report.notes},
      {"repaired", report.repaired},      {"committed_version", report.committed},
      {"objects", report.objects},        {"chunks", report.chunks},
      {"data_bytes", report.data_bytes},  {"generation", report.generation},
      {"records", report.records},        {"snapshots", nlohmann::json::array()}};
  json["scrubbed_at"] = report.scrubbed_at ? nlohmann::json(*report.scrubbed_at) : nlohmann::json();
  json["committed_step"] =
      report.committed_step ? nlohmann::json(*report.committed_step) : nlohmann::json();
  for (const SnapshotInfo& snapshot : report.snapshots)
    json["snapshots"].push_back({{"name", snapshot.name}, {"version", snapshot.version}});
  std::printf("%s\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

void print_text(const FsckReport& report, bool quick) {
  for (const std::string& problem : report.problems) {
    std::printf("problem: %s\n", printable(problem).c_str());
  }
  for (const std::string& advice : report.advice) {
    std::printf("to do: %s\n", printable(advice).c_str());
  }
  for (const std::string& note : report.notes) std::printf("note: %s\n", printable(note).c_str());
  if (report.repaired)
    std::printf(
        "the map was repaired: headers and journal were written again from the good copies\n");
  std::printf(
      "%llu objects, %llu chunks, %s of data%s; %zu snapshots; journal generation %llu with %llu "
      "records\n",
      static_cast<unsigned long long>(report.objects),
      static_cast<unsigned long long>(report.chunks), human_bytes(report.data_bytes).c_str(),
      quick ? " (not read)" : " (all read)", report.snapshots.size(),
      static_cast<unsigned long long>(report.generation),
      static_cast<unsigned long long>(report.records));
  const std::string state = report.problems.empty()
                                ? "clean"
                                : std::to_string(report.problems.size()) + " problems found";
  const std::string step =
      report.committed_step ? ", committed step " + std::to_string(*report.committed_step) : "";
  std::printf("%s, committed version %llu%s\n", state.c_str(),
              static_cast<unsigned long long>(report.committed), step.c_str());
}

// A store without a check of its own: that every object can be listed and read.
Result<FsckReport> read_everything(Store& store, bool quick) {
  FsckReport report;
  if (!store.features().verified)
    report.notes.push_back(
        "this store keeps no checksums: what was read is what is there, whatever was written");
  STOKER_ASSIGN(const auto objects, store.list(""));
  const AlignedBytes memory(8 * kMiB);
  uint64_t total = 0;
  for (const ObjectInfo& object : objects) total += object.bytes;
  for (const ObjectInfo& object : objects) {
    ++report.objects;
    Status status;
    for (uint64_t at = 0; status && !quick && at < object.bytes; at += memory.size()) {
      status =
          store
              .read(object.key, at,
                    memory.slice().sub(0, std::min<uint64_t>(memory.size(), object.bytes - at)),
                    {.priority = Priority::scrub})
              .wait();
    }
    if (!status) report.problems.push_back("'" + object.key + "': " + status.error().message());
    report.data_bytes += object.bytes;
    if (!quick) show_progress(report.data_bytes, total);
  }
  return report;
}

Result<FsckReport> check(const FsckArguments& arguments, const Runtime& runtime) {
  const FsckOptions options{
      .quick = arguments.quick, .repair_map = arguments.repair, .progress = show_progress};
  STOKER_ASSIGN(const auto coded, coded_plan(arguments.store));
  if (coded) return fsck_coded_store(*coded, runtime, options);
  const auto is = [&arguments](std::string_view kind) { return arguments.store.starts_with(kind); };
  if (is("dir:") || is("s3:") || is("cached(") || is("unix:")) {
    if (arguments.repair)
      return fail(Code::unsupported,
                  "'{}' has no map to repair; leave out --repair-map, which is for local stores",
                  arguments.store);
    StoreOptions how;
    how.read_only = true;
    STOKER_ASSIGN(const auto store, open_store(arguments.store, runtime, how));
    return read_everything(*store, arguments.quick);
  }
  STOKER_ASSIGN(const auto volumes, local_volumes(arguments.store));
  return fsck_local_store(volumes, runtime, options);
}

Result<bool> run(const FsckArguments& arguments) {
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make());
  STOKER_ASSIGN(const FsckReport report, check(arguments, runtime->runtime()));
  if (arguments.json) {
    print_json(report);
  } else {
    print_text(report, arguments.quick);
  }
  return report.problems.empty();
}

}  // namespace

void add_fsck(CLI::App& app, ExitStatus& status) {
  const auto arguments = std::make_shared<FsckArguments>();
  CLI::App* command = app.add_subcommand(
      "fsck",
      "Check a store: headers, journal, map and every byte of data; tell the committed step");
  command
      ->add_option("STORE", arguments->store,
                   "The store: a folder, local:/a,/b for several volumes, coded(6+3, /disk{0..8}), "
                   "dir:/folder of plain files, or s3://bucket/prefix")
      ->required();
  command->add_flag("--quick", arguments->quick, "Leave out the data");
  command->add_flag("--repair-map", arguments->repair,
                    "Write damaged headers and journal copies again from the good ones");
  command->add_flag("--json", arguments->json, "Print the result as JSON");
  command->footer("Exit status: 0 clean, 1 problems were found or the store could not be opened.");
  command->callback([arguments, &status] {
    const auto clean = run(*arguments);
    if (!clean) return tell(status, clean.error());
    if (!*clean) status.code = 1;
  });
}

}  // namespace stoker::cli
