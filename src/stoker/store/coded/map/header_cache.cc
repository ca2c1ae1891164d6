#include "stoker/store/coded/map/header_cache.h"

#include <utility>

#include "stoker/base/check.h"

namespace stoker::coded {
namespace {

constexpr uint64_t kHeadersShare = 16;  // a sixteenth of it
// for one that comes: after many were kept they go step by step
constexpr int kEvictedAtOnce = 8;

}  // namespace

HeaderCache::HeaderCache(const Shape& shape, Budget& budget)
    : each_(headers_bytes(shape)), share_(budget.cap() / kHeadersShare), budget_(budget) {}

void HeaderCache::admit(const StripePtr& stripe) {
  STOKER_CHECK(stripe->headers);
  stripe->headers_used = true;
  if (!std::exchange(stripe->headers_cached, true)) {
    ring_.push_back(stripe);
  } else if (stripe->headers_grant.bytes() > 0) {
    return;
  }
  ++stripe->header_pins;  // it is not what goes
  const auto too_many = [this] { return ring_.size() * each_ > share_; };
  for (int i = 0; i < kEvictedAtOnce && too_many() && evict_one(); ++i) {
  }
  while (stripe->headers_grant.bytes() == 0 && (!keep_all_ || !too_many())) {
    auto grant = budget_.take(each_, "the headers of stripes of a coded store");
    if (grant) stripe->headers_grant = std::move(*grant);
    if (grant || !evict_one()) break;
  }
  STOKER_CHECK(stripe->headers && stripe->header_pins > 0);
  --stripe->header_pins;
}

void HeaderCache::forget(Stripe& stripe) const {
  if (!may_go(stripe)) return;
  stripe.headers.reset();
  stripe.headers_grant = Grant();
}

bool HeaderCache::may_go(const Stripe& stripe) const {
  return !keep_all_ && stripe.readers == 0 && stripe.header_pins == 0 && !stripe.folding &&
         stripe.overlay.empty() && stripe.overrides.empty();
}

// One that was used since it was looked at last is passed over once. False: none may go.
bool HeaderCache::evict_one() {
  for (size_t looks = 2 * ring_.size(); looks > 0; --looks) {
    const StripePtr stripe = ring_.front().lock();
    ring_.pop_front();
    if (!stripe) return true;
    STOKER_CHECK(stripe->headers_cached);
    const bool stays =
        stripe->headers && (std::exchange(stripe->headers_used, false) || !may_go(*stripe));
    if (stays) {
      ring_.push_back(stripe);
      continue;
    }
    stripe->headers_cached = false;
    forget(*stripe);
    return true;
  }
  return false;
}

}  // namespace stoker::coded
