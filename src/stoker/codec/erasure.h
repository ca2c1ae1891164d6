// Erasure codes: k data chunks and m parity chunks, of which any k give back all k + m. Systematic
// Reed-Solomon over GF(2^8) with a Cauchy matrix (gf256.h states it; what is on disk depends on
// it).
//
// All three calls work on one byte range of the chunks of a stripe: whole chunks or any part of
// them, at any offset, of any length from 1 byte, at any alignment. The slices handed over are that
// range of each chunk. Each call can compute CRC32Cs in the same pass, while the bytes are in the
// cache: one for each kCrcBlock of the range, the last one perhaps shorter. So a caller whose
// header holds the CRC of every block of a chunk gives ranges that begin on a block.
//
// Pure functions: any thread, nothing is kept, no I/O. The caller owns the memory, and must not
// change it during the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "stoker/base/bytes.h"
#include "stoker/base/result.h"

namespace stoker::codec {

inline constexpr int kChunksMax = 32;          // k + m
inline constexpr size_t kCrcBlock = 4 * kKiB;  // bytes under one CRC
constexpr size_t crc_blocks(size_t bytes) { return (bytes + kCrcBlock - 1) / kCrcBlock; }

// A slice that is read. `crcs` is empty (none are wanted) or has room for crc_blocks(bytes.size()).
struct Source {
  std::span<const std::byte> bytes;  // empty: this chunk is not there
  std::span<uint32_t> crcs;
};

// A slice that is written; it shares no memory with any other slice of the call. `crcs` as in
// Source, of what was written.
struct Target {
  std::span<std::byte> bytes;  // empty: this chunk is not wanted
  std::span<uint32_t> crcs;
};

// Who multiplies: ISA-L, or the plain loop that it is tested against (about a hundred times slower,
// the same bits).
enum class Arithmetic : uint8_t { isal, scalar };

class Kernel;
class Matrix;

class ErasureCode {
 public:
  // 1 <= k, 1 <= m, k + m <= kChunksMax.
  static Result<ErasureCode> make(int k, int m, Arithmetic arithmetic = Arithmetic::isal);

  int k() const { return k_; }
  int m() const { return m_; }

  // Fills all m parities from all k data slices. (To fill some of them, call decode.)
  Status encode(std::span<const Source> data, std::span<const Target> parity) const;

  // Rebuilds the wanted chunks, data or parity, from any k present ones. Chunk i stands at place i
  // of both lists of k + m: data first, then parity; what is neither present nor wanted is left
  // alone. Reads k of those present, data before parity, but fills the CRCs of all present ones
  // that ask for them: compare those with what the header says, for one rotten source spoils all
  // that is rebuilt.
  Status decode(std::span<const Source> present, std::span<const Target> wanted) const;

  // Data chunk `chunk` changes from `older` to `newer`: brings the parities up to date in place, in
  // any order with other deltas. An empty `older` stands for zeros: for a chunk never written, or
  // where `newer` is the difference (old ^ new) that somebody else formed. Parity j stands at place
  // j of m; an empty one is left alone.
  Status delta(int chunk, std::span<const std::byte> older, const Source& newer,
               std::span<const Target> parity) const;

 private:
  ErasureCode(int k, int m, Arithmetic arithmetic);

  int k_;
  int m_;
  Arithmetic arithmetic_;
  std::shared_ptr<const Matrix> parity_rows_;  // m rows of k
  std::shared_ptr<const Kernel> encoder_;
};

}  // namespace stoker::codec
