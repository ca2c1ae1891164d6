#include "stoker/store/local/volume.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/log.h"
#include "stoker/io/nvme/command.h"
#include "stoker/store/blank.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/chunk_size.h"
#include "stoker/store/folder.h"
#include "stoker/store/writer_lock.h"

namespace stoker::local {
namespace {

constexpr const char* kFileName = "stoker.volume";

// The file or device behind what the user named; makes the folder of a store that is to be made.
Result<std::string> resolve(const std::string& path, const StoreOptions& options) {
  if (path.empty())
    return fail(Code::invalid_argument,
                "a volume of the store has an empty path; give each a path");
  STOKER_ASSIGN(const auto status, look_at(path));
  if (std::filesystem::is_directory(status)) return path + "/" + kFileName;
  if (std::filesystem::exists(status)) return path;
  if (!options.create || options.read_only)
    return fail(ENOENT,
                "there is no store at '{}'; check the path, or make one with `stoker create`",
                path);
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return fail(error.value(), "cannot make the folder '{}' for the store", path);
  return path + "/" + kFileName;
}

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte byte) { return byte == std::byte{0}; });
}

}  // namespace

VolumeSet::~VolumeSet() {
  for (Volume& volume : volumes_) close_store_file(*loop_, volume);
}

Result<VolumeSet> VolumeSet::open(const std::vector<std::string>& paths, Loop& loop,
                                  const StoreOptions& options, const LocalOptions& local) {
  if (paths.empty() || paths.size() > kVolumesMax)
    return fail(Code::invalid_argument, "a local store has 1 to {} volumes, not {}", kVolumesMax,
                paths.size());
  if (options.create) STOKER_TRY(check_chunk_bytes(options.chunk_bytes));
  const auto& weights = options.volume_weights;
  if (!weights.empty() && (weights.size() != paths.size() ||
                           !std::all_of(weights.begin(), weights.end(), [](double weight) {
                             return std::isfinite(weight) && weight > 0;
                           }))) {
    return fail(Code::invalid_argument,
                "the store has {} volumes and takes one weight for each, a finite number above 0; "
                "{} weights "
                "were given",
                paths.size(), weights.size());
  }
  const Geometry geometry{options.capacity_bytes, options.objects_max, options.chunk_bytes,
                          local.area_bytes, weights};
  const auto plan = plan_volumes(geometry, paths.size(), random_store_id());
  VolumeSet set(loop);
  for (size_t i = 0; i < paths.size(); ++i)
    STOKER_TRY(set.open_one(paths[i], options, local, plan[i].volume_bytes));
  STOKER_TRY(set.read_headers());
  STOKER_TRY(set.identify(options, plan));
  // Only now: what was named might have been somebody's file that is no store at all.
  for (Volume& volume : set.volumes_) name_holder(volume, options);
  return set;
}

Status VolumeSet::open_one(const std::string& path, const StoreOptions& options,
                           const LocalOptions& local, uint64_t bytes) {
  Volume volume;
  volume.path = path;
  volume.file_path = path;
  const bool in_files = local.files && !nvme::is_target(path);
  if (in_files) {
    STOKER_ASSIGN(volume.file_path, resolve(path, options));
    volume.in_folder = volume.file_path != path;
  }
  std::filesystem::file_status status;
  if (in_files) {
    STOKER_ASSIGN(status, look_at(volume.file_path));
  }
  const bool missing = in_files && !std::filesystem::exists(status);
  if (missing && (!options.create || options.read_only))
    return fail(ENOENT,
                "there is no store at '{}'; check the path, or make one with `stoker create`",
                path);
  // A crash between making the file and giving it its size leaves an empty one.
  std::error_code error;
  const bool empty = in_files && std::filesystem::is_regular_file(status) &&
                     std::filesystem::file_size(volume.file_path, error) == 0;
  const bool create = options.create && !options.read_only && (missing || empty || !local.files);
  if (create && options.capacity_bytes == 0 && local.files) {
    return fail(Code::invalid_argument,
                "a new store at '{}' needs a capacity: say how many bytes it may hold", path);
  }
  auto file = loop_->open(OpenFile{.path = volume.file_path,
                                   .create = create,
                                   .write = !options.read_only,
                                   .reserve_bytes = create ? bytes : 0});
  if (!file) return file.error().with("the store '" + path + "'");
  volume.file = *file;
  volume.made = missing;
  if (missing)
    log().info("reserved {} at '{}'; the first pass over new space is slower than later ones",
               human_bytes(bytes), volume.file_path);
  volumes_.push_back(std::move(volume));
  if (local.files) {
    auto locked = lock_file(volumes_.back().locked_path(), path, options.read_only);
    // Whoever holds the lock came between our look and our open: the file is theirs.
    if (!locked && locked.error().code == Code::busy) volumes_.back().made = false;
    STOKER_ASSIGN(volumes_.back().lock_fd, std::move(locked));
  }
  return {};
}

Status VolumeSet::read_headers() {
  for (Volume& volume : volumes_) {
    AlignedBytes region(kHeaderRegion);
    const auto unreadable =
        read_what_can_be(*loop_, Priority::demand, volume.file.id, 0, region.slice());
    if (!unreadable) return unreadable.error().with("reading the header of '" + volume.path + "'");
    std::optional<VolumeHeader> found;
    Status error;
    for (size_t copy = 0; copy < 2; ++copy) {
      const auto header = decode_header(region.span().subspan(kHeaderAt[copy]));
      if (!header) error = header.error();
      // A crash between the two writes leaves "making" in one: the other is the newer.
      if (header && *header && (!found || (*header)->state == VolumeState::ready)) found = **header;
      if (header && *header) continue;
      const bool read =
          std::find(unreadable->begin(), unreadable->end(), kHeaderAt[copy]) == unreadable->end();
      volume.damage.push_back("header copy " + std::to_string(copy) + " of '" + volume.path + "' " +
                              (read ? "is damaged" : "cannot be read"));
    }
    const std::span<const std::byte> bytes = region.span();
    // What cannot be read may hold anything.
    const bool blank = !found && unreadable->empty() && all_zero(bytes.first(kHolderAt)) &&
                       all_zero(bytes.subspan(kHolderAt + kHeaderBytes));
    if (!found && volume.file.bytes < kHeaderRegion) {
      return fail(Code::mismatch,
                  "'{}' is not a volume of a store: it is too small; check the path", volume.path);
    }
    if (!found && !blank) {
      if (!error && error.error().code == Code::mismatch)
        return error.error().with("'" + volume.path + "'");
      return fail(Code::mismatch,
                  "'{}' holds {} that is not a Stoker store, or both copies of its header are "
                  "damaged. Give another path, or restore the store from a copy. `stoker create "
                  "--overwrite` makes an empty store on a device",
                  volume.path, what_begins_with(bytes));
    }
    if (found && found->volume_bytes > volume.file.bytes) {
      volume.damage.push_back("'" + volume.path + "' is cut short: it should have " +
                              std::to_string(found->volume_bytes) + " bytes and has " +
                              std::to_string(volume.file.bytes));
    }
    blank_.push_back(blank);
    if (found) volume.header = *found;
  }
  return {};
}

// All volumes of one store, each once; or a store that never came to be.
Status VolumeSet::identify(const StoreOptions& options, const std::vector<VolumeHeader>& plan) {
  STOKER_CHECK(blank_.size() == volumes_.size() && plan.size() == volumes_.size());
  bool ready = false;
  for (size_t i = 0; i < volumes_.size(); ++i)
    ready = ready || (!blank_[i] && volumes_[i].header.state == VolumeState::ready);
  if (ready) {
    // else another process made it since we looked
    for (size_t i = 0; i < volumes_.size(); ++i) volumes_[i].made = volumes_[i].made && blank_[i];
    return order_by_index();
  }
  const std::string& path = volumes_[0].path;
  if (!options.create || options.read_only)
    return fail(
        Code::not_found,
        "there is no finished store at '{}'; if making one there was interrupted, make it again",
        path);
  if (options.capacity_bytes == 0)
    return fail(Code::invalid_argument,
                "a new store at '{}' needs a capacity: say how many bytes it may hold", path);
  for (size_t i = 0; i < volumes_.size(); ++i) {
    if (blank_[i]) STOKER_TRY(check_fresh(volumes_[i]));
    if (volumes_[i].file.bytes < plan[i].volume_bytes && volumes_[i].in_folder)
      STOKER_TRY(make_again(volumes_[i], plan[i].volume_bytes));
    if (volumes_[i].file.bytes < plan[i].volume_bytes) {
      return fail(Code::out_of_space,
                  "'{}' has {}, but the store needs {} there (data and journal); delete the file, "
                  "or ask for less",
                  volumes_[i].path, human_bytes(volumes_[i].file.bytes),
                  human_bytes(plan[i].volume_bytes));
    }
    volumes_[i].header = plan[i];
    volumes_[i].damage.clear();
  }
  fresh_ = true;
  return {};
}

// The file that an attempt to make the store left in its folder, which shared the room out in
// another way. It stays locked meanwhile.
Status VolumeSet::make_again(Volume& volume, uint64_t bytes) {
  STOKER_TRY(loop_->close(std::exchange(volume.file.id, -1)));
  std::error_code error;
  std::filesystem::resize_file(volume.file_path, 0, error);
  if (error) return fail(error.value(), "cannot make '{}' again", volume.file_path);
  auto file =
      loop_->open(OpenFile{.path = volume.file_path, .create = true, .reserve_bytes = bytes});
  if (!file) return file.error().with("the store '" + volume.path + "'");
  volume.file = *file;
  return {};
}

// A blank header proves nothing: a file system may begin behind 64 KiB of zeros, or a program have
// put its data there. An attempt to make a store that was cut off before its headers were flushed
// has written nothing else.
Status VolumeSet::check_fresh(const Volume& volume) const {
  if (volume.made) return {};
  const auto written = first_written(*loop_, volume.file, volume.lock_fd, kHeaderRegion);
  if (!written) return written.error().with("looking whether '" + volume.path + "' is empty");
  if (!*written) return {};
  return fail(
      Code::mismatch,
      "'{}' begins like an empty file, but from byte {} on it holds data that is not a Stoker "
      "store. Give another path, or delete the file (on a device: blkdiscard) if nobody needs it",
      volume.path, **written);
}

Status VolumeSet::order_by_index() {
  const auto first = std::find(blank_.begin(), blank_.end(), false) - blank_.begin();
  STOKER_CHECK(static_cast<size_t>(first) < volumes_.size());
  const VolumeHeader known = volumes_[static_cast<size_t>(first)].header;
  for (size_t i = 0; i < volumes_.size(); ++i) {
    if (blank_[i])
      return fail(Code::mismatch,
                  "'{}' is empty, but '{}' belongs to a store of {} volumes; name the volumes that "
                  "this store was made with",
                  volumes_[i].path, volumes_[static_cast<size_t>(first)].path, known.count);
    if (volumes_[i].header.store != known.store)
      return fail(Code::mismatch,
                  "'{}' and '{}' belong to different stores; name the volumes of one",
                  volumes_[i].path, volumes_[static_cast<size_t>(first)].path);
  }
  if (known.count != volumes_.size()) {
    return fail(Code::mismatch,
                "'{}' belongs to a store of {} volumes, but {} are given: name them all",
                volumes_[0].path, known.count, volumes_.size());
  }
  std::sort(volumes_.begin(), volumes_.end(),
            [](const Volume& a, const Volume& b) { return a.header.index < b.header.index; });
  for (size_t i = 0; i < volumes_.size(); ++i) {
    if (volumes_[i].header.index != i)
      return fail(Code::mismatch,
                  "'{}' is given twice, or is a copy of another volume; name each volume once",
                  volumes_[i].path);
  }
  return {};
}

// One copy after the other: whatever a crash does to a sector that is being written, a header is
// left.
Status VolumeSet::write_headers(VolumeState state, uint32_t opened, uint32_t generation) {
  STOKER_CHECK(fresh_ || state == VolumeState::ready);  // a store in use is never unmade
  const uint32_t before = newest_up_to(generation);
  std::vector<AlignedBytes> blocks;
  for (Volume& volume : volumes_) {
    volume.header.state = state;
    volume.header.opened = opened;
    volume.header.opened_before = before;
    const std::string bytes = encode_header(volume.header);
    AlignedBytes& block = blocks.emplace_back(kBlock);
    std::memset(block.data(), 0, block.size());
    std::memcpy(block.data(), bytes.data(), bytes.size());
  }
  for (const uint64_t at : kHeaderAt) {
    IoBatch writes(*loop_, Priority::write_back);
    IoBatch syncs(*loop_, Priority::write_back);
    for (size_t i = 0; i < volumes_.size(); ++i) {
      writes.write(volumes_[i].file.id, at, blocks[i].slice());
      syncs.sync(volumes_[i].file.id);
    }
    STOKER_TRY(writes.run());
    STOKER_TRY(syncs.run());
  }
  for (Volume& volume : volumes_) volume.damage.clear();
  return {};
}

// Of the openings that any volume knows, the newest that is known to have begun: a generation of
// its number or a later one is in use.
uint32_t VolumeSet::newest_up_to(uint32_t generation) const {
  uint32_t newest = 0;
  for (const Volume& volume : volumes_) {
    for (const uint32_t each : {volume.header.opened, volume.header.opened_before}) {
      if (each <= generation) newest = std::max(newest, each);
    }
  }
  return newest;
}

// An opening notes its number on every volume before its generation is sealed. So where that
// generation, or a later one, is in use, each volume has this number, or that of a later opening
// which was cut off; one that has an earlier number lay elsewhere meanwhile.
Status VolumeSet::check_same_time(uint32_t generation) const {
  const uint32_t newest = newest_up_to(generation);
  for (const Volume& volume : volumes_) {
    if (volume.header.opened >= newest) continue;
    return fail(
        Code::mismatch,
        "'{}' is an older copy: the other volumes of its store were written to since. Give the "
        "newest file of each, or older ones that were all copied at one time while nobody wrote",
        volume.path);
  }
  return {};
}

// What lay in the lost part is zeros now: the other copy mends a journal there, and chunks differ
// from their checksums.
Status VolumeSet::restore_sizes() {
  for (const Volume& volume : volumes_) {
    const uint64_t bytes = volume.header.volume_bytes;
    if (volume.file.bytes >= bytes) continue;
    const auto from = static_cast<off_t>(volume.file.bytes),
               more = static_cast<off_t>(bytes) - from;
    const int error = volume.lock_fd < 0 ? 0 : posix_fallocate(volume.lock_fd, from, more);
    if (error != 0) {
      return fail(error,
                  "'{}' is cut short and cannot get its {} bytes again; put the whole file back, "
                  "or open the store to read only",
                  volume.path, bytes);
    }
    AlignedBytes last(kBlock);
    std::memset(last.data(), 0, last.size());
    IoBatch end(*loop_, Priority::write_back);
    end.write(volume.file.id, bytes - kBlock, last.slice());
    STOKER_TRY(end.run());
    log().warn(
        "'{}' was cut short by {}: objects that lay there are damaged, and `stoker fsck` names "
        "them",
        volume.path, human_bytes(bytes - volume.file.bytes));
  }
  return {};
}

MapLimits VolumeSet::limits() const {
  MapLimits limits;
  uint64_t bytes = 0;
  for (const Volume& volume : volumes_) {
    limits.volumes.push_back({volume.header.data_at / kBlock,
                              (volume.header.data_at + volume.header.data_bytes) / kBlock});
    bytes += volume.header.data_bytes;
  }
  limits.slots_max = (uint64_t{1} << 16) + 4 * (bytes / kChunkMin);
  return limits;
}

}  // namespace stoker::local
