// stoker create STORE: makes an empty store.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>

#include "command.h"
#include "stoker/base/bytes.h"
#include "stoker/store/blank.h"
#include "stoker/store/coded/coded_store.h"
#include "stoker/store/runtime.h"

namespace stoker::cli {
namespace {

struct CreateArguments {
  std::string store, capacity, chunk = "1MiB";
  uint64_t objects = 1 << 16;
  bool same_disk = false, overwrite = false;
};

// What a coded store takes of its disks, and what is not to be had with its code.
void tell(const std::string& name, const Store& store) {
  const std::string made = "made '" + name + "' for " + human_bytes(store.info().capacity_bytes);
  const auto* found = dynamic_cast<const coded::CodedStore*>(&store);
  if (found == nullptr) {
    std::fprintf(stderr, "%s\n", made.c_str());
    return;
  }
  const coded::Shape& shape = found->shape();
  std::fprintf(stderr, "%s: %s on each of %zu disks\n", made.c_str(),
               human_bytes(shape.file_bytes()).c_str(), shape.shards);
  if (shape.shards > 2 * shape.m) return;
  const size_t write = shape.shards - shape.shards / 2 - 1;
  const size_t read = shape.shards / 2;
  std::fprintf(
      stderr,
      "note: it can be written to and repaired with at most %zu of its %zu disks lost, and read "
      "with at most %zu, though its code would bear %zu: more than half must be there to know what "
      "was written last. With more data than parity, or more disks, there is no such limit\n",
      write, shape.shards, read, shape.m);
}

Status run(const CreateArguments& arguments) {
  STOKER_ASSIGN(const uint64_t capacity, parse_bytes(arguments.capacity));
  STOKER_ASSIGN(const uint64_t chunk, parse_bytes(arguments.chunk));
  if (capacity == 0)
    return fail(Code::invalid_argument, "a store of 0 bytes holds nothing; give --capacity");
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make());
  StoreOptions options;
  options.holder = "stoker create";
  options.read_only = true;
  const auto there = open_store(arguments.store, runtime->runtime(), options);
  if (there)
    return fail(
        Code::already_exists,
        "there is a store at '{}' already; name another place, or delete it with --overwrite",
        arguments.store);
  const bool other = there.error().code == Code::mismatch;
  if (there.error().code != Code::not_found && !(other && arguments.overwrite))
    return there.error();
  if (arguments.overwrite) {
    STOKER_ASSIGN(const auto devices, local_volumes(arguments.store));
    STOKER_TRY(make_blank(runtime->loop(), devices));
  }
  options.read_only = false;
  options.create = true;
  options.capacity_bytes = capacity;
  options.chunk_bytes = static_cast<uint32_t>(std::min<uint64_t>(chunk, UINT32_MAX));
  options.objects_max = arguments.objects;
  options.same_disk = arguments.same_disk;
  STOKER_ASSIGN(const auto store, open_store(arguments.store, runtime->runtime(), options));
  tell(arguments.store, *store);
  return {};
}

}  // namespace

void add_create(CLI::App& app, ExitStatus& status) {
  const auto arguments = std::make_shared<CreateArguments>();
  CLI::App* command = app.add_subcommand("create", "Make an empty store");
  command
      ->add_option("STORE", arguments->store,
                   "Where: a folder, local:/a,/b for several volumes, or coded(6+3, /disk{0..8}), "
                   "of which any 3 disks may be lost")
      ->required();
  command
      ->add_option(
          "--capacity", arguments->capacity,
          "How many bytes of objects it holds (100GiB, say); reserved on the disks at once")
      ->required();
  command->add_option("--chunk", arguments->chunk, "Chunk size of new objects, 64KiB to 8MiB")
      ->capture_default_str();
  command
      ->add_option("--objects", arguments->objects,
                   "How many objects it should have room for in its table")
      ->capture_default_str()
      ->check(whole(1, uint64_t{1} << 32));
  command->add_flag("--same-disk", arguments->same_disk,
                    "Disks of a coded store may be folders on one disk, although they are then "
                    "lost together: to try it out");
  command->add_flag("--overwrite", arguments->overwrite,
                    "Delete what the devices hold: a file system, a partition table, anything but "
                    "a store");
  command->footer(
      "Only what is missing, empty or wholly zero is made into a store. A coded store takes more "
      "of its disks than it holds, and says how much: parity, room where\n"
      "objects end within a stripe, checksums, logs, and tables for the objects. Exit status: 0 "
      "made, 1 not.");
  command->callback([arguments, &status] {
    if (const Status done = run(*arguments); !done) tell(status, done.error());
  });
}

}  // namespace stoker::cli
