// One pass over the slices of a call: checked as they are added, then walked a cache-sized piece at
// a time, with the checksums of each piece taken while it is near. Internal to codec/.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/base/crc32c.h"
#include "stoker/base/result.h"
#include "stoker/codec/erasure.h"

namespace stoker::codec {

// All slices of a call. Those that are not there (empty) must not be added.
class Pass {
 public:
  // a delta into 31 parities has one slice more than chunks: two of its own
  Pass() { parts_.reserve(kChunksMax + 1); }

  // `chunk`: data chunks count from 0, parity chunks from k. Errors name it.
  Status add(int chunk, const Source& source) {
    return add(Part{chunk, source.bytes.data(), source.bytes.size(), source.crcs, false});
  }
  Status add(int chunk, const Target& target) {
    return add(Part{chunk, target.bytes.data(), target.bytes.size(), target.crcs, true});
  }

  // Runs work(size) for one piece of the range after the other, and takes the CRCs of what each
  // piece holds then.
  //
  // The arithmetic comes first: it streams all chunks from memory at once, which the hardware
  // prefetches best. It leaves one block of each in the near caches (36 KiB for 6+3). So the
  // checksums cost their computing, and no second pass over memory. Other orders were measured on
  // cold data and are slower or no faster: checksums first, a chunk at a time through
  // ec_encode_data_update, longer or shorter pieces, software prefetch, parity by non-temporal
  // stores.
  template <typename Work>
  void run(Work&& work) const {
    constexpr size_t unsummed_piece = 256 * kKiB;
    const bool summed = std::any_of(parts_.begin(), parts_.end(),
                                    [](const Part& part) { return !part.crcs.empty(); });
    const size_t piece = summed ? kCrcBlock : unsummed_piece;
    for (size_t at = 0; at < bytes(); at += piece) {
      const size_t size = std::min(piece, bytes() - at);
      work(size);
      for (const Part& part : parts_) {
        if (!part.crcs.empty()) part.crcs[at / kCrcBlock] = crc32c(part.bytes + at, size);
      }
    }
  }

 private:
  struct Part {
    int chunk;
    const std::byte* bytes;
    size_t size;
    std::span<uint32_t> crcs;
    bool written;
  };
  Status add(const Part& part);
  size_t bytes() const { return parts_.empty() ? 0 : parts_.front().size; }

  std::vector<Part> parts_;
};

// Pointers that move through their slices together.
template <typename Byte>
class Cursor {
 public:
  void add(Byte* bytes) { at_[count_++] = bytes; }
  Byte* const* get() const { return at_.data(); }
  void advance(size_t bytes) {
    for (size_t i = 0; i < count_; ++i) at_[i] += bytes;
  }

 private:
  std::array<Byte*, kChunksMax> at_{};
  size_t count_ = 0;
};
using Reading = Cursor<const std::byte>;
using Writing = Cursor<std::byte>;

// "chunk 3"
std::string chunk_name(int chunk);
// An invalid_argument of this folder.
Error refuse(std::string what);

}  // namespace stoker::codec
