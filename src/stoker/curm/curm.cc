#include "stoker/curm/curm.h"

#include <algorithm>

namespace stoker::curm {

Status Curm::update_together(const std::vector<Update>& pieces) {
  std::set<int> written;
  bool alike = true;
  for (const Update& piece : pieces) {
    written.insert(piece.chunk.position);
    alike = alike && piece.offset == pieces[0].offset && piece.value.size() == pieces[0].value.size();
  }
  // Logged, n pieces cost n (1 + m) appended and later a fold; written through, k - n read and n + m staged, written once more.
  const int n = static_cast<int>(pieces.size());
  if (!alike || static_cast<int>(written.size()) != n || 2 * n <= k() || !clean(pieces[0].chunk.stripe)) return Vdl::update_together(pieces);
  Fold::Newest newest;
  for (const Update& piece : pieces) newest[piece.chunk.position].put(piece.offset, piece.value.size(), piece.value);
  return write_through(pieces[0].chunk.stripe, newest);
}

std::vector<uint64_t> Curm::pending() const {
  std::vector<uint64_t> stripes = Vdl::pending();
  if (classes_) {
    std::stable_partition(stripes.begin(), stripes.end(), [this](uint64_t stripe) { return classes_(stripe) != Class::read_write; });
  }
  return stripes;
}

std::vector<uint64_t> Curm::make_room(uint64_t logged_bytes_max) const {
  std::vector<uint64_t> folded;
  uint64_t left = Vdl::logged_bytes();
  for (const uint64_t stripe : pending()) {
    if (left <= logged_bytes_max / 2) break;
    left -= Vdl::logged_bytes(stripe);
    folded.push_back(stripe);
  }
  return folded;
}

}  // namespace stoker::curm
