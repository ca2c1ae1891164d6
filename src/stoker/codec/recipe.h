// Recipe: how wanted chunks follow from k present ones. Internal to codec/.
#pragma once

#include <span>
#include <vector>

#include "stoker/codec/gf256.h"

namespace stoker::codec {

struct Recipe {
  std::vector<int> sources;  // k present chunks
  Matrix matrix;             // a row for each wanted chunk, a column for each source
};

// `present` holds at least k of the chunks, ascending, data (0 to k-1) and parity (from k);
// `wanted` none of those.
Recipe make_recipe(const Matrix& parity_rows, std::span<const int> present,
                   std::span<const int> wanted);

}  // namespace stoker::codec
