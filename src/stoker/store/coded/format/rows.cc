#include "stoker/store/coded/format/rows.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {

RowSet::RowSet(const Shape& shape, const RowsWanted& rows, uint32_t available, uint32_t lagging,
               bool spare)
    : shape_(shape),
      headers_(*rows.stripe->headers),
      first_(rows.first),
      count_(rows.count),
      wanted_(rows.wanted),
      available_(available),
      lagging_(lagging),
      spare_(spare),
      blocks_(rows.blocks),
      have_(rows.count, 0) {
  STOKER_CHECK(headers_.whole() && count_ > 0 && first_ + count_ <= shape_.rows());
  STOKER_CHECK(blocks_.size() >= shape_.n() * count_ * kBlock);
  for (size_t r = 0; r < count_; ++r) {
    for (size_t c = 0; c < shape_.n(); ++c) {
      if (!zeros(c, r)) continue;
      std::memset(at(c, r), 0, kBlock);
      have_[r] |= uint32_t{1} << c;
    }
  }
}

size_t RowSet::there(size_t r) const { return static_cast<size_t>(std::popcount(have_[r])); }

bool RowSet::all_have(size_t c) const {
  return std::all_of(have_.begin(), have_.end(), [c](uint32_t have) { return is_set(have, c); });
}

// What is wanted is waited for: its place may be decoded into.
bool RowSet::enough() const {
  return (under_way_ & wanted_) == 0 && std::all_of(have_.begin(), have_.end(), [&](uint32_t have) {
           return (have & wanted_) == wanted_ ||
                  static_cast<size_t>(std::popcount(have)) >= shape_.k;
         });
}

bool RowSet::known(size_t c, size_t r) const {
  return c < shape_.k ? headers_.versions[(first_ + r) * shape_.k + c] != kUnknown
                      : !headers_.unsound[(first_ + r) * shape_.m + c - shape_.k];
}

bool RowSet::intact(size_t c, size_t r) const {
  return crc32c(at(c, r), kBlock) == headers_.crcs[(first_ + r) * shape_.n() + c];
}

bool RowSet::zeros(size_t c, size_t r) const {
  return c < shape_.k ? headers_.versions[(first_ + r) * shape_.k + c] == 0
                      : row_is_blank(shape_, headers_, first_ + r);
}

// Some of what is wanted cannot be read, whatever comes of the rest.
bool RowSet::surely_decodes() const {
  for (size_t c = 0; c < shape_.n(); ++c) {
    if (is_set(wanted_ & ~available_, c) && !all_have(c)) return true;
  }
  return false;
}

uint32_t RowSet::next() {
  uint32_t chosen = 0;
  // How many it found, of `most`.
  const auto choose = [&](uint32_t from, size_t most) {
    size_t found = 0;
    for (size_t c = 0; c < shape_.n() && found < most; ++c) {
      if (!is_set(from & available_ & ~tried_ & ~chosen, c) || all_have(c)) continue;
      chosen |= uint32_t{1} << c;
      ++found;
    }
    return found;
  };
  for (bool goes_on = false; (chosen == 0 || goes_on) && turn_ < 3; ++turn_) {
    if (turn_ == 0) {
      choose(wanted_, shape_.n());
      goes_on = surely_decodes();
      continue;
    }
    goes_on = false;
    if (enough()) continue;
    if (turn_ == 2) {
      choose(available_, shape_.n());
      continue;
    }
    size_t sure = 0;
    for (size_t c = 0; c < shape_.n(); ++c) sure += all_have(c) || is_set(chosen, c) ? 1 : 0;
    const size_t lacking = shape_.k - std::min(shape_.k, sure);
    const size_t found = choose(available_ & ~lagging_, lacking + (spare_ ? 1 : 0));
    if (found < lacking) choose(lagging_, lacking - found);
  }
  tried_ |= chosen;
  under_way_ |= chosen;
  // Zeros that are known stand in memory that is being read into.
  for (uint32_t& have : have_) have &= ~chosen;
  return chosen;
}

void RowSet::took(size_t c, bool ok) {
  STOKER_CHECK(is_set(under_way_, c));
  under_way_ &= ~(uint32_t{1} << c);
  for (size_t r = 0; r < count_; ++r) {
    const bool zero = zeros(c, r);
    if (zero) std::memset(at(c, r), 0, kBlock);  // whatever stood in their place
    const bool right = zero || (ok && known(c, r) && intact(c, r));
    if (right) have_[r] |= uint32_t{1} << c;
    if (!right && known(c, r)) wrong_ |= wanted_ & uint32_t{1} << c;
  }
}

RowSet::Decoded RowSet::complete(const codec::ErasureCode& code) {
  Decoded decoded;
  for (size_t r = 0; r < count_ && !decoded.lost;) {
    size_t end = r + 1;
    while (end < count_ && have_[end] == have_[r]) ++end;
    if (const uint32_t missing = wanted_ & ~have_[r]; missing != 0) {
      decoded.blocks += static_cast<uint64_t>(std::popcount(missing)) * (end - r);
      ++decoded.calls;
      decoded.lost = decode(code, r, end);
    }
    r = end;
  }
  return decoded;
}

// Rows of which the same blocks are there. The first that did not come out right.
std::optional<size_t> RowSet::decode(const codec::ErasureCode& code, size_t begin, size_t end) {
  STOKER_CHECK(begin < end && end <= count_);
  if (there(begin) < shape_.k) return begin;
  const size_t bytes = (end - begin) * kBlock;
  const uint32_t missing = wanted_ & ~have_[begin];
  std::vector<codec::Source> sources(shape_.n());
  std::vector<codec::Target> targets(shape_.n());
  std::vector<std::vector<uint32_t>> crcs(shape_.n());
  for (size_t c = 0; c < shape_.n(); ++c) {
    if (is_set(have_[begin], c)) sources[c].bytes = {at(c, begin), bytes};
    if (!is_set(missing, c)) continue;
    crcs[c].resize(end - begin);
    targets[c] = {{at(c, begin), bytes}, crcs[c]};
  }
  if (!code.decode(sources, targets)) return begin;
  for (size_t r = begin; r < end; ++r) {
    for (size_t c = 0; c < shape_.n(); ++c) {
      if (!is_set(missing, c) || mutated(Mutation::decode_unchecked)) continue;
      // An unsound parity has no checksum to compare with; it is computed from blocks that have. A
      // data block of no known version has none either.
      if (known(c, r) ? crcs[c][r - begin] != headers_.crcs[(first_ + r) * shape_.n() + c]
                      : c < shape_.k)
        return r;
    }
  }
  return {};
}

}  // namespace stoker::coded
