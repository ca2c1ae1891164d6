// stoker put STORE KEY SOURCE: copies a file, or all files of a folder, into a store.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "command.h"
#include "pieces.h"
#include "stoker/base/bytes.h"
#include "stoker/store/chunk_size.h"
#include "stoker/store/coded/store.h"
#include "stoker/store/runtime.h"

namespace stoker::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kCommitBytes = 64 * kMiB;   // in one transaction
constexpr size_t kCodedCommitBytes = kGiB;   // likewise, to a coded store
constexpr size_t kStripeNames = 256 * kKiB;  // bytes of a log record, that a store has at least

// Of what does not fit one transaction. A coded store needs no memory for stripes that are written
// whole, and its disks stand still while a commit ends. But it has to name the stripes, and has to
// have room for them beside those that they take the place of. Steps of whole stripes: none is
// written in two parts.
Result<size_t> step_bytes(const std::string& name, const Store& store) {
  STOKER_ASSIGN(const auto plan, coded_plan(name));
  if (!plan) return kCommitBytes;
  const StoreInfo info = store.info();
  const uint64_t free = info.capacity_bytes - std::min(info.capacity_bytes, info.used_bytes);
  const uint64_t named = kStripeNames / (16 + 4 * (plan->k + plan->m)) * plan->k * kChunkMin;
  const uint64_t most = std::min<uint64_t>({kCodedCommitBytes, free / 2, named});
  const size_t largest = plan->k * size_t{kChunkMax};
  const size_t stripe = largest <= kCommitBytes ? largest : plan->k * kMiB;
  return std::max<size_t>(1, std::max<uint64_t>(kCommitBytes, most) / stripe) * stripe;
}

struct PutArguments {
  std::string store, key, source;
  std::optional<uint64_t> at;
  std::string expected;  // of kClasses; empty: the store finds out itself
};

Error file_error(const std::string& path) { return fail(errno, "cannot read '{}'", path); }

struct File {
  explicit File(const std::string& name)
      : path(name), fd(open(name.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~File() {
    if (fd >= 0) close(fd);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  // Fewer bytes than asked for: the file ends.
  Result<size_t> read(std::byte* into, size_t bytes) const {
    size_t moved = 0;
    while (moved < bytes) {
      const ssize_t got = ::read(fd, into + moved, bytes - moved);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return file_error(path);
      if (got == 0) break;
      moved += static_cast<size_t>(got);
    }
    return moved;
  }
  // As far as is known beforehand: 0 of what is no regular file.
  uint64_t bytes() const {
    struct stat status {};
    return fstat(fd, &status) == 0 && S_ISREG(status.st_mode)
               ? static_cast<uint64_t>(status.st_size)
               : 0;
  }
  const std::string path;
  const int fd;
};

// Sets where an object begins to be new, and how long it is so far. Of a new one the store is told
// how long it is to be: its class goes by that, too.
Status begin_object(Store& store, Transaction& change, const std::string& key, const File& file,
                    const PutArguments& arguments) {
  if (arguments.at) {
    const auto old = store.stat(key);
    if (!old) return old.error().with("--at changes a part of an object");
  } else {
    if (!store.stat(key)) STOKER_TRY(change.resize(key, file.bytes()));
    STOKER_TRY(change.resize(key, 0));
  }
  const auto expected = class_of(arguments.expected);
  return expected ? change.expect(key, *expected) : Status();
}

Status write_piece(Transaction& change, const std::string& key, uint64_t offset, uint64_t& size,
                   Slice piece) {
  if (offset + piece.size > size) {
    size = offset + piece.size;
    STOKER_TRY(change.resize(key, size));
  }
  return change.write(key, offset, piece).wait();
}

// In a store that begins objects anew: whole, in one transaction.
Result<uint64_t> put_whole(Store& store, const std::string& key, const File& file) {
  const uint64_t size = file.bytes();
  const AlignedBytes piece = piece_memory(file.bytes());
  STOKER_ASSIGN(const auto change, store.begin());
  STOKER_TRY(change->resize(key, size));
  uint64_t total = 0;
  for (;;) {
    STOKER_ASSIGN(const size_t bytes, file.read(piece.data(), kPieceBytes));
    if (total + bytes > size) break;
    if (bytes > 0) STOKER_TRY(change->write(key, total, piece.slice().sub(0, bytes)).wait());
    total += bytes;
    if (bytes < kPieceBytes) break;
  }
  if (total != size)
    return fail(Code::invalid_argument,
                "'{}' is not a regular file, or its size changed while it was read, and this store "
                "must know the size first; copy it to a file, then put that",
                file.path);
  if (const auto done = change->commit(Durability::durable).wait(); !done) return done.error();
  return total;
}

Result<uint64_t> put_file(Store& store, const std::string& key, const std::string& path,
                          const PutArguments& arguments) {
  const std::optional<uint64_t>& at = arguments.at;
  const File file(path);
  if (file.fd < 0) return file_error(path);
  if (!store.features().update) {
    if (!at) return put_whole(store, key, file);
    return fail(Code::unsupported,
                "--at changes part of an object, but this store writes whole objects only; leave "
                "out --at, or use a local or a coded store");
  }
  const AlignedBytes piece = piece_memory(file.bytes());
  STOKER_ASSIGN(auto change, store.begin());
  STOKER_TRY(begin_object(store, *change, key, file, arguments));
  const auto old = at ? store.stat(key) : Result<ObjectInfo>(ObjectInfo{});
  uint64_t size = old ? old->bytes : 0;
  uint64_t offset = at.value_or(0);
  if (offset > size)
    return fail(Code::invalid_argument,
                "'{}' has {} bytes, so nothing can be put at {}; give --at {} or less", key, size,
                offset, size);
  STOKER_ASSIGN(const size_t in_steps, step_bytes(arguments.store, store));
  const size_t step = file.bytes() > kCommitBytes ? in_steps : kCommitBytes;
  uint64_t total = 0;
  for (size_t staged = 0;;) {
    STOKER_ASSIGN(const size_t bytes, file.read(piece.data(), kPieceBytes));
    if (bytes > 0)
      STOKER_TRY(write_piece(*change, key, offset + total, size, piece.slice().sub(0, bytes)));
    total += bytes;
    staged += bytes;
    const bool ends = bytes < kPieceBytes;
    if (!ends && staged < step) continue;
    if (const auto done = change->commit(Durability::durable).wait(); !done) return done.error();
    if (ends) return total;
    staged = 0;
    STOKER_ASSIGN(change, store.begin());
  }
}

// The files of a folder, with the keys that they get. Says how many entries are neither files nor
// folders: pipes, devices, links that lead nowhere, and linked folders, which are not followed.
Result<std::vector<std::pair<std::string, std::string>>> files_of(const fs::path& folder,
                                                                  const std::string& prefix) {
  std::vector<std::pair<std::string, std::string>> files;
  std::error_code error;
  size_t left_out = 0;
  for (auto at = fs::recursive_directory_iterator(folder, error);
       !error && at != fs::recursive_directory_iterator(); at.increment(error)) {
    std::error_code unknown;
    if (!at->is_regular_file(unknown)) {
      left_out += at->is_directory(unknown) && !at->is_symlink(unknown) ? 0 : 1;
      continue;
    }
    files.emplace_back(prefix + at->path().lexically_relative(folder).string(),
                       at->path().string());
  }
  if (error) return fail(error.value(), "cannot list the folder '{}'", folder.string());
  if (left_out > 0) std::fprintf(stderr, "left out %zu entries that are not files\n", left_out);
  std::sort(files.begin(), files.end());
  return files;
}

Status run(const PutArguments& arguments) {
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make());
  StoreOptions options;
  options.holder = "stoker put";
  STOKER_ASSIGN(const auto store, open_store(arguments.store, runtime->runtime(), options));
  std::error_code error;
  if (!fs::is_directory(arguments.source, error)) {
    STOKER_ASSIGN(const uint64_t bytes,
                  put_file(*store, arguments.key, arguments.source, arguments));
    std::fprintf(stderr, "'%s': %s from '%s'\n", printable(arguments.key).c_str(),
                 human_bytes(bytes).c_str(), printable(arguments.source).c_str());
    return {};
  }
  if (arguments.at)
    return fail(Code::invalid_argument, "--at takes one file, but '{}' is a folder; name a file",
                arguments.source);
  STOKER_ASSIGN(const auto files, files_of(arguments.source, arguments.key));
  uint64_t bytes = 0;
  for (const auto& [key, path] : files) {
    STOKER_ASSIGN(const uint64_t more, put_file(*store, key, path, arguments));
    bytes += more;
  }
  std::fprintf(stderr, "%zu objects, %s, from '%s'\n", files.size(), human_bytes(bytes).c_str(),
               printable(arguments.source).c_str());
  return {};
}

}  // namespace

void add_put(CLI::App& app, ExitStatus& status) {
  const auto arguments = std::make_shared<PutArguments>();
  CLI::App* command = app.add_subcommand(
      "put",
      "Copy a file into a store as an object, or all files of a folder as objects of a prefix");
  command
      ->add_option("STORE", arguments->store,
                   "The store: a folder, local:/a,/b for several volumes, coded(6+3, /disk{0..8}), "
                   "dir:/folder of plain files, or s3://bucket/prefix; `stoker create` makes one")
      ->required();
  command
      ->add_option(
          "KEY", arguments->key,
          "The object; of a folder, what the keys begin with: photos/ makes photos/a.jpg of a.jpg")
      ->required();
  command
      ->add_option("SOURCE", arguments->source, "The file, or the folder with all that is below it")
      ->required();
  command
      ->add_option(
          "--at", arguments->at,
          "Change the object from this byte on by what is in the file, and leave the rest as it is")
      ->check(whole(0, uint64_t{1} << 62));
  command
      ->add_option("--class", arguments->expected,
                   "What the objects are for: read_only (a data set), write_only (a checkpoint) or "
                   "read_write (what is rewritten). A coded store works by it, and finds out "
                   "itself what nobody says; being wrong costs speed only")
      ->check(CLI::IsMember(std::vector<std::string>(kClasses.begin(), kClasses.end())));
  command->footer(
      "An object that is there already is replaced. Up to 64 MiB that is one transaction: after a "
      "crash the old object is there or the new one. What is larger\n"
      "goes in steps of 64 MiB, or up to 1 GiB in a coded store. A crash leaves a beginning of it. "
      "`stoker export` is the way back. Exit status: 0 all is durable, 1 something failed.");
  command->callback([arguments, &status] {
    if (const Status done = run(*arguments); !done) tell(status, done.error());
  });
}

}  // namespace stoker::cli
