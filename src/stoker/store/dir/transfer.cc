#include "stoker/store/dir/transfer.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "stoker/base/bytes.h"
#include "stoker/base/log.h"
#include "stoker/store/blocking_io.h"

namespace stoker::dir {
namespace {

constexpr uint64_t kPieceBytes = 2 * kMiB;  // of one op

// The whole blocks in the middle, which direct I/O takes: [first, last) of the file. Empty where
// there are too few.
struct Middle {
  uint64_t first = 0, last = 0;
};

Middle middle_of(uint64_t offset, const Slice& bytes) {
  const auto address = reinterpret_cast<uintptr_t>(bytes.data);
  if (bytes.size < kDirectBytes || address % kIoAlign != offset % kIoAlign) return {};
  return {align_up(offset, kIoAlign), align_down(offset + bytes.size, kIoAlign)};
}

Status read_buffered(int fd, uint64_t offset, Slice into) {
  BufferedRead read{fd, offset, into};
  read_on(read);
  return outcome_of(read);
}

Status write_buffered(int fd, uint64_t offset, Slice from) {
  for (size_t moved = 0; moved < from.size;) {
    const ssize_t put =
        pwrite(fd, from.data + moved, from.size - moved, static_cast<off_t>(offset + moved));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return fail(errno, "the file cannot be written");
    moved += static_cast<size_t>(put);
  }
  return {};
}

// Calls op(at, bytes) for each piece of the middle.
template <typename OnPiece>
void each_piece(const Middle& middle, OnPiece op) {
  for (uint64_t at = middle.first; at < middle.last; at += kPieceBytes)
    op(at, std::min(kPieceBytes, middle.last - at));
}

}  // namespace

Status outcome_of(const BufferedRead& read) {
  if (read.outcome < 0) return fail(static_cast<int>(-read.outcome), "the file cannot be read");
  if (static_cast<size_t>(read.outcome) == read.into.size) return {};
  return fail(Code::io,
              "the file became shorter while it was read; end the program that writes it in place");
}

bool goes_direct(uint64_t offset, const Slice& bytes) {
  const Middle middle = middle_of(offset, bytes);
  return middle.first < middle.last;
}

std::string path_of(int fd) { return "/proc/self/fd/" + std::to_string(fd); }

Status read_file(Loop& loop, int fd, uint64_t offset, Slice into, Priority priority) {
  const Middle middle = middle_of(offset, into);
  if (middle.first >= middle.last) return read_buffered(fd, offset, into);
  const auto file = loop.open(OpenFile{.path = path_of(fd), .write = false});
  if (!file) return read_buffered(fd, offset, into);
  IoBatch batch(loop, priority);
  each_piece(middle, [&](uint64_t at, uint64_t bytes) {
    batch.read(file->id, at, into.sub(at - offset, bytes));
  });
  Status status = batch.run();
  if (status) status = read_buffered(fd, offset, into.sub(0, middle.first - offset));
  if (status)
    status = read_buffered(fd, middle.last,
                           into.sub(middle.last - offset, offset + into.size - middle.last));
  if (const Status closed = loop.close(file->id); !closed)
    log().warn("{}", closed.error().message());
  return status;
}

Status write_file(Loop& loop, int fd, FileId direct, uint64_t offset, Slice from,
                  Priority priority) {
  const Middle middle = direct < 0 ? Middle{} : middle_of(offset, from);
  if (middle.first >= middle.last) return write_buffered(fd, offset, from);
  IoBatch batch(loop, priority);
  each_piece(middle, [&](uint64_t at, uint64_t bytes) {
    batch.write(direct, at, from.sub(at - offset, bytes));
  });
  STOKER_TRY(batch.run());
  STOKER_TRY(write_buffered(fd, offset, from.sub(0, middle.first - offset)));
  return write_buffered(fd, middle.last,
                        from.sub(middle.last - offset, offset + from.size - middle.last));
}

}  // namespace stoker::dir
