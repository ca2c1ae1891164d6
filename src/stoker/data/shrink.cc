#include "stoker/data/shrink.h"

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "stoker/data/jpeg.h"
#include "stoker/data/jpeg_errors.h"

namespace stoker::data {
namespace {

// The encoder and what it wrote.
struct Encoder {
  Encoder() {
    info.err = jpeg_std_error(&errors.base);
    errors.base.error_exit = leave_jpeg;
  }
  ~Encoder() {
    jpeg_destroy_compress(&info);
    std::free(file);  // NOLINT(cppcoreguidelines-no-malloc): libjpeg's
  }
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  jpeg_compress_struct info{};
  JpegErrors errors{};
  unsigned char* file = nullptr;
  unsigned long bytes = 0;  // NOLINT(google-runtime-int): libjpeg's
};

// Nothing with a destructor may be made between setjmp() and the call that leaves.
bool encode(Encoder& encoder, const JpegOptions& of, int quality, std::byte* pixels) {
  if (setjmp(encoder.errors.out) != 0) return false;  // NOLINT(cert-err52-cpp)
  jpeg_compress_struct& info = encoder.info;
  jpeg_create_compress(&info);
  jpeg_mem_dest(&info, &encoder.file, &encoder.bytes);
  info.image_width = of.width;
  info.image_height = of.height;
  info.input_components = 3;
  info.in_color_space = JCS_RGB;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, quality, TRUE);
  info.optimize_coding = TRUE;
  jpeg_start_compress(&info, TRUE);
  while (info.next_scanline < info.image_height) {
    auto* row =
        reinterpret_cast<JSAMPROW>(pixels + size_t{3} * of.width * size_t{info.next_scanline});
    (void)jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  return true;
}

}  // namespace

Result<std::optional<std::vector<std::byte>>> shrink_jpeg(std::span<const std::byte> file,
                                                          uint32_t side, int quality) {
  if (side == 0 || quality < 1 || quality > 100)
    return fail(Code::invalid_argument,
                "a smaller JPEG of side {} and quality {} cannot be made; give a side of at least "
                "1 and a quality from 1 to 100",
                side, quality);
  STOKER_ASSIGN(const ImageSize size, jpeg_size(file));
  const uint32_t shorter = std::min(size.width, size.height);
  if (shorter <= side) return std::optional<std::vector<std::byte>>{};
  const double scale = static_cast<double>(side) / shorter;
  JpegOptions options;
  options.width = std::max(1U, static_cast<uint32_t>(std::lround(size.width * scale)));
  options.height = std::max(1U, static_cast<uint32_t>(std::lround(size.height * scale)));
  if (!check(options))
    return fail(Code::unsupported,
                "the JPEG has {} x {} pixels: it is too long and narrow to be made smaller",
                size.width, size.height);
  std::vector<std::byte> pixels(options.bytes());
  STOKER_TRY(decode_jpeg(file, options, 0, 0, pixels.data()));
  Encoder encoder;
  if (!encode(encoder, options, quality, pixels.data()))
    return fail(Code::io, "the smaller image cannot be compressed as JPEG: {}", encoder.errors.why);
  const auto* const first = reinterpret_cast<const std::byte*>(encoder.file);
  return std::optional(std::vector<std::byte>(first, first + encoder.bytes));
}

}  // namespace stoker::data
