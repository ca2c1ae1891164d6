// Reads of plain files through the page cache, many side by side: for small pieces at any offset,
// which direct I/O cannot take. What is in the cache costs no wait, the rest is fetched together.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "stoker/memory/slice.h"

namespace stoker {

struct BufferedRead {
  int fd = -1;
  uint64_t offset = 0;
  Slice into;
  int64_t outcome = 0;  // bytes moved, fewer only where the file ends; or -errno
};

// Goes on from `outcome` bytes to the end of the piece or of the file, on the calling thread.
void read_on(BufferedRead& read);

// One thread at a time.
class BufferedReader {
 public:
  // depth: reads in flight at most. Without io_uring they go one after the other.
  explicit BufferedReader(uint32_t depth);
  ~BufferedReader();
  BufferedReader(const BufferedReader&) = delete;
  BufferedReader& operator=(const BufferedReader&) = delete;

  // Starts all and waits for all.
  void run(std::span<BufferedRead> reads);

 private:
  class Ring;
  std::unique_ptr<Ring> ring_;  // null without io_uring
};

}  // namespace stoker
