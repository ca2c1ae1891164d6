// Copies the bytes of a chunk and hashes it in the same pass, as checkpoints do
// (docs/formats/checkpoint.md). Memory is read once: a copy of its own, and then the hash, would
// read it twice.
//
// What is copied is not kept in the caches: the disk, or a later step, wants it next. Any thread.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace stoker::codec {

using Digest = std::array<std::byte, 16>;  // XXH3-128, in its canonical (big-endian) form

// A part of a chunk, and memory elsewhere.
template <typename Byte>
struct ChunkPart {
  size_t at = 0;  // in the chunk
  Byte* elsewhere = nullptr;
  size_t bytes = 0;
};

// Fills the chunk from parts, which are sorted and do not overlap; between them it is zeros. The
// hash is that of the chunk.
Digest gather(std::span<std::byte> chunk, std::span<const ChunkPart<const std::byte>> parts);

// Copies parts out of the chunk. They are sorted by `at`; they may overlap, their places elsewhere
// must not. The hash is that of the chunk: compare it before you believe what was copied.
Digest scatter(std::span<const std::byte> chunk, std::span<const ChunkPart<std::byte>> parts);

}  // namespace stoker::codec
