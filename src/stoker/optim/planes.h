// The encoding of a float32 master as a bf16 weight plane (what the model computes with) and a
// 16-bit remainder.
//
//   remainder = the master's low 16 bits
//   plane     = the master rounded to the nearest bf16; a tie (remainder 0x8000) goes toward zero
//   join      : high = plane - (remainder > 0x8000), master = high:remainder
//
// Why ties do not round to even, as torch's .bfloat16() does: with ties to even every even plane
// value stands for 65,537 masters. That is one more than 16 bits can tell apart, so no remainder
// could restore them all. Rounding ties toward zero leaves exactly 65,536. The plane therefore
// differs from .bfloat16() if and only if the remainder is 0x8000 and the high half is odd (1
// master in 131,072): there it is the other, equally near, bf16 value. One of these is 0x7f7f8000,
// which .bfloat16() makes infinite and the plane does not.
//
// NaN: the plane is the high half, unrounded, so a NaN stays that NaN. The sole exception are the 2
// * 65,535 signalling NaNs whose payload lies in the low 16 bits alone (high half 0x7f80 or
// 0xff80): their high half would read as infinity, and no free NaN code is left for them. So they
// become quiet (high half | 0x0040, payload kept). No arithmetic yields a signalling NaN. All other
// 2^32 - 131,070 patterns are restored exactly.
//
// Planes (0x0000 or 0x8000) with a remainder above 0x8000 never come out of split.
#pragma once

#include <bit>
#include <cstdint>

namespace stoker::optim {

struct Halves {
  uint16_t weight;
  uint16_t remainder;
};

constexpr Halves split_bits(uint32_t master) {
  const auto low = static_cast<uint16_t>(master);
  auto high = master >> 16;
  if ((master & 0x7fffffffu) > 0x7f800000u) {
    if ((high & 0x7fu) == 0) high |= 0x40u;  // else the plane would read as infinity
  } else {
    high = (master + 0x7fffu) >> 16;  // carries if and only if low > 0x8000
  }
  return {static_cast<uint16_t>(high), low};
}

constexpr uint32_t join_bits(uint16_t weight, uint16_t remainder) {
  const bool nan = (weight & 0x7fffu) > 0x7f80u;
  const uint32_t high = weight - ((remainder > 0x8000u && !nan) ? 1u : 0u);
  return (high << 16) | remainder;
}

// bf16 -> float32 is exact.
constexpr float widen(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

// float32 -> bf16, ties to even, NaN -> 0x7fc0: for gradients, which keep no remainder.
constexpr uint16_t narrow(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace stoker::optim
