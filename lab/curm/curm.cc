#include "curm/curm.h"

#include <algorithm>

namespace stoker::curm {

Status Curm::update_together(const std::vector<Update>& pieces) {
  std::set<int> written;
  bool alike = true;
  for (const Update& piece : pieces) {
    written.insert(piece.chunk.position);
    alike =
        alike && piece.offset == pieces[0].offset && piece.value.size() == pieces[0].value.size();
  }
  // Logged, n pieces cost n (1 + m) appended and later a fold; written through, k - n read and n +
  // m staged, written once more.
  const int n = static_cast<int>(pieces.size());
  if (!alike || static_cast<int>(written.size()) != n || 2 * n <= k() ||
      !clean(pieces[0].chunk.stripe))
    return Vdl::update_together(pieces);
  Fold::Newest newest;
  for (const Update& piece : pieces)
    newest[piece.chunk.position].put(piece.offset, piece.value.size(), piece.value);
  return write_through(pieces[0].chunk.stripe, newest);
}

std::vector<uint64_t> Curm::pending() const {
  std::vector<uint64_t> stripes = Vdl::pending();
  if (classes_)
    std::stable_partition(stripes.begin(), stripes.end(),
                          [this](uint64_t stripe) { return !read_write(stripe); });
  return stripes;
}

std::vector<uint64_t> Curm::make_room(uint64_t logged_bytes_max) const {
  std::vector<uint64_t> folded;
  uint64_t left = logged_bytes();
  for (const uint64_t stripe : pending()) {
    if (left <= logged_bytes_max / 2) break;
    const uint64_t bytes = shared_bytes(stripe);
    if (bytes == 0) continue;
    left -= bytes;
    folded.push_back(stripe);
  }
  return folded;
}

// What is measured goes by the most that a stripe may have (256 KiB unless said otherwise): windows
// of 16 MiB, of which 16 KiB make it hot.
ReservedCurm::ReservedCurm(const Setup& setup)
    : Curm(setup),
      reserves_({64 * setup.reserved_bytes, std::max<uint64_t>(setup.reserved_bytes / 16, 1),
                 setup.reserved_bytes}) {}

Status ReservedCurm::update(const Update& update) {
  reserves_.take(update.chunk.stripe, update.value.size(), read_write(update.chunk.stripe));
  return Curm::update(update);
}

uint64_t ReservedCurm::shared_bytes(uint64_t stripe) const {
  const uint64_t bytes = Curm::shared_bytes(stripe);
  return bytes - std::min(bytes, reserves_.bytes(stripe));
}

uint64_t ReservedCurm::logged_bytes() const {
  uint64_t held = 0;
  reserves_.each(
      [&](uint64_t stripe, uint64_t room) { held += std::min(room, Curm::shared_bytes(stripe)); });
  return Curm::logged_bytes() - held;
}

}  // namespace stoker::curm
