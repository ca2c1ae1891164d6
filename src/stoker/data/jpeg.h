// JPEG to pixels of one size: what of the image is kept, decoding (libjpeg-turbo), resizing and
// normalising. Pure functions, apart from the memory that they write.
//
// Rows above and below the crop, and blocks of columns beside it, are skipped by the decoder. An
// image that is more than twice as large as what is wanted is decoded at n/8 of its size. Rows are
// resized as they come, with a triangle filter as wide as the reduction (antialiased bilinear, as
// Pillow's).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "stoker/base/result.h"

namespace stoker::data {

enum class Crop : uint8_t {
  whole,   // all of the image, whatever its shape
  centre,  // the largest part in the middle that has the shape of the result
  random,  // 8 to 100 % of the area, 3:4 to 4:3 wide, anywhere
};

struct Normalise {
  std::array<float, 3> mean{}, deviation{};  // of values from 0 to 1
};

struct JpegOptions {
  uint32_t height = 0, width = 0;  // of the result, 1 to 16384
  Crop crop = Crop::whole;
  bool flip = false;                   // half of the images are mirrored
  std::optional<Normalise> normalise;  // (value - mean) / deviation as float32, else uint8
  uint64_t seed = 0;                   // of crops and mirrors

  // Of one result: rows of pixels of three values, red first.
  uint64_t bytes() const { return uint64_t{3} * height * width * (normalise ? sizeof(float) : 1); }
};

// A part of an image, in pixels.
struct Rect {
  uint32_t x = 0, y = 0, width = 0, height = 0;
  friend bool operator==(const Rect&, const Rect&) = default;
};

struct View2d {
  Rect rect;
  bool mirrored = false;
};

// What of an image of this size is kept. The same for the same options and key; another sample's
// or another epoch's is unrelated.
View2d choose(const JpegOptions& options, uint32_t width, uint32_t height, uint64_t epoch,
              uint64_t sample);

// Options that make sense, or invalid_argument.
Status check(const JpegOptions& options);

// Whether this begins as JPEG files do.
bool is_jpeg(std::span<const std::byte> file);

// into: options.bytes(). corruption says what is wrong with the file; unsupported: it has no
// colours that can become red, green and blue. What lies below the last row that is needed is not
// looked at.
Status decode_jpeg(std::span<const std::byte> file, const JpegOptions& options, uint64_t epoch,
                   uint64_t sample, std::byte* into);

struct ImageSize {
  uint32_t width = 0, height = 0;
};

// What the header of a file says. corruption: it has none.
Result<ImageSize> jpeg_size(std::span<const std::byte> file);

}  // namespace stoker::data
