#include "stoker/codec/erasure.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "stoker/codec/kernel.h"
#include "stoker/codec/pass.h"
#include "stoker/codec/recipe.h"

namespace stoker::codec {
namespace {

std::unique_ptr<const Kernel> make_kernel(Arithmetic arithmetic, const Matrix& matrix) {
  return arithmetic == Arithmetic::isal ? make_isal_kernel(matrix) : make_scalar_kernel(matrix);
}

// A function of its own, for only so does the compiler see that no pointer moves meanwhile, and
// takes vectors.
void exclusive_or(const std::byte* a, const std::byte* b, std::byte* to, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) to[i] = a[i] ^ b[i];
}

Status expect_places(size_t given, int wanted, const char* call, const char* what) {
  if (given == static_cast<size_t>(wanted)) return {};
  return refuse(std::string(call) + " takes " + std::to_string(wanted) + " " + what +
                ", and was given " + std::to_string(given));
}

}  // namespace

ErasureCode::ErasureCode(int k, int m, Arithmetic arithmetic)
    : k_(k),
      m_(m),
      arithmetic_(arithmetic),
      parity_rows_(std::make_shared<const Matrix>(cauchy(k, m))),
      encoder_(make_kernel(arithmetic, *parity_rows_)) {}

Result<ErasureCode> ErasureCode::make(int k, int m, Arithmetic arithmetic) {
  if (k < 1 || m < 1 || k > kChunksMax || m > kChunksMax || k + m > kChunksMax) {
    return refuse(
        "a code of " + std::to_string(k) + "+" + std::to_string(m) +
        " chunks cannot be: it takes at least one data and one parity chunk, and at most " +
        std::to_string(kChunksMax) + " together");
  }
  return ErasureCode(k, m, arithmetic);
}

Status ErasureCode::encode(std::span<const Source> data, std::span<const Target> parity) const {
  STOKER_TRY(expect_places(data.size(), k_, "encode", "data slices"));
  STOKER_TRY(expect_places(parity.size(), m_, "encode", "parity slices"));
  Pass pass;
  Reading reading;
  Writing writing;
  for (int i = 0; i < k_; ++i) {
    if (data[i].bytes.empty())
      return refuse("encode needs every data chunk, and the slice of " + chunk_name(i) +
                    " is missing");
    STOKER_TRY(pass.add(i, data[i]));
    reading.add(data[i].bytes.data());
  }
  for (int j = 0; j < m_; ++j) {
    if (parity[j].bytes.empty())
      return refuse("encode fills every parity, and the slice of " + chunk_name(k_ + j) +
                    " is missing: decode fills some");
    STOKER_TRY(pass.add(k_ + j, parity[j]));
    writing.add(parity[j].bytes.data());
  }
  pass.run([&](size_t size) {
    encoder_->multiply(reading.get(), writing.get(), size);
    reading.advance(size);
    writing.advance(size);
  });
  return {};
}

Status ErasureCode::decode(std::span<const Source> present, std::span<const Target> wanted) const {
  const int n = k_ + m_;
  STOKER_TRY(expect_places(present.size(), n, "decode", "places for present chunks"));
  STOKER_TRY(expect_places(wanted.size(), n, "decode", "places for wanted chunks"));
  Pass pass;
  std::vector<int> here;
  for (int i = 0; i < n; ++i) {
    if (present[i].bytes.empty()) continue;
    if (!wanted[i].bytes.empty())
      return refuse(chunk_name(i) + " is both present and wanted: leave one out");
    STOKER_TRY(pass.add(i, present[i]));
    here.push_back(i);
  }
  if (static_cast<int>(here.size()) < k_) {
    return refuse(std::to_string(here.size()) + " of " + std::to_string(n) +
                  " chunks are present, and a code of " + std::to_string(k_) + "+" +
                  std::to_string(m_) + " needs " + std::to_string(k_) + " to rebuild any other");
  }
  std::vector<int> rebuild;
  Writing writing;
  for (int i = 0; i < n; ++i) {
    if (wanted[i].bytes.empty()) continue;
    STOKER_TRY(pass.add(i, wanted[i]));
    rebuild.push_back(i);
    writing.add(wanted[i].bytes.data());
  }
  if (rebuild.empty()) return refuse("decode was asked for no chunk");
  const Recipe recipe = make_recipe(*parity_rows_, here, rebuild);
  Reading reading;
  for (const int source : recipe.sources) reading.add(present[source].bytes.data());
  const auto kernel = make_kernel(arithmetic_, recipe.matrix);
  pass.run([&](size_t size) {
    kernel->multiply(reading.get(), writing.get(), size);
    reading.advance(size);
    writing.advance(size);
  });
  return {};
}

Status ErasureCode::delta(int chunk, std::span<const std::byte> older, const Source& newer,
                          std::span<const Target> parity) const {
  if (chunk < 0 || chunk >= k_)
    return refuse("there is no data " + chunk_name(chunk) + " in a code of " + std::to_string(k_) +
                  "+" + std::to_string(m_));
  if (newer.bytes.empty()) return refuse("delta needs the new bytes of " + chunk_name(chunk));
  STOKER_TRY(expect_places(parity.size(), m_, "delta", "places for parity slices"));
  Pass pass;
  STOKER_TRY(pass.add(chunk, newer));
  if (!older.empty()) STOKER_TRY(pass.add(chunk, Source{older, {}}));
  Writing writing;
  std::vector<int> live;
  for (int j = 0; j < m_; ++j) {
    if (parity[j].bytes.empty()) continue;
    STOKER_TRY(pass.add(k_ + j, parity[j]));
    writing.add(parity[j].bytes.data());
    live.push_back(j);
  }
  if (live.empty()) return refuse("delta was given no parity to change");
  // Where all parities are there, as nearly always, the encoder's tables serve; else those left get
  // tables of their own.
  std::unique_ptr<const Kernel> partial;
  if (static_cast<int>(live.size()) < m_) {
    Matrix column(static_cast<int>(live.size()), 1);
    for (int row = 0; row < column.rows(); ++row)
      column.at(row, 0) = parity_rows_->at(live[row], chunk);
    partial = make_kernel(arithmetic_, column);
  }
  const Kernel& kernel = partial ? *partial : *encoder_;
  const int column = partial ? 0 : chunk;

  size_t at = 0;
  pass.run([&](size_t size) {
    // The difference of a block at a time stays in the near cache.
    std::array<std::byte, kCrcBlock> difference;
    for (const size_t end = at + size; at < end;) {
      const size_t piece = std::min(kCrcBlock, end - at);
      const std::byte* source = newer.bytes.data() + at;
      if (!older.empty()) {
        exclusive_or(source, older.data() + at, difference.data(), piece);
        source = difference.data();
      }
      kernel.add(column, source, writing.get(), piece);
      writing.advance(piece);
      at += piece;
    }
  });
  return {};
}

}  // namespace stoker::codec
