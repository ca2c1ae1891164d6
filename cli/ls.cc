// stoker ls STORE [PREFIX]: the objects of a store and its snapshots.
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "command.h"
#include "stoker/base/bytes.h"
#include "stoker/store/runtime.h"

namespace stoker::cli {
namespace {

struct LsArguments {
  std::string store, prefix, snapshot;
  bool json = false;
};

void print_json(const StoreInfo& info, const std::vector<ObjectInfo>& objects) {
  nlohmann::json json = {{"store", info.composition},         {"committed_version", info.committed}, {"capacity_bytes", info.capacity_bytes},
                         {"used_bytes", info.used_bytes},     {"objects", nlohmann::json::array()},  {"snapshots", nlohmann::json::array()}};
  for (const ObjectInfo& object : objects) {
    json["objects"].push_back({{"key", object.key}, {"bytes", object.bytes}, {"chunk_bytes", object.chunk_bytes}, {"version", object.version}});
    if (object.expected) json["objects"].back()["class"] = kClasses[static_cast<size_t>(*object.expected)];
  }
  for (const SnapshotInfo& snapshot : info.snapshots) json["snapshots"].push_back({{"name", snapshot.name}, {"version", snapshot.version}});
  std::printf("%s\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

void print_text(const StoreInfo& info, const std::vector<ObjectInfo>& objects) {
  std::printf("%14s %10s %9s  %s\n", "bytes", "chunks of", "version", "key");
  for (const ObjectInfo& object : objects) {
    std::printf("%14llu %10s %9llu  %s\n", static_cast<unsigned long long>(object.bytes),
        human_bytes(object.chunk_bytes).c_str(), static_cast<unsigned long long>(object.version),
        printable(object.key).c_str());
  }
  for (const SnapshotInfo& snapshot : info.snapshots) {
    std::printf("snapshot '%s' of version %llu\n", printable(snapshot.name).c_str(),
                static_cast<unsigned long long>(snapshot.version));
  }
  std::printf("%zu objects; version %llu; %s of %s used\n", objects.size(), static_cast<unsigned long long>(info.committed), human_bytes(info.used_bytes).c_str(), human_bytes(info.capacity_bytes).c_str());
}

Status run(const LsArguments& arguments) {
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make());
  StoreOptions options;
  options.read_only = true;
  options.holder = "stoker ls";
  STOKER_ASSIGN(const auto store, open_store(arguments.store, runtime->runtime(), options));
  STOKER_ASSIGN(const auto objects, store->list(arguments.prefix, arguments.snapshot));
  if (arguments.json) {
    print_json(store->info(), objects);
  } else {
    print_text(store->info(), objects);
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
  command->add_option("--snapshot", arguments->snapshot, "List this snapshot instead of the current version");
  command->add_flag("--json", arguments->json, "Print the result as JSON");
  command->callback([arguments, &status] {
    if (const Status done = run(*arguments); !done) fail(status, done.error());
  });
}

}  // namespace stoker::cli
