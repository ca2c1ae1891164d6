#include "isal.h"

#include <isa-l.h>
#include <isa-l/erasure_code.h>

#include <algorithm>
#include <array>

#include "stoker/base/bytes.h"

namespace stoker::cli {
namespace {

constexpr size_t kDifferenceBytes = 64 * kKiB;  // stays in L2
constexpr size_t kTableBytes = 32;              // for each cell of a matrix

size_t cells(int rows, int columns) {
  return static_cast<size_t>(rows) * static_cast<size_t>(columns);
}
unsigned char* plain(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
unsigned char** plain(std::byte* const* chunks) {
  return reinterpret_cast<unsigned char**>(const_cast<std::byte**>(chunks));
}

void exclusive_or(const std::byte* a, const std::byte* b, std::byte* to, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) to[i] = a[i] ^ b[i];
}

}  // namespace

PlainIsal::PlainIsal(int k, int m)
    : k_(k),
      m_(m),
      lost_(std::min(k, m)),
      encode_tables_(kTableBytes * cells(m, k)),
      decode_tables_(kTableBytes * cells(lost_, k)),
      difference_(kDifferenceBytes) {
  std::vector<unsigned char> rows(cells(k + m, k));
  gf_gen_cauchy1_matrix(rows.data(), k + m, k);
  ec_init_tables(k, m, rows.data() + cells(k, k), encode_tables_.data());
  // The rows of the k chunks that follow the lost ones say how they come of the data; the inverse
  // says the reverse.
  std::vector<unsigned char> inverse(cells(k, k));
  gf_invert_matrix(rows.data() + cells(lost_, k), inverse.data(), k);
  ec_init_tables(k, lost_, inverse.data(), decode_tables_.data());
}

void PlainIsal::encode(std::span<std::byte* const> chunks, size_t bytes) {
  ec_encode_data(static_cast<int>(bytes), k_, m_, encode_tables_.data(), plain(chunks.data()),
                 plain(chunks.data() + k_));
}

void PlainIsal::decode(std::span<std::byte* const> chunks, size_t bytes) {
  ec_encode_data(static_cast<int>(bytes), k_, lost_, decode_tables_.data(),
                 plain(chunks.data() + lost_), plain(chunks.data()));
}

void PlainIsal::delta(std::span<std::byte* const> chunks, size_t bytes, size_t chunk,
                      const std::byte* newer) {
  std::array<std::byte*, 32> parity{};
  std::copy(chunks.begin() + k_, chunks.end(), parity.begin());
  for (size_t at = 0; at < bytes; at += difference_.size()) {
    const size_t size = std::min(difference_.size(), bytes - at);
    exclusive_or(chunks[chunk] + at, newer + at, difference_.data(), size);
    ec_encode_data_update(static_cast<int>(size), k_, m_, static_cast<int>(chunk),
                          encode_tables_.data(), plain(difference_.data()), plain(parity.data()));
    for (int j = 0; j < m_; ++j) parity[j] += size;
  }
}

std::string isal_version() {
  return std::to_string(ISAL_MAJOR_VERSION) + "." + std::to_string(ISAL_MINOR_VERSION) + "." +
         std::to_string(ISAL_PATCH_VERSION);
}

std::string isal_target() {
#ifdef __x86_64__
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
                    __builtin_cpu_supports("avx512dq");
  if (wide) return "AVX-512";
  if (__builtin_cpu_supports("avx2")) return "AVX2";
  if (__builtin_cpu_supports("avx")) return "AVX";
  if (__builtin_cpu_supports("sse4.1")) return "SSE4.1";
  return "scalar";
#else
  return "unknown";
#endif
}

}  // namespace stoker::cli
