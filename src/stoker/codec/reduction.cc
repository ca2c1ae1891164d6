#include "stoker/codec/reduction.h"

#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stoker/base/check.h"

namespace stoker::codec {
namespace {

constexpr size_t kSample = 32 * kKiB;  // bytes at each of kSamples places
constexpr size_t kSamples = 2;
constexpr size_t kSkippableHeader = 8;  // of a frame that decoders skip: magic, size
constexpr uint32_t kSkippable = 0x184D2A50;
constexpr std::array<uint32_t, 4> kWidths = {1, 2, 4, 8};

template <size_t kWidth>
void group(const std::byte* from, size_t bytes, std::byte* into) {
  const size_t count = bytes / kWidth;
  for (size_t i = 0; i < count; ++i) {
    for (size_t b = 0; b < kWidth; ++b) into[b * count + i] = from[i * kWidth + b];
  }
  const size_t done = count * kWidth;
  std::copy_n(from + done, bytes - done, into + done);
}

template <size_t kWidth>
void ungroup(const std::byte* from, size_t bytes, std::byte* into) {
  const size_t count = bytes / kWidth;
  for (size_t i = 0; i < count; ++i) {
    for (size_t b = 0; b < kWidth; ++b) into[i * kWidth + b] = from[b * count + i];
  }
  const size_t done = count * kWidth;
  std::copy_n(from + done, bytes - done, into + done);
}

void group_by(uint32_t width, const std::byte* from, size_t bytes, std::byte* into) {
  if (width == 1) group<1>(from, bytes, into);
  if (width == 2) group<2>(from, bytes, into);
  if (width == 4) group<4>(from, bytes, into);
  if (width == 8) group<8>(from, bytes, into);
}

void ungroup_by(uint32_t width, const std::byte* from, size_t bytes, std::byte* into) {
  if (width == 2) ungroup<2>(from, bytes, into);
  if (width == 4) ungroup<4>(from, bytes, into);
  if (width == 8) ungroup<8>(from, bytes, into);
}

struct FreeCompressor {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
};
struct FreeDecompressor {
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

// Of a thread.
struct Tools {
  std::unique_ptr<ZSTD_CCtx, FreeCompressor> compressor;
  std::unique_ptr<ZSTD_DCtx, FreeDecompressor> decompressor;
  std::vector<std::byte> groups;

  std::byte* room(size_t bytes) {
    if (groups.size() < bytes) groups.resize(bytes);
    return groups.data();
  }
};

Tools& tools() {
  thread_local Tools of_thread;
  return of_thread;
}

// Of 64 entries of 7 bytes each: next to no matches are looked for, and none are in floats, so that
// zstd's time goes into Huffman codes. Levels below 0 would leave literals as they are.
ZSTD_CCtx* compressor() {
  auto& made = tools().compressor;
  if (!made) {
    made.reset(ZSTD_createCCtx());
    STOKER_CHECK(made != nullptr);
    const auto set = [&made](ZSTD_cParameter which, int value) {
      STOKER_CHECK(ZSTD_isError(ZSTD_CCtx_setParameter(made.get(), which, value)) == 0);
    };
    set(ZSTD_c_strategy, ZSTD_fast);
    set(ZSTD_c_hashLog, 6);
    set(ZSTD_c_minMatch, 7);
    set(ZSTD_c_targetLength, 0);
  }
  return made.get();
}

// Each group in frames of its own, as each has a distribution of its own: the bytes that they take,
// or nothing if they do not fit.
std::optional<size_t> pack(uint32_t width, std::span<const std::byte> groups,
                           std::span<std::byte> into) {
  const size_t group = groups.size() / width;
  size_t taken = 0;
  for (size_t i = 0; i < width; ++i) {
    const size_t bytes = i + 1 < width ? group : groups.size() - i * group;
    const size_t frame = ZSTD_compress2(compressor(), into.data() + taken, into.size() - taken,
                                        groups.data() + i * group, bytes);
    if (ZSTD_isError(frame) != 0) return std::nullopt;
    taken += frame;
  }
  return taken;
}

// The width with which some parts take least; 0 if none makes them smaller.
uint32_t choose(std::span<const std::byte> from, std::byte* groups, std::span<std::byte> into) {
  uint32_t best = 0;
  const size_t sample = std::min(kSample, from.size());
  size_t least = kSamples * sample;
  for (const uint32_t width : kWidths) {
    size_t taken = 0;
    for (size_t i = 0; i < kSamples; ++i) {
      const size_t at = align_down((2 * i + 1) * (from.size() - sample) / (2 * kSamples), 8);
      group_by(width, from.data() + at, sample, groups);
      taken += pack(width, {groups, sample}, into).value_or(sample);
    }
    if (taken < least) {
      least = taken;
      best = width;
    }
  }
  return best;
}

}  // namespace

Reduced reduce(std::span<const std::byte> from, std::span<std::byte> into) {
  STOKER_CHECK(into.size() >= from.size());
  const Reduced as_it_is = {.bytes = from.size(), .width = 0};
  if (from.size() <= kReducedAlign) return as_it_is;
  std::byte* groups = tools().room(from.size());
  const uint32_t width = choose(from, groups, into);
  if (width == 0) return as_it_is;
  group_by(width, from.data(), from.size(), groups);
  const std::optional<size_t> frames = pack(width, {groups, from.size()}, into);
  if (!frames) return as_it_is;
  const size_t stored = align_up(*frames + kSkippableHeader, kReducedAlign);
  if (stored >= from.size()) return as_it_is;
  const size_t rest = stored - *frames - kSkippableHeader;
  for (size_t i = 0; i < 4; ++i) {
    into[*frames + i] = static_cast<std::byte>(kSkippable >> (8 * i));
    into[*frames + 4 + i] = static_cast<std::byte>(rest >> (8 * i));
  }
  std::memset(into.data() + *frames + kSkippableHeader, 0, rest);
  return {.bytes = stored, .width = width};
}

Status expand(std::span<const std::byte> stored, uint32_t width, std::span<std::byte> into) {
  const auto broken = [&](const std::string& why) {
    return fail(Code::corruption, "the bytes are not a reduced chunk of {} bytes ({})", into.size(),
                why);
  };
  if (width == 0) {
    if (stored.size() != into.size()) return broken("another size");
    std::copy(stored.begin(), stored.end(), into.begin());
    return {};
  }
  if (std::find(kWidths.begin(), kWidths.end(), width) == kWidths.end())
    return broken("elements of " + std::to_string(width) + " bytes");
  auto& decompressor = tools().decompressor;
  if (!decompressor) decompressor.reset(ZSTD_createDCtx());
  STOKER_CHECK(decompressor != nullptr);
  std::byte* groups = width == 1 ? into.data() : tools().room(into.size());
  const size_t made =
      ZSTD_decompressDCtx(decompressor.get(), groups, into.size(), stored.data(), stored.size());
  if (ZSTD_isError(made) != 0) return broken(ZSTD_getErrorName(made));
  if (made != into.size()) return broken("it holds " + std::to_string(made));
  ungroup_by(width, groups, into.size(), into.data());
  return {};
}

}  // namespace stoker::codec
