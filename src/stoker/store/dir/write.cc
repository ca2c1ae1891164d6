// DirStore: an object is written to a temporary file beside its place, flushed, and renamed.
// docs/stores/dir.md numbers the steps.
#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/base/check.h"
#include "stoker/base/log.h"
#include "stoker/store/chunk_size.h"
#include "stoker/store/dir/dir_store.h"
#include "stoker/store/dir/transfer.h"

namespace stoker::dir {
namespace {

constexpr int kNameTries = 16;
// Files without a name whose space is given back later: from so many bytes on, and so many at once.
constexpr off_t kFreeLaterBytes = 1 * kMiB;
constexpr size_t kFreeLaterMax = 4;

using Kind = DirStep::Kind;

constexpr OneObjectStore kStore = {"a dir: store"};

int zero(int file, uint64_t begin, uint64_t end) {
  const int done = fallocate(file, FALLOC_FL_ZERO_RANGE, static_cast<off_t>(begin),
                             static_cast<off_t>(end - begin));
  if (done == 0 || errno != EOPNOTSUPP) return done;  // without extents, ext4 has none
  const std::vector<std::byte> zeros(kMiB);
  for (ssize_t put = 0; begin < end; begin += static_cast<uint64_t>(put)) {
    put = pwrite(file, zeros.data(), std::min<uint64_t>(zeros.size(), end - begin),
                 static_cast<off_t>(begin));
    if (put <= 0) return -1;
  }
  return 0;
}

bool no_such_flag(int error) { return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP; }

}  // namespace

Staged::Staged() : OneObject(kStore) {}

Result<std::unique_ptr<Transaction>> DirStore::begin() {
  if (read_only_) return read_only_error();
  return std::unique_ptr<Transaction>(std::make_unique<DirTransaction>(*this));
}

void DirStore::step(const DirStep& done) const {
  if (options_.steps) options_.steps(done);
}

Status DirStore::resize(Staged& staged, std::string_view key, uint64_t bytes,
                        uint32_t chunk_bytes) {
  MutexLock lock(staged.mutex);
  STOKER_TRY(check_key(key));
  STOKER_TRY(staged.check_open(key));
  if (chunk_bytes != 0) STOKER_TRY(check_chunk_bytes(chunk_bytes));
  if (bytes > static_cast<uint64_t>(INT64_MAX))
    return fail(Code::invalid_argument, "'{}' would have {} bytes, but a file has at most 8 EiB",
                key, bytes);
  if (staged.pending > 0)
    return fail(Code::busy, "'{}' is being written: wait for that before its size changes", key);
  staged.key = key;
  Status begun = begin_object(staged, bytes);
  if (!begun) drop_temporary(staged);
  return begun;
}

Status DirStore::begin_object(Staged& staged, uint64_t bytes) {
  const bool again = static_cast<bool>(staged.file);
  if (!again) STOKER_TRY(make_temporary(staged, bytes));
  if (again) staged.written.reset();
  const auto size = static_cast<off_t>(staged.written ? bytes : 0);
  int error = ftruncate(staged.file.get(), size) == 0 ? 0 : errno;
  step({.kind = Kind::resize, .path = staged.path(), .offset = static_cast<uint64_t>(size)});
  const auto reserve = [&] {
    return fallocate(staged.file.get(), 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  };
  if (error == 0 && bytes > 0) error = reserve();
  if (error == ENOSPC || error == EDQUOT) {  // what was freed meanwhile counts as well
    spares_.drop_all();
    remove_dead(spares_.folder());  // spares as well
    wait_for_freed();
    error = reserve();
  }
  if (error == EOPNOTSUPP)
    error = ftruncate(staged.file.get(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  if (error != 0)
    return fail(error, "cannot reserve {} for '{}' in '{}'", human_bytes(bytes), staged.key,
                root_.path());
  staged.bytes = bytes;
  staged.touched = true;
  staged.removed = false;
  return {};
}

// Steps 1 and 2. The lock tells others that we live: whoever gets it removes the file.
Status DirStore::make_temporary(Staged& staged, uint64_t bytes) {
  STOKER_CHECK(!staged.file && staged.direct < 0);
  staged.folder_path = split_key(staged.key).first;
  for (int attempt = 0; attempt < kNameTries; ++attempt) {
    STOKER_ASSIGN(staged.folder,
                  root_.make_folder(staged.folder_path, [this](const std::string& made) {
                    step({.kind = Kind::make_folder, .path = made});
                    step({.kind = Kind::sync_folder, .path = split_key(made).first});
                  }));
    struct stat there {};
    if (fstatat(staged.folder.get(), split_key(staged.key).second.c_str(), &there,
                AT_SYMLINK_NOFOLLOW) == 0 &&
        !S_ISREG(there.st_mode)) {
      return fail(Code::invalid_argument,
                  "'{}' in '{}' is {} already, so no object can have this name; take another",
                  staged.key, root_.path(), S_ISDIR(there.st_mode) ? "a folder" : "no plain file");
    }
    sweep(staged.folder, staged.folder_path);
    staged.name = make_own_name();
    Fd file(openat(staged.folder.get(), staged.name.c_str(),
                   O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (!file && (errno == EEXIST || errno == ENOENT))
      continue;  // ENOENT: the folder was empty, and somebody removed it
    if (!file)
      return fail(errno, "cannot make a file in '{}{}", root_.path(),
                  staged.folder_path.empty() ? "'" : "/" + staged.folder_path + "'");
    if (flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
      continue;  // who sweeps was quicker
    struct stat status {};
    if (fstat(file.get(), &status) == 0 && status.st_nlink == 0) continue;
    staged.file = std::move(file);
    step({.kind = Kind::create, .path = staged.path()});
    take_spare(staged, bytes);
    return {};
  }
  return fail(Code::busy, "no temporary file can be made for '{}' in '{}'; try later", staged.key,
              root_.path());
}

// It replaces the temporary file, and belongs to whom that belongs to: an old object may have been
// somebody else's.
void DirStore::take_spare(Staged& staged, uint64_t bytes) {
  auto spare = spares_.take(bytes);
  if (!spare) return;
  const int from = spare->file.get(), fresh = staged.file.get();
  struct stat old {
  }, made{};
  const bool fits = fstat(from, &old) == 0 && fstat(fresh, &made) == 0 &&
                    old.st_uid == made.st_uid && old.st_gid == made.st_gid &&
                    flistxattr(from, nullptr, 0) == flistxattr(fresh, nullptr, 0) &&
                    fchmod(from, made.st_mode & ALLPERMS) == 0;
  if (!fits || renameat(spares_.folder().get(), spare->name.c_str(), staged.folder.get(),
                        staged.name.c_str()) != 0) {
    unlinkat(spares_.folder().get(), spare->name.c_str(), 0);
    return;
  }
  staged.file = std::move(spare->file);
  staged.written.emplace();
  step({.kind = Kind::rename, .path = spare->name, .to = staged.path()});
}

// Temporary files whose writers are dead, once a folder.
void DirStore::sweep(const Fd& folder, const std::string& path) {
  {
    MutexLock lock(swept_mutex_);
    if (!swept_.insert(path).second) return;
  }
  remove_dead(folder);
}

void DirStore::remove_dead(const Fd& folder) const {
  const int again = openat(folder.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(again < 0 ? nullptr : fdopendir(again),
                                                    closedir);
  if (!entries) return;  // making a file there will say why
  while (const dirent* entry = readdir(entries.get())) {
    if (!is_own_name(entry->d_name)) continue;
    const Fd file(
        openat(folder.get(), entry->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!file || flock(file.get(), LOCK_EX | LOCK_NB) != 0) continue;
    if (unlinkat(folder.get(), entry->d_name, 0) == 0)
      log().info("removed '{}', which a writer that died left in '{}'", entry->d_name,
                 root_.path());
  }
}

Future<void> DirStore::write(const StagedPtr& staged, std::string_view key, uint64_t offset,
                             Slice from, Priority priority) {
  MutexLock lock(staged->mutex);
  const Status allowed = [&]() REQUIRES(staged->mutex) -> Status {
    STOKER_TRY(check_key(key));
    STOKER_TRY(staged->check_open(key));
    return staged->check_write(key, offset, from.size, [&]() -> Status {
      if (stat(key, {})) return {};
      return fail(Code::not_found, "there is no object '{}' in '{}'; resize() makes it", key,
                  root_.path());
    });
  }();
  if (!allowed) {
    staged->refuse(allowed.error());
    return allowed;
  }
  if (staged->direct < 0 && goes_direct(offset, from)) {
    const auto file = runtime_.loop.open(OpenFile{.path = path_of(staged->file.get())});
    if (file) staged->direct = file->id;
  }
  if (staged->written && from.size > 0) {
    uint64_t& end = (*staged->written)[offset];
    end = std::max(end, offset + from.size);
  }
  ++staged->pending;
  auto promise = std::make_shared<Promise<void>>();
  Future<void> future = promise->future();
  files_.run([this, staged, promise, direct = staged->direct, offset, from, priority] {
    const Status status = write_now(*staged, direct, offset, from, priority);
    promise->complete(status);  // before the commit's: whoever has that finds this done
    ended(staged, status);
  });
  return future;
}

Status DirStore::write_now(Staged& staged, FileId direct, uint64_t offset, Slice from,
                           Priority priority) {
  STOKER_CHECK(files_.here() && staged.file);
  const Status written =
      write_file(runtime_.loop, staged.file.get(), direct, offset, from, priority);
  if (!written)
    return written.error().with("writing '" + staged.key + "' in '" + root_.path() + "'");
  if (options_.steps)
    step({.kind = Kind::write,
          .path = staged.path(),
          .offset = offset,
          .bytes = {from.data, from.data + from.size}});
  return {};
}

void DirStore::ended(const StagedPtr& staged, const Status& status) {
  std::function<void()> then;
  {
    MutexLock lock(staged->mutex);
    then = staged->ended(status);
  }
  if (then) then();
}

Status DirStore::remove(Staged& staged, std::string_view key) {
  MutexLock lock(staged.mutex);
  STOKER_TRY(check_key(key));
  STOKER_TRY(staged.check_open(key));
  if (staged.removed || (!staged.touched && !stat(key, {})))
    return fail(Code::not_found, "there is no object '{}' in '{}'", key, root_.path());
  if (staged.pending > 0)
    return fail(Code::busy, "'{}' is being written: wait for that before it is removed", key);
  drop_temporary(staged);
  staged.key = key;
  staged.touched = staged.removed = true;
  return {};
}

Status DirStore::require(Staged& staged, std::string_view key, std::string_view tag) {
  MutexLock lock(staged.mutex);
  STOKER_TRY(check_key(key));
  STOKER_TRY(staged.check_open(key));
  staged.key = key;
  staged.required = std::string(tag);
  return {};
}

Future<Version> DirStore::commit(const StagedPtr& staged) {
  MutexLock lock(staged->mutex);
  if (const Status open = staged->finish(); !open) return open.error();
  auto promise = std::make_shared<Promise<Version>>();
  Future<Version> future = promise->future();
  staged->settle(files_, [this, staged, promise] { promise->complete(commit_now(*staged)); });
  return future;
}

void DirStore::abandon(const StagedPtr& staged) {
  MutexLock lock(staged->mutex);
  if (staged->done) return;
  staged->done = true;
  if (staged->file) staged->settle(files_, [this, staged] { drop_temporary(*staged); });
}

// Nothing else works on `staged` any more.
Result<Version> DirStore::commit_now(Staged& staged) {
  STOKER_CHECK(files_.here());  // it waits
  Status status = staged.failed ? Status(*staged.failed) : Status();
  if (status && (staged.touched || staged.required)) status = publish(staged);
  if (!status) {
    drop_temporary(staged);
    return status.error();
  }
  STOKER_CHECK(staged.direct < 0);
  // A child that was forked meanwhile has the file open, and the lock would be its as well.
  if (staged.file) flock(staged.file.get(), LOCK_UN);
  staged.file = Fd();
  return ++commits_;
}

// Steps 4 to 7.
Status DirStore::publish(Staged& staged) {
  STOKER_CHECK(!staged.key.empty() && !(staged.file && staged.removed));
  close_direct(staged);
  if (staged.file) {
    STOKER_TRY(clear_unwritten(staged));
    STOKER_TRY(stamp(staged.file, staged.key));
    // Of a spare of the same size fdatasync may leave out the time, which tells contents apart.
    if ((staged.written ? fsync(staged.file.get()) : fdatasync(staged.file.get())) != 0)
      return fail(errno, "cannot make '{}' in '{}' durable", staged.key, root_.path());
    step({.kind = Kind::sync_file, .path = staged.path()});
  }
  const std::string folder_path = split_key(staged.key).first;
  if (!staged.folder) {
    auto there = root_.open_at(folder_path, O_RDONLY | O_DIRECTORY);
    if (!there && there.error().code != Code::not_found) return there.error();
    if (there) staged.folder = std::move(*there);
  }
  const bool tagged = staged.required && !staged.required->empty();
  std::optional<Spare> spare;
  if (staged.removed && staged.folder)
    spare = spares_.hold(staged.folder, split_key(staged.key).second);
  Fd old = spare ? Fd() : hold_old(staged);
  {
    STOKER_ASSIGN(const Fd locked, lock(tagged));
    if (staged.required &&
        !(staged.file && staged.required->empty())) {  // else the rename itself looks
      const auto found = stat(staged.key, {});
      if (!found && found.error().code != Code::not_found) return found.error();
      STOKER_TRY(check_required(staged.key, *staged.required, found ? found->tag : std::string()));
    }
    if (staged.file) {
      STOKER_TRY(place(staged, split_key(staged.key).second));
      staged.name.clear();
    } else if (staged.removed) {
      STOKER_TRY(take_away(staged, spare));
    }
  }
  if (!staged.touched) return {};
  if (const Status synced = sync_folder(staged.folder.get(), folder_path); !synced) {
    if (spare) unlinkat(spares_.folder().get(), spare->name.c_str(), 0);
    return Error{Code::in_doubt, synced.error().sys_errno,
                 "'" + staged.key + "' in '" + root_.path() +
                     "' was changed, but a power cut may bring the old version back; look at it "
                     "before you commit it again"};
  }
  step({.kind = Kind::sync_folder, .path = folder_path});
  if (staged.removed) prune(folder_path);
  if (spare) old = spares_.add(std::move(*spare)).value_or(Fd());
  free_later(std::move(old));
  return {};
}

// The file that is to lose its name. While we have it open, taking the name costs no time; its
// space comes back when we let it go, which for large files takes as long as many writes.
Fd DirStore::hold_old(const Staged& staged) const {
  if (!staged.touched || !staged.folder) return Fd();
  const std::string name = split_key(staged.key).second;
  Fd old(openat(staged.folder.get(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  const bool large = old && fstat(old.get(), &status) == 0 && S_ISREG(status.st_mode) &&
                     status.st_size >= kFreeLaterBytes;
  return large ? std::move(old) : Fd();
}

// What nobody wrote is zeros, also where the file was another object's.
Status DirStore::clear_unwritten(Staged& staged) const {
  if (!staged.written) return {};
  uint64_t at = 0;
  const auto clear = [&](uint64_t end) -> Status {
    if (end <= at) return {};
    if (zero(staged.file.get(), at, end) != 0)
      return fail(errno, "cannot clear bytes {} to {} of '{}' in '{}'", at, end, staged.key,
                  root_.path());
    if (options_.steps)
      step({.kind = Kind::write,
            .path = staged.path(),
            .offset = at,
            .bytes = std::vector<std::byte>(end - at)});
    return {};
  };
  for (const auto& [begin, end] : *staged.written) {
    STOKER_TRY(clear(begin));
    at = std::max(at, end);
  }
  return clear(staged.bytes);
}

// Where as many wait already, this one is let go of now.
void DirStore::free_later(Fd old) {
  if (!old) return;
  if (freeing_.fetch_add(1) >= kFreeLaterMax) {
    --freeing_;
    return;
  }
  freer_.run([this, file = std::make_shared<Fd>(std::move(old))] {
    if (options_.frees) options_.frees();
    *file = Fd();
    STOKER_CHECK(freeing_.fetch_sub(1) > 0);
  });
}

void DirStore::wait_for_freed() {
  STOKER_CHECK(!freer_.here());
  const auto promise = std::make_shared<Promise<void>>();
  const Future<void> done = promise->future();
  freer_.run([promise] { promise->complete(Status()); });
  done.wait();
}

// Step 6.
Status DirStore::place(Staged& staged, const std::string& name) const {
  STOKER_CHECK(staged.folder && !staged.name.empty());
  const int folder = staged.folder.get();
  const bool absent = staged.required && staged.required->empty();
  DirStep renamed{.kind = Kind::rename, .path = staged.path(), .to = staged.key};
  int error = 0;
  if (!absent) {
    error = renameat(folder, staged.name.c_str(), folder, name.c_str()) == 0 ? 0 : errno;
  } else {
    error = !options_.no_replace ? EINVAL
            : renameat2(folder, staged.name.c_str(), folder, name.c_str(), RENAME_NOREPLACE) == 0
                ? 0
                : errno;
    if (no_such_flag(error)) {
      error = linkat(folder, staged.name.c_str(), folder, name.c_str(), 0) == 0 ? 0 : errno;
      if (error == 0) {
        step({.kind = Kind::link, .path = staged.path(), .to = staged.key});
        if (unlinkat(folder, staged.name.c_str(), 0) != 0)
          log().warn("cannot remove '{}' in '{}': the next writer does", staged.path(),
                     root_.path());
        renamed = {.kind = Kind::unlink, .path = staged.path()};
      }
    }
  }
  if (error == EEXIST && absent) return check_required(staged.key, kAbsent, "there");
  if (error == EISDIR || error == ENOTEMPTY || error == EEXIST) {
    return fail(Code::invalid_argument,
                "'{}' in '{}' is a folder already, so no object can have this name; take another",
                staged.key, root_.path());
  }
  if (error != 0)
    return fail(error, "cannot rename the new file of '{}' into place in '{}'", staged.key,
                root_.path());
  step(renamed);
  return {};
}

Status DirStore::take_away(const Staged& staged, const std::optional<Spare>& spare) const {
  STOKER_CHECK(staged.removed);
  const std::string name = split_key(staged.key).second;
  const int folder = staged.folder.get();
  DirStep gone{.kind = Kind::unlink, .path = staged.key};
  int error = staged.folder ? EXDEV : ENOENT;
  if (staged.folder && spare) {
    gone = {.kind = Kind::rename, .path = staged.key, .to = spare->name};
    const int spares = spares_.folder().get();
    error = renameat(folder, name.c_str(), spares, spare->name.c_str()) == 0 ? 0 : errno;
  }
  if (error != 0 && error != ENOENT) {  // or it cannot be a spare: the store's folder is full, say
    gone = {.kind = Kind::unlink, .path = staged.key};
    error = unlinkat(folder, name.c_str(), 0) == 0 ? 0 : errno;
  }
  if (error == ENOENT)
    return fail(
        Code::conflict,
        "'{}' in '{}' was removed by another program meanwhile; look again before you repeat this",
        staged.key, root_.path());
  if (error != 0) return fail(error, "cannot remove '{}' in '{}'", staged.key, root_.path());
  step(gone);
  return {};
}

void DirStore::close_direct(Staged& staged) const {
  if (staged.direct < 0) return;
  if (const Status closed = runtime_.loop.close(std::exchange(staged.direct, -1)); !closed)
    log().warn("{}", closed.error().message());
}

void DirStore::drop_temporary(Staged& staged) {
  close_direct(staged);
  if (staged.file && !staged.name.empty()) unlinkat(staged.folder.get(), staged.name.c_str(), 0);
  staged.file = Fd();
}

// Folders that became empty. Another writer who is about to use one makes it again.
void DirStore::prune(std::string folder) const {
  while (!folder.empty()) {
    const auto [above, name] = split_key(folder);
    const auto parent = root_.open_at(above, O_RDONLY | O_DIRECTORY);
    if (!parent || unlinkat(parent->get(), name.c_str(), AT_REMOVEDIR) != 0) return;
    folder = above;
  }
}

// Step 4: no two contents of one name have a tag in common, even where the file system gives inodes
// again at once and its clock is coarse.
Status DirStore::stamp(const Fd& file, const std::string& path) {
  const int64_t now = std::chrono::duration_cast<std::chrono::nanoseconds>(
                          std::chrono::system_clock::now().time_since_epoch())
                          .count();
  int64_t last = last_stamp_ns_;
  int64_t mine = 0;
  do {
    mine = std::max(now, last + 1);
  } while (!last_stamp_ns_.compare_exchange_weak(last, mine));
  const timespec time{.tv_sec = mine / 1'000'000'000, .tv_nsec = mine % 1'000'000'000};
  const timespec times[2] = {time, time};
  if (futimens(file.get(), times) == 0) return {};
  return fail(errno, "cannot set the time of '{}' in '{}'", path, root_.path());
}

// Among Stoker's writers: alone, or beside all others that are not alone.
Result<Fd> DirStore::lock(bool alone) const {
  STOKER_ASSIGN(Fd locked, root_.again());
  for (;;) {
    if (flock(locked.get(), alone ? LOCK_EX : LOCK_SH) == 0) return locked;
    if (errno != EINTR) break;
  }
  if (alone)
    return fail(errno,
                "the folder '{}' cannot be locked, and a commit that requires a tag needs the lock",
                root_.path());
  return locked;  // without locks nobody requires a tag
}

Result<Version> DirStore::copy(std::string_view from, std::string_view to) {
  if (read_only_) return read_only_error();
  if (from == to) return fail(Code::invalid_argument, "'{}' cannot be copied to itself", from);
  STOKER_TRY(stat(from, {}));
  STOKER_ASSIGN(const Fd source, root_.open_at(from, O_RDONLY | O_NONBLOCK));
  const auto staged = std::make_shared<Staged>();
  STOKER_TRY(resize(*staged, to, 0, 0));
  if (ioctl(staged->file.get(), FICLONE, source.get()) == 0) return commit(staged).wait();
  // A second name of the same file takes the place of the empty one. The source may be another
  // program's, and not durable yet.
  const std::string name = make_own_name();
  // Locked, it is not taken for a temporary file of a dead writer.
  if (flock(source.get(), LOCK_SH) == 0 && fdatasync(source.get()) == 0 &&
      linkat(AT_FDCWD, path_of(source.get()).c_str(), staged->folder.get(), name.c_str(),
             AT_SYMLINK_FOLLOW) == 0) {
    unlinkat(staged->folder.get(), staged->name.c_str(), 0);
    staged->name = name;
    return publish_link(*staged);
  }
  abandon(staged);
  return Store::copy(from, to);
}

// As commit_now() of what was written, but that the file's time stays.
Result<Version> DirStore::publish_link(Staged& staged) {
  const std::string name = split_key(staged.key).second;
  {
    const auto locked = lock(false);
    const Status placed = locked ? place(staged, name) : Status(locked.error());
    // Renaming over another name of the same file does nothing: the temporary name may still be
    // there.
    unlinkat(staged.folder.get(), staged.name.c_str(), 0);
    if (!placed) return placed.error();
  }
  STOKER_TRY(sync_folder(staged.folder.get(), staged.folder_path));
  return ++commits_;
}

}  // namespace stoker::dir
