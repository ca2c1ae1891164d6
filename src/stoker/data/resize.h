// Resizing of rows of RGB as they come: a triangle filter, as wide as the reduction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stoker::data {

// Which pixels of a line make each pixel of the result, and their weights, which sum up to 1.
struct Taps {
  // `from` pixels become `to`: those of [begin, begin + length) in a line of `pixels`.
  Taps(double begin, double length, uint32_t pixels, uint32_t to);
  uint32_t width = 0;           // weights of each
  std::vector<uint32_t> first;  // pixel of each
  std::vector<float> weights;   // width of each; zeros behind those that count
};

// row[i] += weight * pixels[i]
void add_row(const uint8_t* pixels, float weight, size_t count, float* row);

// One row: columns by `taps`, then value * scale + shift of each colour (4 values, the last 0). The
// row has 4 values to read behind its end. Mirrored: from right to left.
struct Colours {
  float scale[4], shift[4];
};
void finish_row(const float* row, const Taps& taps, const Colours& colours, bool mirrored,
                float* into);
// Rounded to 0 to 255.
void finish_row(const float* row, const Taps& taps, bool mirrored, uint8_t* into);

}  // namespace stoker::data
