#include "stoker/data/unpack.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include <zlib.h>
#include <zstd.h>

namespace stoker::data {
namespace {

using Bytes = std::vector<std::byte>;

Bytes bytes_of(const std::string& text) {
  const auto* const at = reinterpret_cast<const std::byte*>(text.data());
  return {at, at + text.size()};
}
std::string text_of(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Bytes gzipped(const std::string& text) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  Bytes out(deflateBound(&stream, text.size()) + 64);
  Bytes in = bytes_of(text);
  stream.next_in = reinterpret_cast<Bytef*>(in.data());
  stream.avail_in = static_cast<uInt>(in.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

Bytes zstd_of(const std::string& text) {
  ZSTD_CCtx* const context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
  Bytes out(ZSTD_compressBound(text.size()));
  out.resize(ZSTD_compress2(context, out.data(), out.size(), text.data(), text.size()));
  ZSTD_freeCCtx(context);
  return out;
}

// A text that is neither empty nor all the same, and longer than what is unpacked at once.
std::string some_text(size_t bytes) {
  std::string text(bytes, ' ');
  uint32_t state = 1;
  for (char& each : text) {
    state = state * 1664525 + 1013904223;
    each = static_cast<char>('a' + (state >> 28));
  }
  return text;
}

class Unpacking : public testing::TestWithParam<Packing> {
 protected:
  static Bytes pack(const std::string& text) {
    return GetParam() == Packing::gzip ? gzipped(text) : zstd_of(text);
  }
};

TEST_P(Unpacking, BytesComeBack) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{5000}, size_t{700'000}}) {
    const std::string text = some_text(size);
    const Bytes packed = pack(text);
    Bytes raw(size);
    EXPECT_TRUE(unpack(GetParam(), packed, raw)) << size;
    EXPECT_EQ(text_of(raw), text);
    EXPECT_EQ(text_of(unpack_all(GetParam(), packed, 1 << 20).value()), text);
  }
}

TEST_P(Unpacking, MembersFollowOneAnother) {
  Bytes packed = pack("one ");
  const Bytes second = pack("two");
  packed.insert(packed.end(), second.begin(), second.end());
  EXPECT_EQ(text_of(unpack_all(GetParam(), packed, 100).value()), "one two");
}

TEST_P(Unpacking, OtherSizesAreErrors) {
  const Bytes packed = pack("ten bytes.");
  for (const size_t size : {0, 9, 11}) {
    Bytes raw(size);
    const Status status = unpack(GetParam(), packed, raw);
    ASSERT_FALSE(status) << size;
    EXPECT_EQ(status.error().code, Code::corruption);
  }
  EXPECT_FALSE(unpack_all(GetParam(), packed, 9));
  EXPECT_TRUE(unpack_all(GetParam(), packed, 10));
}

TEST_P(Unpacking, EveryCutIsFound) {
  const std::string text = some_text(3000);
  const Bytes packed = pack(text);
  Bytes raw(text.size());
  for (size_t kept = 0; kept < packed.size(); ++kept) {
    const Status status = unpack(GetParam(), std::span(packed).first(kept), raw);
    ASSERT_FALSE(status) << kept;
    EXPECT_EQ(status.error().code, Code::corruption);
  }
}

TEST_P(Unpacking, EveryFlippedByteIsFoundOrChangesNothing) {
  const std::string text = some_text(3000);
  const Bytes packed = pack(text);
  for (size_t at = 0; at < packed.size(); ++at) {
    Bytes wrong = packed;
    wrong[at] ^= std::byte{0x41};
    Bytes raw(text.size());
    // Some bytes of a header of gzip say nothing of the data.
    if (unpack(GetParam(), wrong, raw)) {
      EXPECT_EQ(text_of(raw), text) << at;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Unpacking, testing::Values(Packing::gzip, Packing::zstd),
                         [](const auto& each) {
                           return each.param == Packing::gzip ? std::string("gzip")
                                                              : std::string("zstd");
                         });

TEST(UnpackingGzip, ZerosMayFollow) {
  Bytes packed = gzipped("text");
  packed.resize(packed.size() + 512);
  EXPECT_EQ(text_of(unpack_all(Packing::gzip, packed, 100).value()), "text");
}

TEST(UnpackingNames, AreThoseOfAnIndex) {
  EXPECT_EQ(packing_of(""), Packing::none);
  EXPECT_EQ(packing_of("gz"), Packing::gzip);
  EXPECT_EQ(packing_of("zstd"), Packing::zstd);
  EXPECT_FALSE(packing_of("br"));
}

}  // namespace
}  // namespace stoker::data
