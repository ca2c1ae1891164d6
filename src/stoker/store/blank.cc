#include "stoker/store/blank.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "stoker/base/bytes.h"
#include "stoker/store/blocking_io.h"

namespace stoker {
namespace {

constexpr size_t kReadBytes = 1 * kMiB;
constexpr size_t kReads = 4;  // at a time

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte byte) { return byte == std::byte{0}; });
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

}  // namespace

Result<std::optional<uint64_t>> first_written(Loop& loop, const FileInfo& file, int fd,
                                              uint64_t from) {
  const uint64_t end = align_down(file.bytes, kIoAlign);
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
