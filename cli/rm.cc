// stoker rm STORE KEY...: removes objects.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "command.h"
#include "stoker/store/runtime.h"

namespace stoker::cli {
namespace {

struct RmArguments {
  std::string store;
  std::vector<std::string> keys;
};

Status run(RmArguments& arguments) {
  // A key may be named twice.
  std::sort(arguments.keys.begin(), arguments.keys.end());
  arguments.keys.erase(std::unique(arguments.keys.begin(), arguments.keys.end()),
                       arguments.keys.end());
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make());
  StoreOptions options;
  options.holder = "stoker rm";
  STOKER_ASSIGN(const auto store, open_store(arguments.store, runtime->runtime(), options));
  return store->remove(arguments.keys);
}

}  // namespace

void add_rm(CLI::App& app, ExitStatus& status) {
  const auto arguments = std::make_shared<RmArguments>();
  CLI::App* command = app.add_subcommand("rm",
                                         "Remove objects from a store: all of them or none, but in "
                                         "a folder or a bucket (dir:, s3:) each by itself");
  command
      ->add_option("STORE", arguments->store,
                   "The store: a folder, local:/a,/b for several volumes, coded(6+3, /disk{0..8}), "
                   "dir:/folder of plain files, or s3://bucket/prefix")
      ->required();
  command->add_option("KEY", arguments->keys, "The objects; snapshots that have them keep them")
      ->required();
  command->callback([arguments, &status] {
    if (const Status done = run(*arguments); !done) tell(status, done.error());
  });
}

}  // namespace stoker::cli
