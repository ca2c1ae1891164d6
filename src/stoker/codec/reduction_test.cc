#include "stoker/codec/reduction.h"

#include <gtest/gtest.h>
#include <zstd.h>

#include <cstring>
#include <random>
#include <vector>

namespace stoker::codec {
namespace {

using Bytes = std::vector<std::byte>;

template <typename T, typename Make>
Bytes bytes_of(size_t bytes, Make make) {
  std::vector<T> values(bytes / sizeof(T) + 1);
  for (T& each : values) each = make();
  Bytes found(bytes);
  if (bytes > 0) std::memcpy(found.data(), values.data(), bytes);
  return found;
}

// What is stored, with room behind it that nobody may touch.
Bytes reduced(const Bytes& from, Reduced* how) {
  Bytes into(from.size() + 16, std::byte{0x5a});
  *how = reduce(from, std::span(into).first(from.size()));
  for (size_t i = from.size(); i < into.size(); ++i) EXPECT_EQ(into[i], std::byte{0x5a});
  if (how->width == 0) return from;
  into.resize(how->bytes);
  return into;
}

void comes_back(const Bytes& from) {
  Reduced how;
  const Bytes stored = reduced(from, &how);
  EXPECT_EQ(stored.size(), how.bytes);
  Bytes back(from.size());
  ASSERT_TRUE(expand(stored, how.width, back));
  EXPECT_EQ(back, from);
}

class Reduction : public testing::Test {
 protected:
  Bytes floats(size_t bytes) {
    std::normal_distribution<float> normal(0, 1e-3F);
    return bytes_of<float>(bytes, [&] { return normal(random_); });
  }
  Bytes noise(size_t bytes) {
    return bytes_of<uint32_t>(bytes, [&] { return static_cast<uint32_t>(random_()); });
  }

  std::mt19937 random_{15};
};

TEST_F(Reduction, EverythingComesBack) {
  for (const size_t bytes : {0, 1, 3, 4095, 4096, 4097, 65536, 100'003, 1 << 20, 4 << 20}) {
    comes_back(floats(bytes));
    comes_back(noise(bytes));
    comes_back(Bytes(bytes, std::byte{7}));
  }
}

TEST_F(Reduction, FloatsGetSmallerByTheirElements) {
  Reduced how;
  const Bytes four = reduced(floats(4 << 20), &how);
  EXPECT_EQ(how.width, 4U);
  EXPECT_LT(four.size(), (4 << 20) * 0.86);
  std::normal_distribution<double> normal(0, 1e-3);
  reduced(bytes_of<double>(4 << 20, [&] { return normal(random_); }), &how);
  EXPECT_EQ(how.width, 8U);
  const Bytes narrow = bytes_of<uint16_t>(4 << 20, [&] {
    const auto value = static_cast<float>(normal(random_));
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>(bits >> 16);  // a bfloat16
  });
  EXPECT_LT(reduced(narrow, &how).size(), (4 << 20) * 0.75);
  EXPECT_EQ(how.width, 2U);
  EXPECT_LE(reduced(Bytes(4 << 20), &how).size(), kReducedAlign);
}

TEST_F(Reduction, NoiseStaysAsItIs) {
  Reduced how;
  reduced(noise(4 << 20), &how);
  EXPECT_EQ(how.width, 0U);
  EXPECT_EQ(how.bytes, 4U << 20);
}

TEST_F(Reduction, WhatIsStoredIsStandardFrames) {
  const Bytes from = floats(1 << 20);
  Reduced how;
  const Bytes stored = reduced(from, &how);
  EXPECT_EQ(stored.size() % kReducedAlign, 0U);
  Bytes groups(from.size());
  ASSERT_EQ(ZSTD_decompress(groups.data(), groups.size(), stored.data(), stored.size()),
            from.size());
  for (size_t i = 0; i < from.size() / 4; ++i) {
    for (size_t b = 0; b < 4; ++b) ASSERT_EQ(groups[b * from.size() / 4 + i], from[4 * i + b]);
  }
}

TEST_F(Reduction, OtherBytesAreNoChunk) {
  const Bytes from = floats(100'000);
  Reduced how;
  const Bytes stored = reduced(from, &how);
  Bytes back(from.size());
  const auto code = [&](std::span<const std::byte> given, uint32_t width, size_t bytes) {
    Bytes into(bytes);
    const Status status = expand(given, width, into);
    return status ? Code::invalid_argument : status.error().code;
  };
  EXPECT_EQ(code(stored, 3, from.size()), Code::corruption);
  EXPECT_EQ(code(stored, 4, from.size() - 1), Code::corruption);
  EXPECT_EQ(code(stored, 4, from.size() + 1), Code::corruption);
  EXPECT_EQ(code(stored, 0, from.size()), Code::corruption);
  EXPECT_EQ(code(std::span(stored).first(stored.size() / 2), 4, from.size()), Code::corruption);
  EXPECT_EQ(code({}, 4, from.size()), Code::corruption);
  for (int round = 0; round < 500; ++round) {  // must end, within its memory
    Bytes damaged = stored;
    for (int i = 0; i < 3; ++i)
      damaged[random_() % damaged.size()] = static_cast<std::byte>(random_());
    (void)expand(damaged, 4, back);
    (void)expand(noise(random_() % 5000), 4, back);
  }
}

}  // namespace
}  // namespace stoker::codec
