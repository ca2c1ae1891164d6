// The reference of how moments are kept, one element at a time.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "stoker/optim/planes.h"
#include "stoker/optim/scalar.h"

namespace stoker::optim::scalar {
namespace {

template <int kLevels>
float level(const Codes<kLevels>& codes, float code) {
  float y = codes.y_slope[0] * code;
  for (int p = 1; p < kLevels; ++p)
    y = std::max(y, std::fma(codes.y_slope[p], code, codes.y_offset[p]));
  return y;
}

template <int kLevels>
float position(const Codes<kLevels>& codes, float x) {
  float t = codes.t_slope[0] * x;
  for (int p = 1; p < kLevels; ++p)
    t = std::min(t, std::fma(codes.t_slope[p], x, codes.t_offset[p]));
  return t;
}

uint32_t draw16(Which which, uint32_t draw) {
  return which == Which::m ? draw & 0xffffu : draw >> 16;
}

float decode_q8(Which which, std::byte code, float scale) {
  if (which == Which::v) {
    const float root =
        level(kUnsignedCodes, static_cast<float>(std::to_integer<uint8_t>(code))) * scale;
    return root * root;
  }
  const auto c = static_cast<float>(static_cast<int8_t>(code));
  const float y = level(kSignedCodes, std::fabs(c));
  return (c < 0 ? -y : y) * scale;
}

uint16_t round_bf16(float value, uint32_t bits16) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return std::isnan(value) ? uint16_t{0x7fc0} : static_cast<uint16_t>((bits + bits16) >> 16);
}

}  // namespace

uint32_t greatest_part(Which which, float* values, size_t count, uint32_t so_far) {
  for (size_t i = 0; i < count; ++i) {
    if (which == Which::v) values[i] = std::sqrt(values[i]);
    so_far = std::max(so_far, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
  }
  return so_far;
}

void encode_parts(Which which, const float* parts, float inverse, std::byte* codes, size_t count,
                  const uint32_t* draws) {
  for (size_t i = 0; i < count; ++i) {
    const float x = std::min(std::fabs(parts[i]) * inverse, 1.0f);
    const float up = static_cast<float>(draw16(which, draws[i])) * 0x1p-16f;
    if (which == Which::v) {
      const auto code = static_cast<int>(position(kUnsignedCodes, x) + up);
      codes[i] = static_cast<std::byte>(std::max(code, parts[i] > 0 ? 1 : 0));
    } else {
      const auto code = static_cast<int>(position(kSignedCodes, x) + up);
      codes[i] = static_cast<std::byte>(parts[i] < 0 ? -code : code);
    }
  }
}

void decode(MomentType type, Which which, const KeptMoment& from, float* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (type == MomentType::q8) {
      to[i] = decode_q8(which, from.data[i], from.scales[i / kMomentGroup]);
    } else {
      uint16_t half;
      std::memcpy(&half, from.data + 2 * i, sizeof half);
      to[i] = widen(half);
    }
  }
}

void encode(MomentType type, Which which, float* values, const KeptMoment& to, size_t count,
            const uint32_t* draws) {
  if (type == MomentType::q8) {
    for (size_t i = 0; i < count; i += kMomentGroup) {
      const size_t some = std::min(kMomentGroup, count - i);
      const Group group(greatest_part(which, values + i, some, 0));
      to.scales[i / kMomentGroup] = group.scale;
      if (group.codes)
        encode_parts(which, values + i, group.inverse, to.data + i, some, draws + i);
      else
        std::memset(to.data + i, 0, some);
    }
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    const uint16_t half = round_bf16(values[i], draw16(which, draws[i]));
    std::memcpy(to.data + 2 * i, &half, sizeof half);
  }
}

}  // namespace stoker::optim::scalar
