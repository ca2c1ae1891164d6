// HeaderCache: the headers of stripes in memory, on the cap. Where there are too many, those go
// that nobody needs now and nobody has used for longest.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "stoker/memory/budget.h"
#include "stoker/store/coded/format/stripe.h"

namespace stoker::coded {

// Guarded by the CommittedMap's mutex, like the stripes.
class HeaderCache {
 public:
  HeaderCache(const Shape& shape, Budget& budget);

  // The headers of this stripe, which are in memory and on its disks, count from now on. They do
  // with more than a share of the cap only where those who are at work need more. Where nothing of
  // the cap is left at all they stay uncounted, and are among the first to go.
  void admit(const StripePtr& stripe);
  static void used(Stripe& stripe) { stripe.headers_used = true; }
  // What the share has room for yet.
  uint64_t room_bytes() const { return share_ - std::min(share_, ring_.size() * each_); }
  // At once, if nobody needs them.
  void forget(Stripe& stripe) const;
  // All of them stay, uncounted where that is more than a share: of a shard that is being brought
  // up to date some of what they say is in memory only.
  void keep_all(bool keep) { keep_all_ = keep; }

 private:
  bool may_go(const Stripe& stripe) const;
  bool evict_one();

  const uint64_t each_;   // bytes, of one stripe
  const uint64_t share_;  // likewise, of all of them
  Budget& budget_;
  bool keep_all_ = false;
  std::deque<std::weak_ptr<Stripe>> ring_;  // the next to look at first; some are gone
};

}  // namespace stoker::coded
