#include "stoker/data/jpeg.h"

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <string>
#include <vector>

#include "stoker/data/jpeg_errors.h"
#include "stoker/data/resize.h"

namespace stoker::data {
namespace {

#ifndef LIBJPEG_TURBO_VERSION_NUMBER
#error "this is not libjpeg-turbo: it cannot skip rows and columns"
#endif

constexpr uint32_t kLargest = 16384;
// A few bytes may claim any size; a progressive image of this one takes 1 GB to decode.
constexpr uint64_t kMostPixels = 1U << 28;
// Each scan of a progressive image passes over all of it, and may take some bytes only. Encoders
// write 20 at the most.
constexpr int kMostScans = 100;
// Pixels beside the crop that are decoded with it: the decoder takes their colours for the edge.
constexpr double kMargin = 2;
constexpr float kWhite = 255;

uint64_t mix(uint64_t value) {  // the finaliser of splitmix64
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

// Random numbers that only depend on what they are for.
class Draws {
 public:
  Draws(uint64_t seed, uint64_t epoch, uint64_t sample)
      : state_(mix(mix(mix(seed + kStep) ^ epoch) + kStep) ^ sample) {}
  // From [0, 1).
  double next() { return static_cast<double>(mix(state_ += kStep) >> 11) * 0x1p-53; }
  double between(double low, double high) { return low + (high - low) * next(); }

 private:
  static constexpr uint64_t kStep = 0x9e3779b97f4a7c15;
  uint64_t state_;
};

uint32_t rounded(double value) { return static_cast<uint32_t>(std::lround(value)); }

Rect in_the_middle(uint32_t width, uint32_t height, double shape) {
  Rect rect{.width = width, .height = height};
  if (width > height * shape) {
    rect.width = std::max(1U, rounded(height * shape));
  } else {
    rect.height = std::max(1U, std::min(height, rounded(width / shape)));
  }
  rect.x = (width - rect.width) / 2;
  rect.y = (height - rect.height) / 2;
  return rect;
}

// As torchvision's RandomResizedCrop: ten tries, then the middle.
Rect somewhere(uint32_t width, uint32_t height, Draws& draws) {
  constexpr double kLeastArea = 0.08, kWidest = 4.0 / 3;
  for (int i = 0; i < 10; ++i) {
    const double area = draws.between(kLeastArea, 1) * width * height;
    const double shape = std::exp(draws.between(-std::log(kWidest), std::log(kWidest)));
    const uint32_t w = rounded(std::sqrt(area * shape)), h = rounded(std::sqrt(area / shape));
    if (w == 0 || h == 0 || w > width || h > height) continue;
    const auto x = static_cast<uint32_t>(draws.next() * (width - w + 1));
    const auto y = static_cast<uint32_t>(draws.next() * (height - h + 1));
    return {x, y, w, h};
  }
  const double shape = static_cast<double>(width) / height;
  return in_the_middle(width, height, std::min(kWidest, std::max(1 / kWidest, shape)));
}

// Warnings tell of damage that libjpeg fills up with grey; these are the ones that are none.
void warn(j_common_ptr info, int level) {
  const int what = info->err->msg_code;
  if (level < 0 && what != JWRN_EXTRANEOUS_DATA && what != JWRN_ADOBE_XFORM &&
      what != JWRN_JFIF_MAJOR)
    leave_jpeg(info);
}

// Called once for each part of a file that is read as a whole before the first row.
void count_scans(j_common_ptr info) {
  if (reinterpret_cast<jpeg_decompress_struct*>(info)->input_scan_number <= kMostScans) return;
  auto* const errors = reinterpret_cast<JpegErrors*>(info->err);
  (void)std::snprintf(errors->why, sizeof errors->why, "it has more than %d scans", kMostScans);
  std::longjmp(errors->out, 1);  // NOLINT(cert-err52-cpp)
}

// The decoder and the memory for its rows.
struct Decoder {
  Decoder() {
    info.err = jpeg_std_error(&errors.base);
    errors.base.error_exit = leave_jpeg;
    errors.base.emit_message = warn;
    progress.progress_monitor = count_scans;
  }
  ~Decoder() { jpeg_destroy_decompress(&info); }
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  jpeg_decompress_struct info{};
  JpegErrors errors{};
  jpeg_progress_mgr progress{};
};

// Each step is false where libjpeg left it with errors.why set.
bool read_header(Decoder& decoder, std::span<const std::byte> file) {
  if (setjmp(decoder.errors.out) != 0) return false;  // NOLINT(cert-err52-cpp)
  jpeg_create_decompress(&decoder.info);              // clears what is not `err`
  decoder.info.progress = &decoder.progress;
  jpeg_mem_src(&decoder.info, reinterpret_cast<const unsigned char*>(file.data()), file.size());
  jpeg_read_header(&decoder.info, TRUE);
  return true;
}

// columns: those that are wanted; becomes those that come.
bool begin(Decoder& decoder, unsigned eighths, JDIMENSION* first, JDIMENSION* columns) {
  if (setjmp(decoder.errors.out) != 0) return false;  // NOLINT(cert-err52-cpp)
  decoder.info.out_color_space = JCS_RGB;
  decoder.info.scale_num = eighths;
  decoder.info.scale_denom = 8;
  jpeg_start_decompress(&decoder.info);
  if (*first + *columns > decoder.info.output_width) *columns = decoder.info.output_width - *first;
  if (*columns < decoder.info.output_width) jpeg_crop_scanline(&decoder.info, first, columns);
  return true;
}

bool skip(Decoder& decoder, JDIMENSION rows) {
  if (setjmp(decoder.errors.out) != 0) return false;  // NOLINT(cert-err52-cpp)
  if (rows != 0) jpeg_skip_scanlines(&decoder.info, rows);
  return true;
}

bool read_row(Decoder& decoder, uint8_t* into) {
  if (setjmp(decoder.errors.out) != 0) return false;  // NOLINT(cert-err52-cpp)
  JSAMPROW row = into;
  return jpeg_read_scanlines(&decoder.info, &row, 1) == 1;
}

Error damaged(const Decoder& decoder) {
  return fail(Code::corruption, "the JPEG is damaged: {}", decoder.errors.why);
}

// The fewest eighths of the size that still have two pixels for each of the result, either way:
// with fewer, the decoder's averages would show.
unsigned eighths_for(const Rect& rect, const JpegOptions& options) {
  for (const unsigned eighths : {1U, 2U, 4U}) {
    if (uint64_t{rect.width} * eighths >= uint64_t{16} * options.width &&
        uint64_t{rect.height} * eighths >= uint64_t{16} * options.height)
      return eighths;
  }
  return 8;
}

// Rows of the result, of which several are under way at once.
class Rows {
 public:
  Rows(const JpegOptions& options, Taps columns, Taps rows, uint32_t pixels, bool mirrored,
       std::byte* into)
      : options_(options),
        columns_(std::move(columns)),
        rows_(std::move(rows)),
        values_(size_t{3} * pixels),
        mirrored_(mirrored),
        into_(into),
        sums_(options.height) {
    if (!options.normalise) return;
    for (size_t c = 0; c < 3; ++c) {
      colours_.scale[c] = 1 / (kWhite * options.normalise->deviation[c]);
      colours_.shift[c] = -options.normalise->mean[c] / options.normalise->deviation[c];
    }
  }

  uint32_t first() const { return rows_.first.front(); }
  // Whether the row with this number, or one behind it, is still wanted.
  bool wants_more() const { return done_ < options_.height; }

  void add(uint32_t number, const uint8_t* pixels) {
    for (uint32_t y = done_; y < options_.height && rows_.first[y] <= number; ++y) {
      const uint32_t at = number - rows_.first[y];
      if (at >= rows_.width) continue;
      if (sums_[y].empty()) take(y);
      const float weight = rows_.weights[size_t{y} * rows_.width + at];
      if (weight != 0) add_row(pixels, weight, values_, sums_[y].data());
      if (at + 1 == rows_.width) finish(y);
    }
  }

 private:
  void take(uint32_t y) {
    if (!spare_.empty()) {
      sums_[y] = std::move(spare_.back());
      spare_.pop_back();
    }
    sums_[y].assign(values_ + 4, 0.0F);
  }
  void finish(uint32_t y) {
    const size_t values = size_t{3} * options_.width;
    if (options_.normalise) {
      finish_row(sums_[y].data(), columns_, colours_, mirrored_,
                 reinterpret_cast<float*>(into_) + y * values);
    } else {
      finish_row(sums_[y].data(), columns_, mirrored_,
                 reinterpret_cast<uint8_t*>(into_) + y * values);
    }
    spare_.push_back(std::move(sums_[y]));
    sums_[y].clear();
    done_ = y + 1;
  }

  const JpegOptions& options_;
  const Taps columns_, rows_;
  const size_t values_;
  const bool mirrored_;
  std::byte* const into_;
  Colours colours_{};
  uint32_t done_ = 0;
  std::vector<std::vector<float>> sums_, spare_;
};

}  // namespace

View2d choose(const JpegOptions& options, uint32_t width, uint32_t height, uint64_t epoch,
              uint64_t sample) {
  Draws draws(options.seed, epoch, sample);
  View2d view;
  view.mirrored = options.flip && draws.next() < 0.5;
  if (options.crop == Crop::random) {
    view.rect = somewhere(width, height, draws);
  } else if (options.crop == Crop::centre) {
    view.rect = in_the_middle(width, height, static_cast<double>(options.width) / options.height);
  } else {
    view.rect = {.width = width, .height = height};
  }
  return view;
}

Status check(const JpegOptions& options) {
  if (options.height == 0 || options.width == 0 || options.height > kLargest ||
      options.width > kLargest) {
    return fail(Code::invalid_argument, "an image of {} x {} pixels cannot be made: give 1 to {}",
                options.height, options.width, kLargest);
  }
  if (!options.normalise) return {};
  for (size_t c = 0; c < 3; ++c) {
    const float deviation = options.normalise->deviation[c];
    if (!(deviation > 0) || !std::isfinite(deviation) || !std::isfinite(options.normalise->mean[c]))
      return fail(
          Code::invalid_argument,
          "normalise= needs a mean and a positive deviation for each of red, green and blue");
  }
  return {};
}

bool is_jpeg(std::span<const std::byte> file) {
  return file.size() > 3 && file[0] == std::byte{0xff} && file[1] == std::byte{0xd8} &&
         file[2] == std::byte{0xff};
}

Status decode_jpeg(std::span<const std::byte> file, const JpegOptions& options, uint64_t epoch,
                   uint64_t sample, std::byte* into) {
  // libjpeg would look for a header behind any bytes: one file, one judgement.
  if (!is_jpeg(file)) return fail(Code::corruption, "it does not begin as a JPEG does");
  Decoder decoder;
  if (!read_header(decoder, file)) return damaged(decoder);
  jpeg_decompress_struct& info = decoder.info;
  if (info.jpeg_color_space != JCS_YCbCr && info.jpeg_color_space != JCS_RGB &&
      info.jpeg_color_space != JCS_GRAYSCALE)
    return fail(Code::unsupported, "the JPEG has colours for printing (CMYK); convert it to RGB");
  if (uint64_t{info.image_width} * info.image_height > kMostPixels)
    return fail(Code::unsupported, "the JPEG has {} x {} pixels, but at most {} are supported",
                info.image_width, info.image_height, kMostPixels);
  const View2d view = choose(options, info.image_width, info.image_height, epoch, sample);
  const unsigned eighths = eighths_for(view.rect, options);
  // What is wanted, in pixels of the decoder's size; a pixel of the edge may be wanted in part.
  const double scale = eighths / 8.0;
  const double left = view.rect.x * scale, top = view.rect.y * scale;
  const double wide = view.rect.width * scale, high = view.rect.height * scale;
  auto first = static_cast<JDIMENSION>(std::max(0.0, left - kMargin));
  auto columns = static_cast<JDIMENSION>(std::ceil(left + wide + kMargin)) - first;
  if (!begin(decoder, eighths, &first, &columns)) return damaged(decoder);
  const uint32_t pixels = info.output_width;  // of a row as it comes
  if (columns > pixels) columns = pixels;
  Rows rows(options, Taps(left - first, wide, pixels, options.width),
            Taps(top, high, info.output_height, options.height), pixels, view.mirrored, into);
  if (!skip(decoder, rows.first())) return damaged(decoder);
  std::vector<uint8_t> row(size_t{3} * pixels);
  while (rows.wants_more() && info.output_scanline < info.output_height) {
    const uint32_t number = info.output_scanline;
    if (!read_row(decoder, row.data())) return damaged(decoder);
    rows.add(number, row.data());
  }
  if (rows.wants_more()) return fail(Code::corruption, "the JPEG ends before its last row");
  return {};
}

Result<ImageSize> jpeg_size(std::span<const std::byte> file) {
  if (!is_jpeg(file)) return fail(Code::corruption, "it does not begin as a JPEG does");
  Decoder decoder;
  if (!read_header(decoder, file)) return damaged(decoder);
  return ImageSize{decoder.info.image_width, decoder.info.image_height};
}

}  // namespace stoker::data
