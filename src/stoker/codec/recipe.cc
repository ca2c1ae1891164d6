#include "stoker/codec/recipe.h"

#include <algorithm>
#include <utility>

namespace stoker::codec {
namespace {

// The lost data chunks, a row each, by the sources: what is known of the data, then as many
// parities as data chunks are lost. With L the lost data, D the known, P those parities and C the
// parity rows: P = C[P,L] L + C[P,D] D, hence L = inverse(C[P,L]) (P + C[P,D] D). Only a square of
// at most m is inverted, not one of k.
Matrix solve(const Matrix& parity_rows, std::span<const int> known, std::span<const int> lost,
             std::span<const int> parities) {
  const int k = parity_rows.columns();
  const int unknowns = static_cast<int>(lost.size());
  Matrix square(unknowns, unknowns);
  for (int row = 0; row < unknowns; ++row) {
    for (int column = 0; column < unknowns; ++column)
      square.at(row, column) = parity_rows.at(parities[row] - k, lost[column]);
  }
  const Matrix solved = inverse(std::move(square));
  Matrix rows(unknowns, k);
  for (int row = 0; row < unknowns; ++row) {
    for (int p = 0; p < unknowns; ++p) {
      const uint8_t weight = solved.at(row, p);
      for (int i = 0; i < k - unknowns; ++i)
        rows.at(row, i) ^= multiply(weight, parity_rows.at(parities[p] - k, known[i]));
      rows.at(row, k - unknowns + p) = weight;
    }
  }
  return rows;
}

}  // namespace

Recipe make_recipe(const Matrix& parity_rows, std::span<const int> present,
                   std::span<const int> wanted) {
  const int k = parity_rows.columns();
  Recipe recipe{{present.begin(), present.begin() + k}, Matrix(static_cast<int>(wanted.size()), k)};
  const auto known_end = std::lower_bound(recipe.sources.begin(), recipe.sources.end(), k);
  const std::span<const int> known(recipe.sources.begin(), known_end);
  const std::span<const int> parities(known_end, recipe.sources.end());
  std::vector<int> lost;
  for (int i = 0; i < k; ++i) {
    if (!std::binary_search(known.begin(), known.end(), i)) lost.push_back(i);
  }
  const Matrix lost_rows = solve(parity_rows, known, lost, parities);

  for (int row = 0; row < recipe.matrix.rows(); ++row) {
    const int chunk = wanted[row];
    const auto place = std::find(lost.begin(), lost.end(), chunk);
    for (int column = 0; column < k; ++column) {
      uint8_t& cell = recipe.matrix.at(row, column);
      if (place != lost.end()) {
        cell = lost_rows.at(static_cast<int>(place - lost.begin()), column);
        continue;
      }
      // A parity: its own row, with what is lost put in.
      if (column < static_cast<int>(known.size())) cell = parity_rows.at(chunk - k, known[column]);
      for (int l = 0; l < static_cast<int>(lost.size()); ++l)
        cell ^= multiply(parity_rows.at(chunk - k, lost[l]), lost_rows.at(l, column));
    }
  }
  return recipe;
}

}  // namespace stoker::codec
