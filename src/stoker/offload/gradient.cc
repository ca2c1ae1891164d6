#include "stoker/offload/gradient.h"

#include <xxhash.h>

#include <algorithm>

#include "stoker/offload/parallel.h"

namespace stoker::offload {
namespace {

struct Piece {
  size_t span;
  uint64_t index;  // of the piece inside its span
};

// Pieces of all spans in one list, so that many small gradients spread as well as one large one.
template <typename Spans, typename Pieces>
std::vector<Piece> cut(const Spans& spans, Pieces pieces_of) {
  std::vector<Piece> pieces;
  for (size_t span = 0; span < spans.size(); ++span) {
    for (uint64_t i = 0; i < pieces_of(spans[span]); ++i) pieces.push_back({span, i});
  }
  return pieces;
}

GradSpan part(const GradSpan& span, uint64_t piece) {
  const uint64_t first = piece * optim::kNormPiece;
  return {span.data + first * optim::grad_bytes(span.type),
          std::min<uint64_t>(optim::kNormPiece, span.count - first), span.type};
}

uint64_t norm_pieces_of(const GradSpan& span) { return optim::norm_pieces(span.count); }

}  // namespace

Hash128 hash_piece(const std::byte* data, uint64_t bytes) {
  const XXH128_hash_t hash = XXH3_128bits(data, bytes);
  return {hash.low64, hash.high64};
}

Hash128 combine(std::span<const Hash128> pieces, uint64_t bytes) {
  const XXH128_hash_t hash = XXH3_128bits_withSeed(pieces.data(), pieces.size_bytes(), bytes);
  return {hash.low64, hash.high64};
}

std::vector<Hash128> hash(Pool& pool, std::span<const std::span<const std::byte>> spans) {
  const auto pieces =
      cut(spans, [](std::span<const std::byte> span) { return hash_pieces(span.size()); });
  std::vector<Hash128> hashes(pieces.size());
  parallel(pool, pieces.size(), [&](size_t i) {
    const auto span = spans[pieces[i].span];
    const uint64_t at = pieces[i].index * kHashPiece;
    hashes[i] = hash_piece(span.data() + at, std::min<uint64_t>(kHashPiece, span.size() - at));
  });
  std::vector<Hash128> whole;
  size_t first = 0;
  for (const auto& span : spans) {
    const size_t count = hash_pieces(span.size());
    whole.push_back(combine(std::span(hashes).subspan(first, count), span.size()));
    first += count;
  }
  return whole;
}

std::vector<double> sums_of_squares(Pool& pool, std::span<const GradSpan> spans) {
  const auto pieces = cut(spans, norm_pieces_of);
  std::vector<double> partial(pieces.size());
  parallel(pool, pieces.size(), [&](size_t i) {
    const GradSpan piece = part(spans[pieces[i].span], pieces[i].index);
    optim::sums_of_squares(piece.data, piece.type, piece.count, &partial[i]);
  });
  std::vector<double> sums(spans.size(), 0.0);
  for (size_t i = 0; i < pieces.size(); ++i) sums[pieces[i].span] += partial[i];
  return sums;
}

void scale(Pool& pool, std::span<const GradSpan> spans, float factor) {
  const auto pieces = cut(spans, norm_pieces_of);
  parallel(pool, pieces.size(), [&](size_t i) {
    const GradSpan piece = part(spans[pieces[i].span], pieces[i].index);
    optim::scale_in_place(piece.data, piece.type, piece.count, factor);
  });
}

}  // namespace stoker::offload
