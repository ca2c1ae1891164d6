#include "stoker/codec/hashed_copy.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstring>
#include <random>
#include <vector>

namespace stoker::codec {
namespace {

using Bytes = std::vector<std::byte>;

Digest hash_of(const Bytes& bytes) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  Digest found;
  std::memcpy(found.data(), canonical.digest, sizeof found);
  return found;
}

Bytes noise(std::mt19937& rng, size_t bytes) {
  Bytes found(bytes);
  for (std::byte& each : found) each = static_cast<std::byte>(rng());
  return found;
}

size_t below(std::mt19937& rng, size_t end) { return end == 0 ? 0 : rng() % end; }

// Places of any length and alignment, sorted, with gaps.
std::vector<std::pair<size_t, size_t>> places(std::mt19937& rng, size_t size) {
  std::vector<std::pair<size_t, size_t>> found;
  for (size_t at = below(rng, 100); at < size;) {
    const size_t most = rng() % 2 ? 200 : size;
    const size_t bytes = below(rng, std::min(most, size - at) + 1);
    found.emplace_back(at, bytes);
    at += bytes + below(rng, 3) * below(rng, 5000);
    if (bytes == 0) ++at;
  }
  return found;
}

TEST(HashedCopy, GathersAndScattersAnyParts) {
  std::mt19937 rng(7);
  for (const size_t size : {size_t{0}, size_t{1}, size_t{63}, size_t{4096}, size_t{65'537},
                            size_t{300'001}, size_t{300'002}, size_t{300'003}}) {
    const auto chosen = places(rng, size);
    std::vector<Bytes> sources, targets;
    std::vector<ChunkPart<const std::byte>> in;
    std::vector<ChunkPart<std::byte>> out;
    for (const auto& [at, bytes] : chosen) {
      sources.push_back(noise(rng, bytes + 1));  // from an odd address
      targets.emplace_back(bytes + 2, std::byte{0x5a});
    }
    Bytes expected(size);
    for (size_t i = 0; i < chosen.size(); ++i) {
      const auto& [at, bytes] = chosen[i];
      in.push_back({at, sources[i].data() + 1, bytes});
      out.push_back({at, targets[i].data() + 1, bytes});
      if (bytes > 0) std::memcpy(expected.data() + at, sources[i].data() + 1, bytes);
    }
    Bytes chunk = noise(rng, size);
    EXPECT_EQ(gather(chunk, in), hash_of(expected)) << size;
    EXPECT_EQ(chunk, expected) << size;
    EXPECT_EQ(scatter(chunk, out), hash_of(expected)) << size;
    for (size_t i = 0; i < chosen.size(); ++i) {
      EXPECT_EQ(targets[i].front(), std::byte{0x5a});
      EXPECT_EQ(targets[i].back(), std::byte{0x5a});
      const size_t bytes = chosen[i].second;
      EXPECT_TRUE(std::equal(sources[i].begin() + 1, sources[i].end(), targets[i].begin() + 1))
          << size << " at " << chosen[i].first << ", " << bytes;
    }
  }
}

TEST(HashedCopy, PartsThatAreTakenMayOverlap) {
  std::mt19937 rng(8);
  const Bytes chunk = noise(rng, 200'000);
  Bytes all(chunk.size()), middle(70'000), end(1);
  const std::vector<ChunkPart<std::byte>> out = {{0, all.data(), all.size()},
                                                 {65'000, middle.data(), middle.size()},
                                                 {199'999, end.data(), 1}};
  EXPECT_EQ(scatter(chunk, out), hash_of(chunk));
  EXPECT_EQ(all, chunk);
  EXPECT_TRUE(std::equal(middle.begin(), middle.end(), chunk.begin() + 65'000));
  EXPECT_EQ(end[0], chunk.back());
}

}  // namespace
}  // namespace stoker::codec
