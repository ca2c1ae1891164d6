// What commands share that take whole objects out of a store.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/store.h"

namespace stoker::cli {

inline constexpr uint64_t kPieceBytes = 8 * kMiB;

// For a piece of what has so many bytes. What is small touches little of it.
inline AlignedBytes piece_memory(uint64_t bytes) {
  return bytes < kPieceBytes ? AlignedBytes(kPieceBytes) : AlignedBytes::faulted(kPieceBytes);
}

// Reads an object piece by piece, and hands each over in order. `memory`: of kPieceBytes each; all
// but one of them are read ahead.
template <typename Use>
Status each_piece(Store& store, const ObjectInfo& object, const ReadOptions& options,
                  const std::vector<AlignedBytes>& memory, Use use) {
  const size_t pieces = memory.size();
  std::vector<Future<void>> reads(pieces);
  const uint64_t count = (object.bytes + kPieceBytes - 1) / kPieceBytes;
  const auto slice = [&](uint64_t piece) {
    return memory[piece % pieces].slice().sub(
        0, std::min(kPieceBytes, object.bytes - piece * kPieceBytes));
  };
  const auto begin = [&](uint64_t piece) {
    reads[piece % pieces] = store.read(object.key, piece * kPieceBytes, slice(piece), options);
  };
  for (uint64_t piece = 0; piece < std::min<uint64_t>(count, pieces - 1); ++piece) begin(piece);
  Status status;
  for (uint64_t piece = 0; piece < count; ++piece) {
    // Whatever happens, no read is left behind that still writes into the memory.
    const Status read = reads[piece % pieces].wait();
    if (status) status = read;
    if (status) status = use(piece * kPieceBytes, slice(piece));
    if (piece + pieces - 1 < count) {
      if (status)
        begin(piece + pieces - 1);
      else
        reads[(piece + pieces - 1) % pieces] = Status();
    }
  }
  return status;
}

}  // namespace stoker::cli
