// The levels of 8-bit moments, and the draws of stochastic rounding.
//
// Through the levels goes a line made of straight pieces, one a decade: y(c) for real c, t(x) the
// other way. From one decade to the next y grows 5 times as fast (10 times the width, twice the
// levels). So y is the greatest of all the pieces' lines and t the least: L multiply-adds find
// either without a table or a branch.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace stoker::optim {

template <int kLevels>
struct Codes {
  static constexpr int kTop = (1 << kLevels) - 1;  // the code of 1; code 0 is 0
  std::array<float, kLevels> y_slope{}, y_offset{}, t_slope{}, t_offset{};

  // Piece p holds codes 2^p - 1 to 2^(p+1) - 1 and ends at 10^-(L-1-p). It begins at a tenth of
  // that, the first one at 0.
  constexpr Codes() {
    double end = 1;
    for (int p = kLevels - 1; p >= 0; --p, end /= 10) {
      const int levels = 1 << p, last = 2 * levels - 1;
      const double slope = (p == 0 ? 1.0 : 0.9) * end / levels;
      y_slope[p] = static_cast<float>(slope);
      t_slope[p] = static_cast<float>(1 / slope);
      if (p == 0) continue;
      // from the rounded slopes, so that y(kTop) is 1 and t(1) is kTop without an error
      y_offset[p] = static_cast<float>(end - static_cast<double>(y_slope[p]) * last);
      t_offset[p] = static_cast<float>(last - static_cast<double>(t_slope[p]) * end);
    }
  }
};

inline constexpr Codes<7> kSignedCodes;    // of m
inline constexpr Codes<8> kUnsignedCodes;  // of the root of v

// A group's scale, from the bits of its greatest magnitude.
struct Group {
  explicit constexpr Group(uint32_t greatest) {
    // 2^-120
    constexpr uint32_t kInfinity = 0x7f800000u, kNan = 0x7fc00000u,
                       kLeast = uint32_t{127 - 120} << 23;
    codes = greatest >= kLeast && greatest < kInfinity;
    if (greatest >= kInfinity) scale = std::bit_cast<float>(kNan);
    if (!codes) return;
    scale = std::bit_cast<float>(greatest);
    inverse = 1 / scale * (1 + 0x1p-22f);  // a little more, so that scale * inverse is not below 1
  }
  bool codes;  // else they are all 0
  float scale = 0, inverse = 0;
};

// Draws of 32 bits an element: m rounds by the low half, v by the high one.
struct Draws {
  uint32_t a = 0, b = 0;  // the key
  // low half of the element that draw 0 belongs to; the high half is in the key
  uint32_t first = 0;

  Draws(uint64_t seed, uint64_t step, uint64_t parameter, uint64_t element)
      : first(static_cast<uint32_t>(element)) {
    uint64_t key = 0;
    for (const uint64_t word : {seed, step, parameter, element >> 32})
      key = mix(key + word + 0x9e3779b97f4a7c15u);
    a = static_cast<uint32_t>(key);
    b = static_cast<uint32_t>(key >> 32);
  }
  // The finalizer of MurmurHash3, with the key's halves before its first and its second product.
  uint32_t operator[](size_t i) const {
    uint32_t h = (first + static_cast<uint32_t>(i)) ^ a;
    h = (h ^ (h >> 16)) * 0x85ebca6bu;
    h = ((h ^ (h >> 13)) + b) * 0xc2b2ae35u;
    return h ^ (h >> 16);
  }

 private:
  static uint64_t mix(uint64_t z) {  // the finalizer of SplitMix64
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
};

// Instead of a draw: what rounds to the nearest.
inline constexpr uint32_t kNoDraw = 0x80008000u;

}  // namespace stoker::optim
