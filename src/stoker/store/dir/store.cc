// DirStore: opening, telling and reading.
#include "stoker/store/dir/store.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "stoker/base/bytes.h"
#include "stoker/base/check.h"
#include "stoker/base/log.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/dir/dir_store.h"
#include "stoker/store/dir/transfer.h"
#include "stoker/store/folder.h"

namespace stoker::dir {
namespace {

constexpr uint32_t kSmallDepth = 64;  // reads of one call in flight

Error no_snapshot(std::string_view name) {
  return fail(Code::not_found, "there is no snapshot '{}': a folder of plain files has none", name);
}

Error no_object(std::string_view key, const std::string& root) {
  return fail(Code::not_found, "there is no object '{}' in '{}'", key, root);
}

Status check_inside(const std::string& key, uint64_t bytes, uint64_t offset, const Slice& into) {
  if (offset <= bytes && into.size <= bytes - offset) return {};
  return fail(Code::invalid_argument, "bytes {} to {} are beyond the end of '{}', which has {}",
              offset, offset + into.size, key, bytes);
}

ObjectInfo describe(std::string key, const struct stat& status) {
  ObjectInfo info;
  info.key = std::move(key);
  info.bytes = static_cast<uint64_t>(status.st_size);
  info.tag = tag_of(status);
  return info;
}

}  // namespace

std::string tag_of(const struct stat& status) {
  std::string nanoseconds = std::to_string(status.st_mtim.tv_nsec);
  nanoseconds.insert(0, 9 - nanoseconds.size(), '0');
  return std::to_string(status.st_ino) + "-" + std::to_string(status.st_size) + "-" +
         std::to_string(status.st_mtim.tv_sec) + "." + nanoseconds;
}

Result<std::unique_ptr<Store>> DirStore::open(const std::string& path, const Runtime& runtime,
                                              const StoreOptions& options, const DirOptions& dir) {
  if (options.create && !options.read_only) {
    if (const Status made = make_folder(path); !made)
      return made.error().with("the store 'dir:" + path + "'");
  }
  auto root = Beneath::open(path, dir.openat2);
  if (!root) return root.error().with("the store 'dir:" + path + "'");
  auto folder = root->again();
  if (!folder) return folder.error().with("the store 'dir:" + path + "'");
  return std::unique_ptr<Store>(
      new DirStore(std::move(*root), std::move(*folder), runtime, options, dir));
}

DirStore::DirStore(Beneath root, Fd folder, const Runtime& runtime, const StoreOptions& options,
                   const DirOptions& dir)
    : runtime_(runtime),
      read_only_(options.read_only),
      options_(dir),
      root_(std::move(root)),
      spares_(std::move(folder), dir.spare_bytes) {}

Result<ObjectInfo> DirStore::stat(std::string_view key, std::string_view snapshot) {
  if (!snapshot.empty()) return no_snapshot(snapshot);
  STOKER_TRY(check_key(key));
  STOKER_ASSIGN(const Fd file, root_.open_at(key, O_PATH));
  struct stat status {};
  if (fstat(file.get(), &status) != 0)
    return fail(errno, "cannot look at '{}' in '{}'", key, root_.path());
  if (!S_ISREG(status.st_mode)) return no_object(key, root_.path());
  return describe(std::string(key), status);
}

// Of all objects whose keys begin with `prefix`.
struct DirStore::Walk {
  std::string_view prefix;
  std::vector<ObjectInfo> found = {};
  std::vector<std::string>* folders = nullptr;  // where given, folders go here unless empty, and
                                                // nothing below them is told of
  bool first_only = false;                      // ends with the first object
};

// The folder in which all that begins with `prefix` lies. not_found: there is none.
Result<Fd> DirStore::open_prefix(std::string_view prefix) const {
  const std::string path = split_key(prefix).first;
  if (!path.empty()) STOKER_TRY(check_key(path));
  return root_.open_at(path, O_RDONLY | O_DIRECTORY);
}

Result<std::vector<ObjectInfo>> DirStore::list(std::string_view prefix, std::string_view snapshot) {
  if (!snapshot.empty()) return no_snapshot(snapshot);
  const auto folder = open_prefix(prefix);
  if (!folder && folder.error().code == Code::not_found) return std::vector<ObjectInfo>();
  if (!folder) return folder.error();
  Walk all{.prefix = prefix};
  STOKER_TRY(walk(*folder, split_key(prefix).first, all));
  std::sort(all.found.begin(), all.found.end(),
            [](const ObjectInfo& a, const ObjectInfo& b) { return a.key < b.key; });
  return std::move(all.found);
}

Result<Level> DirStore::list_level(std::string_view prefix, std::string_view snapshot) {
  if (!snapshot.empty()) return no_snapshot(snapshot);
  const auto folder = open_prefix(prefix);
  if (!folder && folder.error().code == Code::not_found) return Level();
  if (!folder) return folder.error();
  Level level;
  Walk here{.prefix = prefix, .folders = &level.folders};
  STOKER_TRY(walk(*folder, split_key(prefix).first, here));
  level.objects = std::move(here.found);
  std::sort(level.objects.begin(), level.objects.end(),
            [](const ObjectInfo& a, const ObjectInfo& b) { return a.key < b.key; });
  std::sort(level.folders.begin(), level.folders.end());
  return level;
}

Status DirStore::walk(const Fd& folder, const std::string& path, Walk& all) const {
  const int again = openat(folder.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(again < 0 ? nullptr : fdopendir(again),
                                                    closedir);
  if (!entries) return fail(errno, "cannot read the folder '{}' in '{}'", path, root_.path());
  while (!all.first_only || all.found.empty()) {
    errno = 0;
    const dirent* entry = readdir(entries.get());
    if (entry == nullptr) break;
    const std::string name = entry->d_name;
    if (name == "." || name == ".." || is_own_name(name)) continue;
    std::string key = path;
    if (!key.empty()) key += '/';
    key += name;
    const size_t common = std::min(key.size(), all.prefix.size());
    if (std::string_view(key).substr(0, common) != all.prefix.substr(0, common)) continue;
    struct stat status {};
    if (fstatat(folder.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) continue;  // removed meanwhile
      return fail(errno, "cannot look at '{}' in '{}'", key, root_.path());
    }
    if (S_ISREG(status.st_mode) && key.size() >= all.prefix.size())
      all.found.push_back(describe(key, status));
    if (!S_ISDIR(status.st_mode)) continue;
    const Fd below(
        openat(folder.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!below && (errno == ENOENT || errno == ELOOP || errno == ENOTDIR)) continue;
    if (!below) return fail(errno, "cannot read the folder '{}' in '{}'", key, root_.path());
    if (all.folders == nullptr) {
      STOKER_TRY(walk(below, key, all));
      errno = 0;
      continue;
    }
    Walk any{.prefix = all.prefix, .first_only = true};
    STOKER_TRY(walk(below, key, any));
    if (!any.found.empty()) all.folders->push_back(key + "/");
    errno = 0;
  }
  return errno == 0 ? Status()
                    : fail(errno, "cannot read the folder '{}' in '{}'", path, root_.path());
}

Future<void> DirStore::read(std::string_view key, uint64_t offset, Slice into,
                            ReadOptions options) {
  if (!options.snapshot.empty()) return no_snapshot(options.snapshot);
  if (const Status valid = check_key(key); !valid) return valid.error();
  auto promise = std::make_shared<Promise<void>>();
  Future<void> future = promise->future();
  const auto job = [this, promise, name = std::string(key), offset, into, options] {
    promise->complete(read_now(name, offset, into, options));
  };
  if (may_wait(options.priority))
    files_.run_later(job);
  else
    files_.run(job);
  return future;
}

// Pieces that direct I/O takes are reads of their own; the others of an object share one opening.
Future<void> DirStore::read_many(std::span<const std::string> keys, std::span<const Piece> pieces,
                                 Slice into, ReadOptions options) {
  if (!options.snapshot.empty()) return no_snapshot(options.snapshot);
  if (const Status valid = check_pieces(keys.size(), pieces, into.size); !valid)
    return valid.error();
  for (const Piece& piece : pieces) {
    if (const Status valid = check_key(keys[piece.object]); !valid) return valid.error();
  }
  if (pieces.empty()) return Status();
  const auto rest = std::make_shared<Countdown>(pieces.size());
  Future<void> all = rest->future();
  std::map<std::string, std::vector<Small>> small;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const Slice place = into.sub(piece.into, piece.bytes);
    if (!goes_direct(piece.offset, place)) {
      small[keys[piece.object]].push_back({i, piece.offset, place});
      continue;
    }
    read(keys[piece.object], piece.offset, place, options).on_done([rest, i](const Status& status) {
      rest->done(i, status);
    });
  }
  if (small.empty()) return all;
  files_.run([this, rest, small = std::move(small)] { read_small(small, *rest); });
  return all;
}

void DirStore::read_small(const std::map<std::string, std::vector<Small>>& by_key,
                          Countdown& rest) {
  STOKER_CHECK(files_.here());
  std::vector<Fd> files;  // stay open until all is read
  std::vector<BufferedRead> reads;
  std::vector<std::pair<size_t, const std::string*>> of;  // piece and key of each read
  for (const auto& [key, pieces] : by_key) {
    uint64_t bytes = 0;
    auto file = open_object(key, &bytes);
    for (const Small& piece : pieces) {
      if (!file) {
        rest.done(piece.piece, file.error());
      } else if (const Status inside = check_inside(key, bytes, piece.offset, piece.into);
                 !inside) {
        rest.done(piece.piece, inside);
      } else {
        reads.push_back({file->get(), piece.offset, piece.into});
        of.emplace_back(piece.piece, &key);
      }
    }
    if (file) files.push_back(std::move(*file));
  }
  auto reader = take_reader();
  reader->run(reads);
  {
    MutexLock lock(readers_mutex_);
    readers_.push_back(std::move(reader));
  }
  STOKER_CHECK(of.size() == reads.size());
  for (size_t i = 0; i < reads.size(); ++i) {
    const auto& [piece, key] = of[i];
    const Status status = outcome_of(reads[i]);
    rest.done(piece, status ? status
                            : Status(status.error().with("reading '" + *key + "' in '" +
                                                         root_.path() + "'")));
  }
}

std::unique_ptr<BufferedReader> DirStore::take_reader() {
  {
    MutexLock lock(readers_mutex_);
    if (!readers_.empty()) {
      auto reader = std::move(readers_.back());
      readers_.pop_back();
      return reader;
    }
  }
  return std::make_unique<BufferedReader>(kSmallDepth);
}

// The file of an object, which has so many bytes.
Result<Fd> DirStore::open_object(const std::string& key, uint64_t* bytes) const {
  STOKER_ASSIGN(Fd file,
                root_.open_at(key, O_RDONLY | O_NONBLOCK));  // or opening a pipe would hang
  struct stat status {};
  if (fstat(file.get(), &status) != 0)
    return fail(errno, "cannot look at '{}' in '{}'", key, root_.path());
  if (!S_ISREG(status.st_mode)) return no_object(key, root_.path());
  *bytes = static_cast<uint64_t>(status.st_size);
  return file;
}

Status DirStore::read_now(const std::string& key, uint64_t offset, Slice into,
                          const ReadOptions& options) const {
  STOKER_CHECK(files_.here());
  uint64_t bytes = 0;
  STOKER_ASSIGN(const Fd file, open_object(key, &bytes));
  STOKER_TRY(check_inside(key, bytes, offset, into));
  const Status done = read_file(runtime_.loop, file.get(), offset, into, options.priority);
  return done ? done : Status(done.error().with("reading '" + key + "' in '" + root_.path() + "'"));
}

Future<void> DirStore::snapshot(std::string_view) {
  if (read_only_) return read_only_error();
  return fail(Code::unsupported, "a folder of plain files has no snapshots; use local: for them");
}

Future<void> DirStore::drop(std::string_view name, Durability) { return no_snapshot(name); }

Error DirStore::read_only_error() const {
  return fail(Code::read_only, "the store 'dir:{}' was opened read-only; open it for writing",
              root_.path());
}

void DirStore::keep_space(uint64_t bytes) {
  if (read_only_) return;
  if (bytes > 0) sweep(spares_.folder(), {});  // those of the dead
  spares_.keep(bytes);
}

StoreInfo DirStore::info() const {
  StoreInfo info;
  info.composition = "dir:" + root_.path();
  info.committed = info.durable = commits_;
  if (read_only_) info.read_only = "it was opened read-only";
  return info;
}

}  // namespace stoker::dir

namespace stoker {

Result<std::unique_ptr<Store>> open_dir_store(const std::string& path, const Runtime& runtime,
                                              const StoreOptions& options, const DirOptions& dir) {
  return dir::DirStore::open(path, runtime, options, dir);
}

}  // namespace stoker
