#include "stoker/data/unpack.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include <zlib.h>
#include <zstd.h>

namespace stoker::data {
namespace {

// Memory for the bytes behind the first `done` ones; none: there is no room for more.
using Room = std::function<std::span<std::byte>(uint64_t done)>;

Error damaged(const std::string& why) { return fail(Code::corruption, "{}", why); }
Error cut() { return damaged("it ends in the middle of its data: it was cut"); }

// Where a decompressor writes. Where there is no room it gets one byte, which must stay unused: it
// may still have a checksum to read.
class Output {
 public:
  explicit Output(const Room& room) : room_(room), rest_(room(0)) {}

  std::span<std::byte> rest() const { return rest_.empty() ? std::span(spare_) : rest_; }
  Status wrote(size_t bytes) {
    if (bytes == 0) return {};
    if (rest_.empty())
      return damaged("it unpacks to more than the " + std::to_string(done_) +
                     " bytes that it should have");
    done_ += bytes;
    rest_ = rest_.subspan(bytes);
    if (rest_.empty()) rest_ = room_(done_);
    return {};
  }
  uint64_t done() const { return done_; }

 private:
  const Room& room_;
  std::span<std::byte> rest_;
  mutable std::array<std::byte, 1> spare_{};
  uint64_t done_ = 0;
};

Result<uint64_t> gunzip(std::span<const std::byte> packed, const Room& room) {
  constexpr size_t kAtOnce = size_t{1} << 30;  // zlib counts in 32 bits
  constexpr int kGzip = 16;                    // a header and a CRC-32, not those of zlib
  z_stream stream{};
  if (inflateInit2(&stream, MAX_WBITS + kGzip) != Z_OK)
    return fail(ENOMEM, "zlib has no memory left to unpack");
  const std::unique_ptr<z_stream, int (*)(z_stream*)> ends(&stream, inflateEnd);
  Output output(room);
  while (!packed.empty()) {
    const std::span<std::byte> to = output.rest();
    const auto in = static_cast<uInt>(std::min(packed.size(), kAtOnce));
    const auto out = static_cast<uInt>(std::min(to.size(), kAtOnce));
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(packed.data()));
    stream.avail_in = in;
    stream.next_out = reinterpret_cast<Bytef*>(to.data());
    stream.avail_out = out;
    const int status = inflate(&stream, Z_NO_FLUSH);
    packed = packed.subspan(in - stream.avail_in);
    STOKER_TRY(output.wrote(out - stream.avail_out));
    if (status == Z_STREAM_END) {
      // Zeros may follow, then another member.
      while (!packed.empty() && packed.front() == std::byte{0}) packed = packed.subspan(1);
      if (packed.empty()) return output.done();
      inflateReset(&stream);
    } else if (status != Z_OK) {
      return damaged(stream.msg != nullptr ? stream.msg : "it is not gzip data");
    }
  }
  return cut();
}

Result<uint64_t> unzstd(std::span<const std::byte> packed, const Room& room) {
  const std::unique_ptr<ZSTD_DStream, size_t (*)(ZSTD_DStream*)> stream(ZSTD_createDStream(),
                                                                        ZSTD_freeDStream);
  if (!stream) return fail(ENOMEM, "zstd has no memory left to unpack");
  Output output(room);
  ZSTD_inBuffer in{packed.data(), packed.size(), 0};
  size_t left = 1;  // 0: a frame is over
  for (;;) {
    const std::span<std::byte> to = output.rest();
    ZSTD_outBuffer out{to.data(), to.size(), 0};
    const size_t before = in.pos;
    if (left == 0 && in.pos == in.size) return output.done();
    left = ZSTD_decompressStream(stream.get(), &out, &in);
    if (ZSTD_isError(left) != 0) return damaged(ZSTD_getErrorName(left));
    STOKER_TRY(output.wrote(out.pos));
    if (left != 0 && in.pos == in.size && in.pos == before && out.pos == 0) return cut();
  }
}

Result<uint64_t> run(Packing packing, std::span<const std::byte> packed, const Room& room) {
  if (packed.empty()) return damaged("it has no bytes: it was cut");
  switch (packing) {
    case Packing::gzip:
      return gunzip(packed, room);
    case Packing::zstd:
      return unzstd(packed, room);
    case Packing::none:
      break;
  }
  return fail(Code::invalid_argument, "it is not compressed");
}

}  // namespace

std::optional<Packing> packing_of(std::string_view name) {
  if (name.empty()) return Packing::none;
  if (name == "gz") return Packing::gzip;
  if (name == "zstd") return Packing::zstd;
  return {};
}

Status unpack(Packing packing, std::span<const std::byte> packed, std::span<std::byte> into) {
  STOKER_ASSIGN(const uint64_t bytes,
                run(packing, packed, [into](uint64_t done) { return into.subspan(done); }));
  if (bytes == into.size()) return {};
  return damaged("it unpacks to " + std::to_string(bytes) + " bytes, and should have " +
                 std::to_string(into.size()));
}

Result<std::vector<std::byte>> unpack_all(Packing packing, std::span<const std::byte> packed,
                                          uint64_t most) {
  std::vector<std::byte> all;
  STOKER_ASSIGN(const uint64_t bytes, run(packing, packed, [&](uint64_t done) {
                  if (done == all.size()) {
                    const uint64_t larger = std::max({4 * packed.size(), 2 * all.size()});
                    all.resize(std::min<uint64_t>(most, larger));
                  }
                  return std::span(all).subspan(done);
                }));
  all.resize(bytes);
  return all;
}

}  // namespace stoker::data
