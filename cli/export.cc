// stoker export STORE KEY FILE: takes objects out of a store into plain files.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "command.h"
#include "pieces.h"
#include "stoker/base/bytes.h"
#include "stoker/store/folder.h"
#include "stoker/store/runtime.h"

namespace stoker::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPieces = 8;  // in memory: one is written while the others are read

struct ExportArguments {
  std::string store, key, target, snapshot;
};

Error file_error(const std::string& path) { return fail(errno, "cannot write '{}'", path); }

Status write_all(int fd, const std::byte* data, size_t bytes, const std::string& path) {
  for (size_t moved = 0; moved < bytes;) {
    const ssize_t got = write(fd, data + moved, bytes - moved);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return file_error(path);
    moved += static_cast<size_t>(got);
  }
  return {};
}

// What the file is called that `path` names: where it is a link, what that leads to. Nothing but a
// plain file is ever replaced.
Result<std::string> file_named(const std::string& path) {
  STOKER_ASSIGN(const fs::file_status there, look_at(path));
  std::error_code error;
  const bool link = fs::is_symlink(fs::symlink_status(path, error));
  if (link && fs::is_regular_file(there)) {
    const fs::path real = fs::canonical(path, error);
    if (error) return fail(error.value(), "cannot follow the link '{}'", path);
    return real.string();
  }
  if (fs::is_regular_file(there) || (!fs::exists(there) && !link)) return path;
  return fail(
      Code::invalid_argument, "'{}{}; name another", path,
      link && !fs::exists(there) ? "' is a dangling link" : "' exists and is not a regular file");
}

// Its pieces were read one after the other: another writer may have replaced it meanwhile.
Status still_the_same(Store& store, const ObjectInfo& object, const std::string& snapshot) {
  const auto now = store.stat(object.key, snapshot);
  if (now && now->tag == object.tag) return {};
  return fail(Code::conflict,
              "'{}' was changed while it was exported; no file was written, export it again",
              object.key);
}

// A file of our own beside `path`, whatever else stands there: two of us may write one file at
// once.
int make_temporary(const std::string& path, std::string& name) {
  for (int tries = 0; tries < 16; ++tries) {
    std::random_device random;
    name = fs::path(path).replace_filename(".stoker-" + std::to_string(random()) + ".partial");
    const int fd = open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0 || errno != EEXIST) return fd;
  }
  return -1;
}

// Under a temporary name first: the file is there whole or not at all.
Status export_object(Store& store, const ObjectInfo& object, const std::string& snapshot,
                     const std::string& target) {
  STOKER_ASSIGN(const std::string path, file_named(target));
  std::string temporary;
  const int fd = make_temporary(path, temporary);
  if (fd < 0) return file_error(path);
  std::vector<AlignedBytes> memory;
  for (size_t i = 0; i < kPieces; ++i) memory.push_back(piece_memory(object.bytes));
  Status status = each_piece(
      store, object, {.snapshot = snapshot}, memory,
      [&](uint64_t, Slice piece) { return write_all(fd, piece.data, piece.size, path); });
  if (status) status = still_the_same(store, object, snapshot);
  if (status && fdatasync(fd) != 0) status = file_error(path);
  if (close(fd) != 0 && status) status = file_error(path);
  if (status && rename(temporary.c_str(), path.c_str()) != 0) status = file_error(path);
  if (!status) unlink(temporary.c_str());
  return status;
}

// A key becomes a path below `folder`; one that would lead out of it is refused.
Result<std::string> path_below(const fs::path& folder, const std::string& key) {
  const fs::path relative = fs::path(key).lexically_normal();
  if (relative.empty() || relative.is_absolute() || *relative.begin() == ".." || relative == "." ||
      key.find('\0') != std::string::npos || !relative.has_filename()) {
    return fail(Code::invalid_argument,
                "the key '{}' cannot be a file name in a folder; export it alone, into a file",
                key);
  }
  const fs::path path = folder / relative;
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  if (error) return fail(error.value(), "cannot make the folder '{}'", path.parent_path().string());
  return path.string();
}

// Each for itself: one that is lost keeps none back that can be read.
Status export_prefix(Store& store, const std::vector<ObjectInfo>& objects,
                     const ExportArguments& arguments) {
  size_t failed = 0;
  std::set<std::string> written;
  Code code = Code::io;  // of the last that failed
  for (const ObjectInfo& object : objects) {
    const auto path = path_below(arguments.target, object.key);
    Status done = path ? Status() : Status(path.error());
    if (done && !written.insert(*path).second) {  // "a//b" and "a/b", say
      done = fail(Code::already_exists,
                  "'{}' is the file of another object of this prefix already; export this one "
                  "alone, into another file",
                  *path);
    }
    if (done) done = export_object(store, object, arguments.snapshot, *path);
    if (done) continue;
    std::fprintf(stderr, "stoker: '%s': %s\n", printable(object.key).c_str(),
                 printable(done.error().message()).c_str());
    ++failed;
    code = done.error().code;
  }
  if (failed == 0) {
    std::fprintf(stderr, "%zu objects into '%s'\n", objects.size(),
                 printable(arguments.target).c_str());
    return {};
  }
  return fail(code,
              "{} of {} objects could not be exported, the others are in '{}'; see the error of "
              "each above",
              failed, objects.size(), arguments.target);
}

Status run(const ExportArguments& arguments) {
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make());
  StoreOptions options;
  options.read_only = true;
  options.holder = "stoker export";
  STOKER_ASSIGN(const auto store, open_store(arguments.store, runtime->runtime(), options));
  const auto single = store->stat(arguments.key, arguments.snapshot);
  if (single) {
    STOKER_TRY(export_object(*store, *single, arguments.snapshot, arguments.target));
    std::fprintf(stderr, "'%s': %s into '%s'\n", printable(arguments.key).c_str(),
                 human_bytes(single->bytes).c_str(), printable(arguments.target).c_str());
    return {};
  }
  STOKER_ASSIGN(const auto objects, store->list(arguments.key, arguments.snapshot));
  if (objects.empty()) return single.error();
  return export_prefix(*store, objects, arguments);
}

}  // namespace

void add_export(CLI::App& app, ExitStatus& status) {
  const auto arguments = std::make_shared<ExportArguments>();
  CLI::App* command = app.add_subcommand(
      "export", "Copy an object into a file, or all objects of a prefix into a folder");
  command
      ->add_option("STORE", arguments->store,
                   "The store: a folder, local:/a,/b for several volumes, coded(6+3, /disk{0..8}), "
                   "dir:/folder of plain files, or s3://bucket/prefix")
      ->required();
  command
      ->add_option("KEY", arguments->key,
                   "The object; where there is none of this key, the prefix of keys")
      ->required();
  command->add_option("TARGET", arguments->target, "The file, or for a prefix the folder")
      ->required()
      ->check(named());
  command->add_option("--snapshot", arguments->snapshot,
                      "From this snapshot instead of the current version");
  command->footer(
      "A file is there whole or not at all. Of a prefix, objects that cannot be read (more disks "
      "of a coded store are lost than it bears, say) are named\n"
      "and left out, and all others exported. Exit status: 0 everything is there, 1 something is "
      "not.");
  command->callback([arguments, &status] {
    if (const Status done = run(*arguments); !done) tell(status, done.error());
  });
}

}  // namespace stoker::cli
