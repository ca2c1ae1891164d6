#include "stoker/store/blank.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/io/nvme/command.h"
#include "stoker/io/spdk/engine.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/store_file.h"
#include "stoker/store/writer_lock.h"

namespace stoker {
namespace {

constexpr size_t kReadBytes = 1 * kMiB;
constexpr size_t kReads = 4;  // at a time
constexpr uint64_t kEraseBytes =
    1 * kGiB;  // at a time: each soon enough for no one to call it stalled

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte byte) { return byte == std::byte{0}; });
}

// Whether `fd` is the plain file of that size whose file system tells what was written. Others
// (a device that takes commands, what stands for it in sysfs) answer anything.
bool tells_holes(int fd, uint64_t bytes) {
  struct stat st {};
  return fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) &&
         static_cast<uint64_t>(st.st_size) == bytes;
}

struct Range {
  uint64_t from = 0, to = 0;
};

// The next range from `at` on that may hold data, in whole blocks; empty if there is none. All the
// rest where nobody can tell.
Range next_data(int fd, uint64_t at, uint64_t end) {
  const off_t data = fd < 0 ? -1 : lseek(fd, static_cast<off_t>(at), SEEK_DATA);
  if (data < 0) return fd >= 0 && errno == ENXIO ? Range{end, end} : Range{at, end};
  const off_t hole = lseek(fd, data, SEEK_HOLE);
  const uint64_t to = hole < 0 ? end : align_up(static_cast<uint64_t>(hole), kIoAlign);
  return {std::min(end, align_down(static_cast<uint64_t>(data), kIoAlign)), std::min(end, to)};
}

struct Signature {
  size_t at;
  std::string_view bytes;
  std::string_view what;
};

using namespace std::string_view_literals;
// A partition table comes last: a file system may hold its two bytes too.
constexpr std::array kSignatures = {
    Signature{512, "EFI PART"sv, "a GPT partition table"},
    Signature{4096, "EFI PART"sv, "a GPT partition table"},
    Signature{1080, "\x53\xEF"sv, "an ext2, ext3 or ext4 file system"},
    Signature{0, "XFSB"sv, "an XFS file system"},
    Signature{3, "NTFS    "sv, "an NTFS file system"},
    Signature{82, "FAT32   "sv, "a FAT file system"},
    Signature{54, "FAT1"sv, "a FAT file system"},
    Signature{1024, "\x10\x20\xF5\xF2"sv, "an F2FS file system"},
    Signature{4086, "SWAPSPACE2"sv, "swap space"},
    Signature{0, "LUKS\xBA\xBE"sv, "an encrypted volume (LUKS)"},
    Signature{512, "LABELONE"sv, "a physical volume (LVM)"},
    Signature{0, "\xFC\x4E\x2B\xA9"sv, "a part of a RAID"},
    Signature{4096, "\xFC\x4E\x2B\xA9"sv, "a part of a RAID"},
    Signature{510, "\x55\xAA"sv, "a partition table"},
};

Status check_device(const std::string& path) {
  if (nvme::is_target(path)) return {};
  struct stat st {};
  if (stat(path.c_str(), &st) != 0 || !S_ISBLK(st.st_mode))
    return fail(Code::invalid_argument,
                "'{}' is not a device: delete the file of the store instead", path);
  const int fd = ::open(path.c_str(), O_RDONLY | O_EXCL | O_CLOEXEC);
  if (fd < 0 && errno == EBUSY)
    return fail(Code::busy, "'{}' is in use (mounted, swap or part of a RAID). End that first",
                path);
  if (fd >= 0) ::close(fd);
  return {};
}

// Under the lock of its store, so that nobody else has it open as one.
Status erase(Loop& loop, StoreFile& device) {
  STOKER_ASSIGN(device.lock_fd, lock_file(device.locked_path(), device.path, false));
  STOKER_ASSIGN(device.file, loop.open({.path = device.path}));
  const uint64_t bytes = align_down(device.file.bytes, kIoAlign);
  for (uint64_t at = 0; at < bytes; at += kEraseBytes) {
    IoBatch trim(loop, Priority::write_back);
    trim.trim(device.file.id, at, std::min(kEraseBytes, bytes - at));
    STOKER_TRY(trim.run());
  }
  IoBatch sync(loop, Priority::write_back);
  sync.sync(device.file.id);
  return sync.run();
}

}  // namespace

std::string_view what_begins_with(std::span<const std::byte> head) {
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  for (const Signature& each : kSignatures) {
    if (text.size() >= each.at + each.bytes.size() &&
        text.substr(each.at, each.bytes.size()) == each.bytes)
      return each.what;
  }
  return "something";
}

Status make_blank(Loop& loop, const std::vector<std::string>& devices) {
  for (const std::string& path : devices) STOKER_TRY(check_device(path));
  for (const std::string& path : devices) {
    std::unique_ptr<Loop> own;  // of a drive that we drive ourselves
    if (nvme::is_pci_target(path)) {
      STOKER_ASSIGN(auto engine, make_pci_engine({path}));
      STOKER_ASSIGN(own, Loop::make(std::move(engine)));
    }
    Loop& used = own ? *own : loop;
    StoreFile device;
    device.path = device.file_path = path;
    const Status erased = erase(used, device);
    close_store_file(used, device);
    if (!erased) return erased.error().with("deleting what '" + path + "' holds");
  }
  return {};
}

Result<std::optional<uint64_t>> first_written(Loop& loop, const FileInfo& file, int fd,
                                              uint64_t from) {
  const uint64_t end = align_down(file.bytes, kIoAlign);
  if (!tells_holes(fd, file.bytes)) fd = -1;
  AlignedBytes memory(kReads * kReadBytes);
  for (Range range = next_data(fd, from, end); range.from < range.to;
       range = next_data(fd, range.to, end)) {
    for (uint64_t at = range.from; at < range.to;) {
      const size_t bytes = std::min<uint64_t>(memory.size(), range.to - at);
      IoBatch batch(loop, Priority::scrub);
      for (size_t piece = 0; piece < bytes; piece += kReadBytes)
        batch.read(file.id, at + piece,
                   memory.slice().sub(piece, std::min(kReadBytes, bytes - piece)));
      STOKER_TRY(batch.run());
      for (size_t block = 0; block < bytes; block += kIoAlign) {
        if (!all_zero(memory.span().subspan(block, kIoAlign)))
          return std::optional<uint64_t>(at + block);
      }
      at += bytes;
    }
  }
  return std::optional<uint64_t>();
}

}  // namespace stoker
