// Plain ISA-L, the peer of `stoker bench codec`: called as its manual says, by a careful user.
// Whole chunks at a time, tables made once, no checksums.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace stoker::cli {

// A code of k + m chunks, with the same matrix as ours.
class PlainIsal {
 public:
  PlainIsal(int k, int m);

  // How many chunks decode() takes for lost: the first ones, as many as can be.
  size_t lost() const { return static_cast<size_t>(lost_); }

  // `chunks`: the k + m chunks of a stripe, `bytes` long each.
  void encode(std::span<std::byte* const> chunks, size_t bytes);
  void decode(std::span<std::byte* const> chunks, size_t bytes);
  // Data chunk `chunk` changes to `newer`; the parities follow.
  void delta(std::span<std::byte* const> chunks, size_t bytes, size_t chunk,
             const std::byte* newer);

 private:
  const int k_;
  const int m_;
  const int lost_;
  std::vector<unsigned char> encode_tables_;
  std::vector<unsigned char> decode_tables_;
  std::vector<std::byte> difference_;
};

std::string isal_version();
// The widest instructions of this processor that ISA-L has a form for: it takes those by itself,
// and does not tell.
std::string isal_target();

}  // namespace stoker::cli
