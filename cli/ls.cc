// stoker ls STORE [PREFIX]: the objects of a store and its snapshots.
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "command.h"
#include "run_summary.h"
#include "stoker/base/bytes.h"
#include "stoker/store/runtime.h"

namespace stoker::cli {
namespace {

struct LsArguments {
  std::string store, prefix, snapshot;
  bool json = false;
  bool folders = false;
};

// The files of a local store; none of another one.
std::vector<std::string> files_of(const std::string& store) {
  const auto volumes = local_volumes(store);
  if (!volumes) return {};
  std::vector<std::string> files;
  for (const std::string& volume : *volumes) {
    std::error_code error;
    const bool folder = std::filesystem::is_directory(volume, error);
    files.push_back(folder ? volume + "/stoker.volume" : volume);
  }
  return files;
}

void add_run(nlohmann::json& json, const RunSummary& run, const std::string& written) {
  nlohmann::json& made = json["run"] = {{"algorithm", run.algorithm},
                                        {"moments", run.moments},
                                        {"types", run.types()},
                                        {"elements", run.elements(false)},
                                        {"trained_elements", run.elements(true)},
                                        {"last_written", written},
                                        {"parameters", nlohmann::json::array()}};
  made["step"] = run.step ? nlohmann::json(*run.step) : nlohmann::json();
  for (const RunParameter& each : run.parameters) {
    made["parameters"].push_back({{"name", each.name},
                                  {"type", each.type},
                                  {"shape", each.shape},
                                  {"elements", each.elements},
                                  {"trained", each.trained},
                                  {"unit", each.unit}});
  }
}

void print_run(const RunSummary& run, const StoreInfo& info, const std::string& written) {
  const double millions = static_cast<double>(run.elements(false)) / 1e6;
  const double trained = static_cast<double>(run.elements(true)) / 1e6;
  std::printf(
      "model         %.4g M elements in %zu parameters, %s; %.4g M of them trained by %s, moments "
      "%s\n",
      millions, run.parameters.size(), printable(run.types()).c_str(), trained,
      printable(run.algorithm).c_str(), printable(run.moments).c_str());
  const std::string step = run.step ? std::to_string(*run.step) : "none is committed yet";
  std::printf("step          %s%s%s\n", step.c_str(), written.empty() ? "" : "; last written ",
              written.c_str());
  std::printf("size          %s of %s used\n\n", human_bytes(info.used_bytes).c_str(),
              human_bytes(info.capacity_bytes).c_str());
  std::printf("%14s %10s %-18s  %s\n", "elements", "type", "shape", "parameter");
  for (const RunParameter& each : run.parameters) {
    std::printf("%14llu %10s %-18s  %s%s\n", static_cast<unsigned long long>(each.elements),
                printable(each.type).c_str(), each.shape.c_str(), printable(each.name).c_str(),
                each.trained ? "" : " (frozen)");
  }
  std::printf("\n");
}

nlohmann::json json_of(const StoreInfo& info, const Level& found) {
  nlohmann::json json = {{"store", info.composition},
                         {"committed_version", info.committed},
                         {"capacity_bytes", info.capacity_bytes},
                         {"used_bytes", info.used_bytes},
                         {"objects", nlohmann::json::array()},
                         {"snapshots", nlohmann::json::array()}};
  for (const ObjectInfo& object : found.objects) {
    json["objects"].push_back({{"key", object.key},
                               {"bytes", object.bytes},
                               {"chunk_bytes", object.chunk_bytes},
                               {"version", object.version}});
    if (object.expected)
      json["objects"].back()["class"] = kClasses[static_cast<size_t>(*object.expected)];
  }
  for (const SnapshotInfo& snapshot : info.snapshots)
    json["snapshots"].push_back({{"name", snapshot.name}, {"version", snapshot.version}});
  for (const std::string& folder : found.folders) json["folders"].push_back(folder);
  return json;
}

void print_text(const StoreInfo& info, const Level& found) {
  std::printf("%14s %10s %9s  %s\n", "bytes", "chunks of", "version", "key");
  for (const std::string& folder : found.folders)
    std::printf("%14s %10s %9s  %s\n", "", "", "", printable(folder).c_str());
  for (const ObjectInfo& object : found.objects) {
    std::printf("%14llu %10s %9llu  %s\n", static_cast<unsigned long long>(object.bytes),
                human_bytes(object.chunk_bytes).c_str(),
                static_cast<unsigned long long>(object.version), printable(object.key).c_str());
  }
  for (const SnapshotInfo& snapshot : info.snapshots) {
    std::printf("snapshot '%s' of version %llu\n", printable(snapshot.name).c_str(),
                static_cast<unsigned long long>(snapshot.version));
  }
  std::printf("%zu objects; version %llu; %s of %s used\n", found.objects.size(),
              static_cast<unsigned long long>(info.committed), human_bytes(info.used_bytes).c_str(),
              human_bytes(info.capacity_bytes).c_str());
}

Status run(const LsArguments& arguments) {
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make());
  StoreOptions options;
  options.read_only = true;
  options.holder = "stoker ls";
  STOKER_ASSIGN(const auto store, open_store(arguments.store, runtime->runtime(), options));
  Level found;
  if (arguments.folders) {
    STOKER_ASSIGN(found, store->list_level(arguments.prefix, arguments.snapshot));
  } else {
    STOKER_ASSIGN(found.objects, store->list(arguments.prefix, arguments.snapshot));
  }
  const StoreInfo info = store->info();
  const auto run = arguments.prefix.empty() && !arguments.folders
                       ? run_summary(*store, arguments.snapshot)
                       : std::nullopt;
  if (arguments.json) {
    nlohmann::json json = json_of(info, found);
    if (run) add_run(json, *run, last_written(files_of(arguments.store)));
    std::printf("%s\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } else {
    if (run) print_run(*run, info, last_written(files_of(arguments.store)));
    print_text(info, found);
  }
  return {};
}

}  // namespace

void add_ls(CLI::App& app, ExitStatus& status) {
  const auto arguments = std::make_shared<LsArguments>();
  CLI::App* command = app.add_subcommand("ls", "List the objects and snapshots of a store");
  command
      ->add_option("STORE", arguments->store,
                   "The store: a folder, local:/a,/b for several volumes, coded(6+3, /disk{0..8}), "
                   "dir:/folder of plain files, or s3://bucket/prefix")
      ->required();
  command->add_option("PREFIX", arguments->prefix, "Only keys that start with this");
  command->add_option("--snapshot", arguments->snapshot,
                      "List this snapshot instead of the current version");
  command->add_flag("--folders", arguments->folders,
                    "Show only what stands directly below PREFIX: objects, and folders, which end "
                    "with '/'. Of a folder or a bucket nothing more is asked for");
  command->add_flag("--json", arguments->json, "Print the result as JSON");
  command->footer(
      "Of a training run, a summary comes first: the model, its newest step (or that of the "
      "snapshot), when\n"
      "the store was last written, its size, and each parameter. Objects follow: w/UNIT holds the "
      "weights of a\n"
      "unit of parameters, r/, m/ and v/ the rest of its state. With PREFIX there are objects "
      "only.\n"
      "Exit status: 0 listed, 1 it failed.");
  command->callback([arguments, &status] {
    if (const Status done = run(*arguments); !done) tell(status, done.error());
  });
}

}  // namespace stoker::cli
