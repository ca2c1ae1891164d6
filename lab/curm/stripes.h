// How the requests of a trace become updates of stripes.
#pragma once

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "curm/scheme.h"
#include "curm/trace.h"
#include "stoker/base/bytes.h"

namespace stoker::curm {

inline constexpr uint64_t kUpdateBlock = 4096;  // updates are of whole blocks

// Stripes get numbers in the order in which they are first touched.
class Stripes {
 public:
  Stripes(int k, uint64_t chunk_bytes)
      : stripe_bytes_(static_cast<uint64_t>(k) * chunk_bytes), chunk_bytes_(chunk_bytes) {}

  uint64_t at(const Request& request, uint64_t offset) {
    return numbers_
        .try_emplace(uint64_t{request.object} << 40 | offset / stripe_bytes_, numbers_.size())
        .first->second;
  }
  uint64_t count() const { return numbers_.size(); }

  // The updates that the write makes, by stripe.
  std::vector<std::vector<Update>> cut(const Request& request) {
    std::vector<std::vector<Update>> result;
    uint64_t last = 0;
    const uint64_t end = align_up(request.offset + request.bytes, kUpdateBlock);
    for (uint64_t offset = align_down(request.offset, kUpdateBlock); offset < end;) {
      const uint64_t inside = offset % chunk_bytes_,
                     bytes = std::min(end - offset, chunk_bytes_ - inside);
      const uint64_t stripe = at(request, offset);
      if (result.empty() || stripe != last) result.emplace_back();
      last = stripe;
      result.back().push_back({{stripe, static_cast<int>(offset % stripe_bytes_ / chunk_bytes_)},
                               inside,
                               Value::sized(bytes)});
      offset += bytes;
    }
    return result;
  }

 private:
  const uint64_t stripe_bytes_, chunk_bytes_;
  std::unordered_map<uint64_t, uint64_t> numbers_;
};

}  // namespace stoker::curm
