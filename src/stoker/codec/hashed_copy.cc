#include "stoker/codec/hashed_copy.h"

#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "stoker/base/bytes.h"
#include "stoker/base/check.h"

namespace stoker::codec {
namespace {

constexpr size_t kStrip = 64 * kKiB;  // stays in the cache between the hash and the copy
constexpr size_t kLine = 64;

// Past the caches: a plain store would first read the line that it replaces.
void stream(std::byte* to, const std::byte* from, size_t bytes) {
#if defined(__SSE2__)
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kLine);
  std::memcpy(to, from, head);
  const size_t lines = (bytes - head) / kLine;
  for (size_t i = 0; i < lines; ++i) {
    auto* line = reinterpret_cast<__m128i*>(to + head + i * kLine);
    const auto* read = reinterpret_cast<const __m128i*>(from + head + i * kLine);
    const __m128i a = _mm_loadu_si128(read), b = _mm_loadu_si128(read + 1);
    const __m128i c = _mm_loadu_si128(read + 2), d = _mm_loadu_si128(read + 3);
    _mm_stream_si128(line, a);
    _mm_stream_si128(line + 1, b);
    _mm_stream_si128(line + 2, c);
    _mm_stream_si128(line + 3, d);
  }
  const size_t done = head + lines * kLine;
  std::memcpy(to + done, from + done, bytes - done);
#else
  std::memcpy(to, from, bytes);
#endif
}

// What was streamed is there for other threads and the disk once the caller goes on.
void settle() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

class Hash {
 public:
  Hash() : state_(XXH3_createState()) {
    STOKER_CHECK(state_ != nullptr);
    XXH3_128bits_reset(state_.get());
  }
  void add(const std::byte* from, size_t bytes) { XXH3_128bits_update(state_.get(), from, bytes); }
  Digest digest() const {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_.get()));
    Digest found;
    static_assert(sizeof canonical.digest == sizeof found);
    std::memcpy(found.data(), canonical.digest, sizeof found);
    return found;
  }

 private:
  struct Free {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  const std::unique_ptr<XXH3_state_t, Free> state_;
};

void zeros(Hash& hash, std::span<std::byte> gap) {
  if (gap.empty()) return;
  std::memset(gap.data(), 0, gap.size());
  hash.add(gap.data(), gap.size());
}

}  // namespace

Digest gather(std::span<std::byte> chunk, std::span<const ChunkPart<const std::byte>> parts) {
  Hash hash;
  size_t at = 0;
  for (const auto& part : parts) {
    STOKER_CHECK(part.at >= at && part.bytes <= chunk.size() &&
                 part.at <= chunk.size() - part.bytes);
    zeros(hash, chunk.subspan(at, part.at - at));
    for (size_t done = 0; done < part.bytes; done += kStrip) {
      const size_t strip = std::min(kStrip, part.bytes - done);
      hash.add(part.elsewhere + done, strip);
      stream(chunk.data() + part.at + done, part.elsewhere + done, strip);
    }
    at = part.at + part.bytes;
  }
  zeros(hash, chunk.subspan(at));
  settle();
  return hash.digest();
}

Digest scatter(std::span<const std::byte> chunk, std::span<const ChunkPart<std::byte>> parts) {
  Hash hash;
  size_t first = 0;  // of the parts that a later strip may have
  for (size_t begin = 0; begin < chunk.size(); begin += kStrip) {
    const size_t end = std::min(chunk.size(), begin + kStrip);
    hash.add(chunk.data() + begin, end - begin);
    while (first < parts.size() && parts[first].at + parts[first].bytes <= begin) ++first;
    for (size_t i = first; i < parts.size() && parts[i].at < end; ++i) {
      const auto& part = parts[i];
      STOKER_CHECK(part.bytes <= chunk.size() && part.at <= chunk.size() - part.bytes);
      const size_t from = std::max(begin, part.at), to = std::min(end, part.at + part.bytes);
      if (from < to) stream(part.elsewhere + (from - part.at), chunk.data() + from, to - from);
    }
  }
  settle();
  return hash.digest();
}

}  // namespace stoker::codec
