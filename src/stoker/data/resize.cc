#include "stoker/data/resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "stoker/data/resize.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace stoker::data::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void add(const uint8_t* HWY_RESTRICT pixels, float weight, size_t count, float* HWY_RESTRICT row) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<uint8_t, decltype(d)> bytes;
  const hn::Rebind<int32_t, decltype(d)> ints;
  const size_t lanes = hn::Lanes(d);
  const auto factor = hn::Set(d, weight);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto value = hn::ConvertTo(d, hn::PromoteTo(ints, hn::LoadU(bytes, pixels + i)));
    hn::StoreU(hn::MulAdd(value, factor, hn::LoadU(d, row + i)), d, row + i);
  }
  for (; i < count; ++i) row[i] += weight * static_cast<float>(pixels[i]);
}

// Calls `store(pixel, values)` for each pixel of the result, values being its 3 colours and one
// more.
template <typename Store>
HWY_INLINE void columns(const float* row, const Taps& taps, bool mirrored, Store store) {
#if HWY_TARGET == HWY_SCALAR
  const size_t to = taps.first.size();
  for (size_t x = 0; x < to; ++x) {
    float sum[4] = {};
    for (uint32_t k = 0; k < taps.width; ++k)
      for (size_t c = 0; c < 3; ++c)
        sum[c] += taps.weights[x * taps.width + k] * row[3 * (taps.first[x] + k) + c];
    store(mirrored ? to - 1 - x : x, sum);
  }
#else
  const hn::FixedTag<float, 4> d;
  const size_t to = taps.first.size();
  for (size_t x = 0; x < to; ++x) {
    auto sum = hn::Zero(d);
    const float* const from = row + size_t{3} * taps.first[x];
    const float* const weights = taps.weights.data() + x * taps.width;
    for (uint32_t k = 0; k < taps.width; ++k)
      sum = hn::MulAdd(hn::LoadU(d, from + size_t{3} * k), hn::Set(d, weights[k]), sum);
    alignas(16) float out[4];
    hn::Store(sum, d, out);
    store(mirrored ? to - 1 - x : x, out);
  }
#endif
}

void finish_floats(const float* row, const Taps& taps, const Colours& colours, bool mirrored,
                   float* into) {
  columns(row, taps, mirrored, [&](size_t x, const float* value) {
    for (size_t c = 0; c < 3; ++c) into[3 * x + c] = value[c] * colours.scale[c] + colours.shift[c];
  });
}

void finish_bytes(const float* row, const Taps& taps, bool mirrored, uint8_t* into) {
  columns(row, taps, mirrored, [&](size_t x, const float* value) {
    for (size_t c = 0; c < 3; ++c)
      into[3 * x + c] = static_cast<uint8_t>(std::clamp(value[c] + 0.5F, 0.0F, 255.0F));
  });
}

}  // namespace stoker::data::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace stoker::data {

HWY_EXPORT(add);
HWY_EXPORT(finish_floats);
HWY_EXPORT(finish_bytes);

Taps::Taps(double begin, double length, uint32_t pixels, uint32_t to) {
  const double step = length / to;
  const double reach = std::max(1.0, step);  // half of the triangle
  width = std::min(pixels, static_cast<uint32_t>(std::ceil(2 * reach)) + 1);
  first.resize(to);
  weights.resize(size_t{to} * width);
  for (uint32_t x = 0; x < to; ++x) {
    const double centre = begin + (x + 0.5) * step;
    const double low = std::max({0.0, begin, centre - reach});
    // no pixel is read behind the last one: zeros fill up
    first[x] = std::min(static_cast<uint32_t>(low), pixels - width);
    // the part that was asked for ends where it does, whatever the decoder gave beside it
    const double last = std::min<double>(pixels, begin + length);
    double sum = 0;
    float* const mine = weights.data() + size_t{x} * width;
    for (uint32_t k = 0; k < width; ++k) {
      const double at = first[x] + k + 0.5;
      const bool inside = at > std::floor(begin) && at < std::ceil(last);
      const double weight = inside ? std::max(0.0, 1 - std::abs(at - centre) / reach) : 0;
      mine[k] = static_cast<float>(weight);
      sum += weight;
    }
    for (uint32_t k = 0; k < width; ++k) mine[k] = static_cast<float>(mine[k] / sum);
  }
}

void add_row(const uint8_t* pixels, float weight, size_t count, float* row) {
  HWY_DYNAMIC_DISPATCH(add)(pixels, weight, count, row);
}

void finish_row(const float* row, const Taps& taps, const Colours& colours, bool mirrored,
                float* into) {
  HWY_DYNAMIC_DISPATCH(finish_floats)(row, taps, colours, mirrored, into);
}

void finish_row(const float* row, const Taps& taps, bool mirrored, uint8_t* into) {
  HWY_DYNAMIC_DISPATCH(finish_bytes)(row, taps, mirrored, into);
}

}  // namespace stoker::data
#endif
