#include "stoker/io/buffered.h"

#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "stoker/base/bytes.h"
#include "stoker/base/check.h"

namespace stoker {
namespace {

constexpr size_t kCallBytes = kGiB;  // of one system call

}  // namespace

void read_on(BufferedRead& read) {
  while (read.outcome >= 0 && static_cast<size_t>(read.outcome) < read.into.size) {
    const auto moved = static_cast<size_t>(read.outcome);
    const ssize_t got =
        pread(read.fd, read.into.data + moved, std::min(read.into.size - moved, kCallBytes),
              static_cast<off_t>(read.offset + moved));
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) return;
    read.outcome = got < 0 ? -errno : read.outcome + got;
  }
}

class BufferedReader::Ring {
 public:
  static std::unique_ptr<Ring> make(uint32_t depth) {
    auto ring = std::unique_ptr<Ring>(new Ring);
    if (io_uring_queue_init(depth, &ring->ring_, 0) != 0) return nullptr;
    ring->made_ = true;
    return ring;
  }
  ~Ring() {
    if (made_) io_uring_queue_exit(&ring_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Outcomes may be short, or say -EINTR or -EAGAIN. False: the ring is of no use any more; nothing
  // is in flight.
  bool run(std::span<BufferedRead> reads) {
    size_t started = 0, over = 0, queued = 0;
    while (over < reads.size()) {
      while (started < reads.size()) {
        io_uring_sqe* sqe =
            started - over < ring_.sq.ring_entries ? io_uring_get_sqe(&ring_) : nullptr;
        if (sqe == nullptr) break;
        BufferedRead& read = reads[started++];
        read.outcome = -EAGAIN;
        io_uring_prep_read(sqe, read.fd, read.into.data,
                           static_cast<unsigned>(std::min(read.into.size, kCallBytes)),
                           read.offset);
        io_uring_sqe_set_data(sqe, &read);
        ++queued;
      }
      const int sent = io_uring_submit_and_wait(&ring_, 1);
      if (sent < 0 && sent != -EINTR && sent != -EAGAIN && sent != -EBUSY) {
        // What was sent before ends; what was not is read without the ring.
        wait_for(started - queued - over);
        return false;
      }
      if (sent > 0) queued -= static_cast<size_t>(sent);
      over += collect();
    }
    return true;
  }

 private:
  Ring() = default;

  size_t collect() {
    unsigned head = 0, seen = 0;
    io_uring_cqe* cqe = nullptr;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      static_cast<BufferedRead*>(io_uring_cqe_get_data(cqe))->outcome = cqe->res;
      ++seen;
    }
    io_uring_cq_advance(&ring_, seen);
    return seen;
  }

  void wait_for(size_t in_flight) {
    while (in_flight > 0) {
      io_uring_cqe* cqe = nullptr;
      const int waited = io_uring_wait_cqe(&ring_, &cqe);
      STOKER_CHECK(waited == 0 || waited == -EINTR);
      in_flight -= collect();
    }
  }

  io_uring ring_{};
  bool made_ = false;
};

BufferedReader::BufferedReader(uint32_t depth) : ring_(Ring::make(depth)) {}
BufferedReader::~BufferedReader() = default;

void BufferedReader::run(std::span<BufferedRead> reads) {
  if (ring_ != nullptr) {
    if (!ring_->run(reads)) ring_.reset();
    for (BufferedRead& read : reads) {
      if (read.outcome == -EINTR || read.outcome == -EAGAIN) read.outcome = 0;
    }
  }
  for (BufferedRead& read : reads) read_on(read);
}

}  // namespace stoker
