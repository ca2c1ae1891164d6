// The decoder of images on any bytes: it ends, writes all of the result or says why not, and writes
// nothing beside it.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "stoker/base/check.h"
#include "stoker/data/jpeg.h"

using namespace stoker::data;

namespace {

constexpr uint64_t kMostPixels = uint64_t{1} << 22;  // larger ones take long and show nothing new

// Whether anything that could be a frame header tells of more pixels than that.
bool is_large(std::span<const uint8_t> file) {
  for (size_t at = 2; at + 9 <= file.size();) {
    if (file[at] != 0xff) {
      ++at;
      continue;
    }
    const uint8_t marker = file[at + 1];
    const bool frame =
        marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc;
    if (frame) {
      const uint64_t height = file[at + 5] * 256U + file[at + 6];
      const uint64_t width = file[at + 7] * 256U + file[at + 8];
      if (height * width > kMostPixels) return true;
    }
    ++at;
  }
  return false;
}

}  // namespace

// The first four bytes choose what is made of the image, the rest is the file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kChoices = 4;
  if (size < kChoices) return 0;
  JpegOptions options;
  options.height = 1 + data[0] % 64;
  options.width = 1 + data[1] % 64;
  options.crop = static_cast<Crop>(data[2] % 3);
  options.flip = (data[2] & 4) != 0;
  if ((data[2] & 8) != 0) options.normalise = Normalise{{0.5F, 0.5F, 0.5F}, {0.2F, 0.2F, 0.2F}};
  options.seed = data[3];
  STOKER_CHECK(check(options));
  const std::span<const uint8_t> file(data + kChoices, size - kChoices);
  if (is_large(file)) return 0;

  // Guards on both sides: SIMD could write behind a row without a fault.
  constexpr size_t kGuard = 256;
  constexpr std::byte kMark{0xa5};
  std::vector<std::byte> memory(options.bytes() + 2 * kGuard, kMark);
  const auto done =
      decode_jpeg(std::as_bytes(file), options, 1, options.seed, memory.data() + kGuard);
  const auto marked = [&](auto from) {
    return std::all_of(from, from + kGuard, [](std::byte each) { return each == kMark; });
  };
  STOKER_CHECK(marked(memory.begin()) && marked(memory.end() - kGuard));
  if (done) {
    STOKER_CHECK(is_jpeg(std::as_bytes(file)));
    // The same again, byte for byte: nothing of it is left over from other memory.
    std::vector<std::byte> again(options.bytes(), std::byte{0x5a});
    STOKER_CHECK(decode_jpeg(std::as_bytes(file), options, 1, options.seed, again.data()));
    STOKER_CHECK(std::memcmp(again.data(), memory.data() + kGuard, again.size()) == 0);
  }
  return 0;
}
