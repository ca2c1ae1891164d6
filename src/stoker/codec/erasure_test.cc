#include "stoker/codec/erasure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <isa-l/erasure_code.h>

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "stoker/base/crc32c.h"

namespace stoker::codec {
namespace {

using Bytes = std::vector<std::byte>;
using Crcs = std::vector<uint32_t>;
using testing::HasSubstr;

ErasureCode code(int k, int m, Arithmetic arithmetic = Arithmetic::isal) {
  return ErasureCode::make(k, m, arithmetic).value();
}

Bytes random_bytes(size_t size, std::mt19937& random) {
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

Crcs crcs_of(std::span<const std::byte> bytes) {
  Crcs crcs;
  for (size_t at = 0; at < bytes.size(); at += kCrcBlock)
    crcs.push_back(crc32c(bytes.data() + at, std::min(kCrcBlock, bytes.size() - at)));
  return crcs;
}

// The chunks of one stripe, each in memory of its own, so that the address sanitizer sees any byte
// too far.
struct Stripe {
  std::vector<Bytes> chunks;
  int k;

  Stripe(int data, int parity, size_t bytes, std::mt19937& random)
      : chunks(data + parity), k(data) {
    for (Bytes& chunk : chunks) chunk = random_bytes(bytes, random);
  }
  int m() const { return static_cast<int>(chunks.size()) - k; }

  // [offset, offset + bytes) of chunks first to last.
  std::vector<Source> sources(int first, int last, size_t offset = 0,
                              size_t bytes = std::dynamic_extent) const {
    std::vector<Source> result;
    for (int i = first; i < last; ++i)
      result.push_back({std::span(chunks[i]).subspan(offset, bytes), {}});
    return result;
  }
  std::vector<Target> targets(int first, int last, size_t offset = 0,
                              size_t bytes = std::dynamic_extent) {
    std::vector<Target> result;
    for (int i = first; i < last; ++i)
      result.push_back({std::span(chunks[i]).subspan(offset, bytes), {}});
    return result;
  }
  std::vector<Source> data() const { return sources(0, k); }
  std::vector<Target> parity() { return targets(k, k + m()); }
};

Stripe encoded(int k, int m, size_t bytes, std::mt19937& random) {
  Stripe stripe(k, m, bytes, random);
  EXPECT_TRUE(code(k, m, Arithmetic::scalar).encode(stripe.data(), stripe.parity()));
  return stripe;
}

// Decodes the chunks in `rebuild` from those not in `lost` (bits), and compares with `whole`.
void expect_rebuilt(const ErasureCode& coder, const Stripe& whole, uint32_t lost,
                    uint32_t rebuild) {
  const int n = coder.k() + coder.m();
  std::vector<Source> present = whole.sources(0, n);
  std::vector<Target> wanted(n);
  std::vector<Bytes> made(n);
  std::vector<Crcs> made_crcs(n);
  const size_t bytes = whole.chunks[0].size();
  for (int i = 0; i < n; ++i) {
    if ((lost >> i & 1U) != 0) present[i] = {};
    if ((rebuild >> i & 1U) == 0) continue;
    made[i].resize(bytes);
    made_crcs[i].resize(crc_blocks(bytes));
    wanted[i] = {made[i], made_crcs[i]};
  }
  const Status status = coder.decode(present, wanted);
  ASSERT_TRUE(status) << status.error().message();
  for (int i = 0; i < n; ++i) {
    if ((rebuild >> i & 1U) == 0) continue;
    ASSERT_EQ(made[i], whole.chunks[i])
        << coder.k() << "+" << coder.m() << " lost " << lost << " chunk " << i;
    ASSERT_EQ(made_crcs[i], crcs_of(whole.chunks[i]));
  }
}

// Every set of 1 to m losses.
int expect_all_losses(const ErasureCode& coder, const Stripe& whole) {
  int patterns = 0;
  for (uint32_t lost = 1; lost < 1U << (coder.k() + coder.m()); ++lost) {
    if (std::popcount(lost) > coder.m()) continue;
    expect_rebuilt(coder, whole, lost, lost);
    if (testing::Test::HasFatalFailure()) return patterns;
    ++patterns;
  }
  return patterns;
}

struct Shape {
  int k, m, patterns;  // patterns: the sum of ((k + m) over i) for i from 1 to m
};
class EveryLoss : public testing::TestWithParam<std::tuple<Shape, Arithmetic>> {};

TEST_P(EveryLoss, IsRebuilt) {
  const auto [shape, arithmetic] = GetParam();
  std::mt19937 random(1);
  const Stripe whole = encoded(shape.k, shape.m, 333, random);
  EXPECT_EQ(expect_all_losses(code(shape.k, shape.m, arithmetic), whole), shape.patterns);
}

INSTANTIATE_TEST_SUITE_P(Erasure, EveryLoss,
                         testing::Combine(testing::Values(Shape{4, 2, 21}, Shape{6, 3, 129},
                                                          Shape{10, 4, 1470}, Shape{1, 1, 2},
                                                          Shape{1, 3, 14}, Shape{5, 1, 6}),
                                          testing::Values(Arithmetic::isal, Arithmetic::scalar)));

#ifdef __x86_64__
// ISA-L chooses one of its forms by the processor; by their names, each machine compares the
// others.
TEST(Erasure, EveryFormOfIsalEqualsTheReference) {
  struct Form {
    decltype(&ec_encode_data_base) encode;
    decltype(&ec_encode_data_update_base) update;
    bool runs;
  };
  const Form forms[] = {
      {ec_encode_data_base, ec_encode_data_update_base, true},
      {ec_encode_data_sse, ec_encode_data_update_sse, __builtin_cpu_supports("sse4.1") != 0},
      {ec_encode_data_avx, ec_encode_data_update_avx, __builtin_cpu_supports("avx") != 0},
      {ec_encode_data_avx2, ec_encode_data_update_avx2, __builtin_cpu_supports("avx2") != 0}};
  constexpr int k = 6, m = 3;
  std::array<unsigned char, (k + m) * k> matrix{};
  gf_gen_cauchy1_matrix(matrix.data(), k + m, k);
  std::vector<unsigned char> tables(32 * k * m);
  ec_init_tables(k, m, matrix.data() + k * k, tables.data());
  std::mt19937 random(9);
  for (const size_t bytes : {64UL, 65UL, 127UL, 1000UL, 4096UL, 4099UL}) {
    Stripe whole = encoded(k, m, bytes, random);
    std::vector<unsigned char*> data, parity;
    for (int i = 0; i < k; ++i)
      data.push_back(reinterpret_cast<unsigned char*>(whole.chunks[i].data()));
    for (const Form& form : forms) {
      if (!form.runs) continue;
      std::vector<Bytes> encoded_at_once(m, Bytes(bytes)), updated(m, Bytes(bytes));
      for (auto* made : {&encoded_at_once, &updated}) {
        parity.clear();
        for (Bytes& chunk : *made) parity.push_back(reinterpret_cast<unsigned char*>(chunk.data()));
        const int size = static_cast<int>(bytes);
        if (made == &encoded_at_once)
          form.encode(size, k, m, tables.data(), data.data(), parity.data());
        for (int i = 0; made == &updated && i < k; ++i) {
          form.update(size, k, m, i, tables.data(), data[i], parity.data());
        }
        for (int j = 0; j < m; ++j) EXPECT_EQ((*made)[j], whole.chunks[k + j]) << bytes << " " << j;
      }
    }
  }
}
#endif

TEST(Erasure, EveryShapeOfSixteenSurvivesEveryLoss) {
  std::mt19937 random(2);
  int patterns = 0;
  for (int k = 1; k < 16; ++k)
    patterns += expect_all_losses(code(k, 16 - k), encoded(k, 16 - k, 64, random));
  EXPECT_EQ(patterns, 524272);  // over m from 1 to 15, the sums of (16 over i) for i from 1 to m
}

TEST(Erasure, AnySubsetOfTheLossesCanBeWanted) {
  std::mt19937 random(3);
  const ErasureCode coder = code(6, 3);
  const Stripe whole = encoded(6, 3, 100, random);
  for (uint32_t lost = 1; lost < 1U << 9; ++lost) {
    if (std::popcount(lost) > 3) continue;
    for (uint32_t rebuild = lost; rebuild > 0; rebuild = (rebuild - 1) & lost)
      expect_rebuilt(coder, whole, lost, rebuild);
  }
}

TEST(Erasure, LargestCodesSurviveRandomLosses) {
  std::mt19937 random(4);
  for (const int k : {1, 8, 16, 24, 28, 31}) {
    const int m = kChunksMax - k;
    const Stripe whole = encoded(k, m, 200, random);
    for (int round = 0; round < 20; ++round) {
      std::vector<int> chunks(kChunksMax);
      std::iota(chunks.begin(), chunks.end(), 0);
      std::shuffle(chunks.begin(), chunks.end(), random);
      uint32_t lost = 0;
      for (int i = 0; i < m; ++i) lost |= 1U << chunks[i];
      expect_rebuilt(code(k, m), whole, lost, lost);
    }
  }
}

TEST(Erasure, FastEqualsScalarAtEveryLengthAndAlignment) {
  std::mt19937 random(5);
  std::vector<size_t> lengths(300);
  std::iota(lengths.begin(), lengths.end(), 1);
  for (const size_t near : {size_t{1024}, kCrcBlock, 2 * kCrcBlock, 5 * kCrcBlock})
    lengths.insert(lengths.end(), {near - 1, near, near + 1});
  for (const size_t bytes : lengths) {
    const int k = 1 + static_cast<int>(random() % 12);
    const int m = 1 + static_cast<int>(random() % 8);
    const size_t offset = random() % 64;
    Stripe stripe(k, m, offset + bytes, random);
    Stripe expected = stripe;
    ASSERT_TRUE(code(k, m).encode(stripe.sources(0, k, offset), stripe.targets(k, k + m, offset)));
    ASSERT_TRUE(code(k, m, Arithmetic::scalar)
                    .encode(expected.sources(0, k, offset), expected.targets(k, k + m, offset)));
    ASSERT_EQ(stripe.chunks, expected.chunks) << k << "+" << m << " " << bytes << " at " << offset;

    const int chunk = static_cast<int>(random() % k);
    const Bytes newer = random_bytes(bytes, random);
    const auto older = std::span(stripe.chunks[chunk]).subspan(offset);
    ASSERT_TRUE(code(k, m).delta(chunk, older, {newer, {}}, stripe.targets(k, k + m, offset)));
    ASSERT_TRUE(code(k, m, Arithmetic::scalar)
                    .delta(chunk, older, {newer, {}}, expected.targets(k, k + m, offset)));
    ASSERT_EQ(stripe.chunks, expected.chunks)
        << k << "+" << m << " delta of " << bytes << " at " << offset;
  }
}

// Longer than the pieces in which a range without CRCs is walked.
TEST(Erasure, LongRangesAreWalkedWhole) {
  std::mt19937 random(6);
  const size_t bytes = 600 * kKiB + 7;
  Stripe stripe(3, 2, bytes, random);
  Stripe expected = stripe;
  ASSERT_TRUE(code(3, 2).encode(stripe.data(), stripe.parity()));
  ASSERT_TRUE(code(3, 2, Arithmetic::scalar).encode(expected.data(), expected.parity()));
  EXPECT_EQ(stripe.chunks, expected.chunks);
  expect_rebuilt(code(3, 2), stripe, 0b01010, 0b01010);

  const Bytes newer = random_bytes(bytes, random);
  ASSERT_TRUE(code(3, 2).delta(1, stripe.chunks[1], {newer, {}}, stripe.parity()));
  expected.chunks[1] = newer;
  ASSERT_TRUE(code(3, 2).encode(expected.data(), expected.parity()));
  EXPECT_EQ(stripe.chunks[3], expected.chunks[3]);
  EXPECT_EQ(stripe.chunks[4], expected.chunks[4]);
}

// Changes to all chunks, overlapping ones too, applied in an order of their own to parities that
// see them in any order.
TEST(Erasure, DeltasInAnyOrderGiveTheParityOfAFullEncode) {
  std::mt19937 random(7);
  const ErasureCode coder = code(4, 2);
  const size_t bytes = 2 * kCrcBlock + 99;
  const Stripe before = encoded(4, 2, bytes, random);
  struct Change {
    int chunk;
    size_t offset;
    Bytes older, newer;
  };
  Stripe after = before;
  std::vector<Change> changes;
  for (const int chunk : {0, 1, 2, 3, 1}) {
    const size_t offset = random() % bytes;
    const size_t length = 1 + random() % (bytes - offset);
    const auto at = after.chunks[chunk].begin() + static_cast<ptrdiff_t>(offset);
    Change change{chunk, offset, Bytes(at, at + static_cast<ptrdiff_t>(length)),
                  random_bytes(length, random)};
    std::copy(change.newer.begin(), change.newer.end(), at);
    changes.push_back(std::move(change));
  }
  ASSERT_TRUE(coder.encode(after.data(), after.parity()));

  std::vector<int> order(changes.size());
  std::iota(order.begin(), order.end(), 0);
  int orders = 0;
  do {
    Stripe stripe = before;
    for (const int i : order) {
      const Change& change = changes[i];
      ASSERT_TRUE(coder.delta(change.chunk, change.older, {change.newer, {}},
                              stripe.targets(4, 6, change.offset, change.newer.size())));
    }
    ASSERT_EQ(stripe.chunks[4], after.chunks[4]);
    ASSERT_EQ(stripe.chunks[5], after.chunks[5]);
    ++orders;
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(orders, 120);
}

// One page of zeros can stand for all chunks that were never written.
TEST(Erasure, SlicesThatAreOnlyReadMayShareMemory) {
  std::mt19937 random(14);
  const Bytes zeros(500);
  Stripe stripe(4, 2, 500, random);
  for (const int i : {0, 1, 3}) stripe.chunks[i] = zeros;
  std::vector<Source> data(4, Source{zeros, {}});
  data[2] = {stripe.chunks[2], {}};
  ASSERT_TRUE(code(4, 2).encode(data, stripe.parity()));
  expect_rebuilt(code(4, 2), stripe, 0b001100, 0b001100);
  // no change at all
  ASSERT_TRUE(code(4, 2).delta(2, stripe.chunks[2], {stripe.chunks[2], {}}, stripe.parity()));
  expect_rebuilt(code(4, 2), stripe, 0b000101, 0b000101);
}

TEST(Erasure, DeltaIntoAsManyParitiesAsCanBe) {
  std::mt19937 random(15);
  Stripe stripe = encoded(1, 31, 100, random);
  const Bytes newer = random_bytes(100, random);
  ASSERT_TRUE(code(1, 31).delta(0, stripe.chunks[0], {newer, {}}, stripe.parity()));
  stripe.chunks[0] = newer;
  expect_rebuilt(code(1, 31), stripe, 0x7fffffff, 0x7fffffff);
}

TEST(Erasure, DeltaTakesADifferenceAndSkipsAbsentParities) {
  std::mt19937 random(8);
  const size_t bytes = kCrcBlock + 1;
  const Stripe before = encoded(6, 3, bytes, random);
  Stripe expected = before;
  expected.chunks[2] = random_bytes(bytes, random);
  Bytes difference(bytes);
  std::transform(before.chunks[2].begin(), before.chunks[2].end(), expected.chunks[2].begin(),
                 difference.begin(), std::bit_xor<>());
  ASSERT_TRUE(code(6, 3).encode(expected.data(), expected.parity()));

  for (const Arithmetic arithmetic : {Arithmetic::isal, Arithmetic::scalar}) {
    Stripe stripe = before;
    auto parity = stripe.parity();
    parity[1] = {};
    ASSERT_TRUE(code(6, 3, arithmetic).delta(2, {}, {difference, {}}, parity));
    EXPECT_EQ(stripe.chunks[6], expected.chunks[6]);
    EXPECT_EQ(stripe.chunks[7], before.chunks[7]);
    EXPECT_EQ(stripe.chunks[8], expected.chunks[8]);
  }
}

// A range of the chunks gives the same range of what is made, and touches nothing else.
TEST(Erasure, SubRangesAtAnyOffset) {
  std::mt19937 random(9);
  const ErasureCode coder = code(6, 3);
  const size_t bytes = 3 * kCrcBlock;
  const Stripe whole = encoded(6, 3, bytes, random);
  for (int round = 0; round < 200; ++round) {
    const size_t offset = random() % bytes;
    const size_t length = 1 + random() % (bytes - offset);
    Stripe stripe = whole;
    const uint32_t lost = 1U << random() % 9 | 1U << random() % 9 | 1U << random() % 9;
    auto present = stripe.sources(0, 9, offset, length);
    auto wanted = stripe.targets(0, 9, offset, length);
    for (int i = 0; i < 9; ++i) {
      if ((lost >> i & 1U) == 0)
        wanted[i] = {};
      else
        present[i] = {};
    }
    for (const Target& target : wanted)
      std::fill(target.bytes.begin(), target.bytes.end(), std::byte{0});
    ASSERT_TRUE(coder.decode(present, wanted));
    ASSERT_EQ(stripe.chunks, whole.chunks) << lost << " " << offset << " " << length;

    auto parity = stripe.targets(6, 9, offset, length);
    for (const Target& target : parity)
      std::fill(target.bytes.begin(), target.bytes.end(), std::byte{0});
    ASSERT_TRUE(coder.encode(stripe.sources(0, 6, offset, length), parity));
    ASSERT_EQ(stripe.chunks, whole.chunks) << offset << " " << length;
  }
}

TEST(Erasure, ChecksumsAreThoseOfThePlainFunction) {
  std::mt19937 random(10);
  for (const Arithmetic arithmetic : {Arithmetic::isal, Arithmetic::scalar}) {
    const ErasureCode coder = code(4, 2, arithmetic);
    for (const size_t bytes : {size_t{1}, kCrcBlock - 1, kCrcBlock, kCrcBlock + 1, 3 * kCrcBlock,
                               3 * kCrcBlock + 1234}) {
      Stripe stripe(4, 2, bytes, random);
      std::vector<Crcs> crcs(6, Crcs(crc_blocks(bytes), 0xdead));
      auto data = stripe.data();
      auto parity = stripe.parity();
      for (int i = 0; i < 4; ++i) data[i].crcs = crcs[i];
      for (int j = 0; j < 2; ++j) parity[j].crcs = crcs[4 + j];
      ASSERT_TRUE(coder.encode(data, parity));
      for (int i = 0; i < 6; ++i)
        EXPECT_EQ(crcs[i], crcs_of(stripe.chunks[i])) << "encode, chunk " << i << ", " << bytes;

      // Of a present chunk that decoding did not need (5), too; not of one that asked for none (1).
      const Bytes lost = std::exchange(stripe.chunks[2], Bytes(bytes));
      std::vector<Crcs> sums(6, Crcs(crc_blocks(bytes), 0xdead));
      auto present = stripe.sources(0, 6);
      std::vector<Target> wanted(6);
      for (int i = 0; i < 6; ++i) present[i].crcs = sums[i];
      present[1].crcs = {};
      present[2] = {};
      wanted[2] = {stripe.chunks[2], sums[2]};
      ASSERT_TRUE(coder.decode(present, wanted));
      EXPECT_EQ(stripe.chunks[2], lost);
      crcs[1] = Crcs(crc_blocks(bytes), 0xdead);
      EXPECT_EQ(sums, crcs) << "decode, " << bytes;

      const Bytes newer = random_bytes(bytes, random);
      Crcs newer_crcs(crc_blocks(bytes));
      parity = stripe.parity();
      parity[1].crcs = crcs[5];
      ASSERT_TRUE(coder.delta(0, stripe.chunks[0], {newer, newer_crcs}, parity));
      EXPECT_EQ(newer_crcs, crcs_of(newer));
      EXPECT_EQ(crcs[5], crcs_of(stripe.chunks[5])) << "delta, " << bytes;
    }
  }
}

std::string refusal(const Status& status) {
  EXPECT_FALSE(status);
  if (status) return "";
  EXPECT_EQ(status.error().code, Code::invalid_argument);
  return status.error().what;
}

TEST(Erasure, CodesThatCannotBeAreRefused) {
  for (const auto& [k, m] : {std::pair{0, 3},
                             {6, 0},
                             {-1, 3},
                             {6, -1},
                             {30, 3},
                             {32, 1},
                             {1, 32},
                             {2147483647, 2147483647}}) {
    const auto made = ErasureCode::make(k, m);
    ASSERT_FALSE(made) << k << "+" << m;
    EXPECT_EQ(made.error().code, Code::invalid_argument);
    EXPECT_THAT(made.error().what,
                HasSubstr("a code of " + std::to_string(k) + "+" + std::to_string(m)));
  }
  EXPECT_TRUE(ErasureCode::make(31, 1));
  EXPECT_TRUE(ErasureCode::make(1, 31));
}

TEST(Erasure, EncodeRefusesWhatDoesNotFit) {
  std::mt19937 random(11);
  const ErasureCode coder = code(4, 2);
  Stripe stripe(4, 2, 5000, random);
  const auto data = stripe.data();
  const auto parity = stripe.parity();
  EXPECT_THAT(refusal(coder.encode(std::span(data).first(3), parity)),
              HasSubstr("takes 4 data slices, and was given 3"));
  EXPECT_THAT(refusal(coder.encode(data, std::span(parity).first(1))),
              HasSubstr("takes 2 parity slices, and was given 1"));

  auto broken = data;
  broken[2] = {};
  EXPECT_THAT(refusal(coder.encode(broken, parity)), HasSubstr("slice of chunk 2 is missing"));
  auto broken_parity = parity;
  broken_parity[1] = {};
  EXPECT_THAT(refusal(coder.encode(data, broken_parity)), HasSubstr("slice of chunk 5 is missing"));

  broken = data;
  broken[3].bytes = broken[3].bytes.first(4999);
  EXPECT_THAT(refusal(coder.encode(broken, parity)),
              HasSubstr("chunk 3 has 4999 bytes and that of chunk 0 has 5000"));
  broken_parity = parity;
  broken_parity[0].bytes = broken_parity[0].bytes.first(1);
  EXPECT_THAT(refusal(coder.encode(data, broken_parity)), HasSubstr("chunk 4 has 1 bytes"));

  Crcs crcs(3);
  broken = data;
  broken[0].crcs = crcs;
  EXPECT_THAT(refusal(coder.encode(broken, parity)),
              HasSubstr("room for 3 CRCs of chunk 0, where a slice of 5000 bytes has 2"));

  broken_parity = parity;
  broken_parity[1] = broken_parity[0];
  EXPECT_THAT(refusal(coder.encode(data, broken_parity)),
              HasSubstr("chunk 4 and chunk 5 share memory"));
  broken = data;
  broken[1].bytes = parity[1].bytes;
  EXPECT_THAT(refusal(coder.encode(broken, parity)), HasSubstr("chunk 1 and chunk 5 share memory"));
}

TEST(Erasure, DecodeRefusesWhatDoesNotFit) {
  std::mt19937 random(12);
  const ErasureCode coder = code(4, 2);
  const Stripe whole = encoded(4, 2, 100, random);
  Bytes made(100);
  auto present = whole.sources(0, 6);
  std::vector<Target> wanted(6);
  EXPECT_THAT(refusal(coder.decode(present, wanted)), HasSubstr("asked for no chunk"));
  wanted[3] = {made, {}};
  EXPECT_THAT(refusal(coder.decode(present, wanted)),
              HasSubstr("chunk 3 is both present and wanted"));
  present[3] = present[0] = present[4] = {};
  EXPECT_THAT(refusal(coder.decode(present, wanted)),
              HasSubstr("3 of 6 chunks are present, and a code of 4+2 needs 4"));
  EXPECT_EQ(made, Bytes(100));  // nothing was written
  EXPECT_THAT(refusal(coder.decode(std::span(present).first(5), wanted)), HasSubstr("6 places"));
  EXPECT_THAT(refusal(coder.decode(present, std::span(wanted).first(5))), HasSubstr("6 places"));
  present = whole.sources(0, 6);
  present[3] = {};
  present[5].bytes = present[5].bytes.first(99);
  EXPECT_THAT(refusal(coder.decode(present, wanted)), HasSubstr("chunk 5 has 99 bytes"));
}

TEST(Erasure, DeltaRefusesWhatDoesNotFit) {
  std::mt19937 random(13);
  const ErasureCode coder = code(4, 2);
  Stripe stripe = encoded(4, 2, 100, random);
  const Bytes newer = random_bytes(100, random);
  const Bytes longer = random_bytes(101, random);
  const auto parity = stripe.parity();
  for (const int chunk : {-1, 4})
    EXPECT_THAT(refusal(coder.delta(chunk, stripe.chunks[0], {newer, {}}, parity)),
                HasSubstr("there is no data chunk"));
  EXPECT_THAT(refusal(coder.delta(0, stripe.chunks[0], {}, parity)),
              HasSubstr("needs the new bytes"));
  EXPECT_THAT(refusal(coder.delta(0, longer, {newer, {}}, parity)), HasSubstr("101 bytes"));
  EXPECT_THAT(refusal(coder.delta(0, {}, {longer, {}}, parity)), HasSubstr("101"));
  EXPECT_THAT(refusal(coder.delta(0, {}, {newer, {}}, std::span(parity).first(1))),
              HasSubstr("takes 2 places"));
  EXPECT_THAT(refusal(coder.delta(0, {}, {newer, {}}, std::vector<Target>(2))),
              HasSubstr("no parity"));
  EXPECT_THAT(refusal(coder.delta(0, {}, {parity[0].bytes, {}}, parity)),
              HasSubstr("share memory"));
}

}  // namespace
}  // namespace stoker::codec
