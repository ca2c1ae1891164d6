// RangeMap: byte ranges that do not overlap, each with what was put there last. Putting splits what
// it covers in part.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace stoker::curm {

template <typename T>
class RangeMap {
 public:
  // [at, end) of what was put as a range that began at `origin`: its part of the value starts at
  // `at - origin`.
  struct Piece {
    uint64_t at = 0, end = 0, origin = 0;
    T value;
    uint64_t size() const { return end - at; }
  };

  void put(uint64_t at, uint64_t bytes, T value) {
    erase(at, bytes);
    if (bytes != 0) pieces_[at] = {at, at + bytes, at, std::move(value)};
  }
  void erase(uint64_t at, uint64_t bytes) {
    const uint64_t end = at + bytes;
    auto next = first_beyond(at);
    while (next != pieces_.end() && next->second.at < end) {
      const Piece piece = next->second;
      next = pieces_.erase(next);
      if (piece.at < at) pieces_[piece.at] = {piece.at, at, piece.origin, piece.value};
      if (piece.end > end)
        next =
            pieces_.insert_or_assign(end, Piece{end, piece.end, piece.origin, piece.value}).first;
    }
  }
  // What lies in [at, at + bytes), clipped to it, in order.
  std::vector<Piece> within(uint64_t at, uint64_t bytes) const {
    std::vector<Piece> found;
    if (bytes == 0) return found;
    for (auto next = first_beyond(at); next != pieces_.end() && next->second.at < at + bytes;
         ++next) {
      Piece piece = next->second;
      piece.at = std::max(piece.at, at);
      piece.end = std::min(piece.end, at + bytes);
      found.push_back(std::move(piece));
    }
    return found;
  }
  std::vector<Piece> all() const { return within(0, UINT64_MAX); }
  // The parts of [at, at + bytes) where nothing lies, in order; a T is made for each.
  std::vector<Piece> gaps(uint64_t at, uint64_t bytes) const {
    std::vector<Piece> found;
    uint64_t from = at;
    for (const Piece& piece : within(at, bytes)) {
      if (piece.at > from) found.push_back({from, piece.at, from, T()});
      from = piece.end;
    }
    if (from < at + bytes) found.push_back({from, at + bytes, from, T()});
    return found;
  }
  // The ranges with neighbours joined, whatever their values; also those with a gap of at most so
  // many bytes between them.
  std::vector<Piece> joined(uint64_t gap_max = 0) const {
    std::vector<Piece> found;
    for (const auto& [at, piece] : pieces_) {
      if (!found.empty() && at - found.back().end <= gap_max) {
        found.back().end = piece.end;
      } else {
        found.push_back({at, piece.end, at, T()});
      }
    }
    return found;
  }
  bool empty() const { return pieces_.empty(); }
  void clear() { pieces_.clear(); }

 private:
  auto first_beyond(uint64_t at) const {
    auto next = pieces_.upper_bound(at);
    if (next != pieces_.begin() && std::prev(next)->second.end > at) --next;
    return next;
  }
  auto first_beyond(uint64_t at) {
    auto next = pieces_.upper_bound(at);
    if (next != pieces_.begin() && std::prev(next)->second.end > at) --next;
    return next;
  }
  std::map<uint64_t, Piece> pieces_;  // by `at`
};

}  // namespace stoker::curm
