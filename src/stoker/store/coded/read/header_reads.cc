// The header pages of stripes, from all live shards to what they say together in memory.
#include <algorithm>
#include <iterator>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/store/coded/read/reader.h"

namespace stoker::coded {
namespace {

constexpr size_t kStripesAtOnce = 16;
constexpr size_t kStripesAhead = 16;        // of which the headers are there before they are needed
constexpr uint64_t kHeaderReadsShare = 16;  // a sixteenth of it, at once

}  // namespace

Status Reader::load_headers(const StripePtr& stripe, Priority priority) {
  const auto failed = load_headers(std::span(&stripe, 1), priority);
  return failed.empty() ? Status() : failed.begin()->second;
}

// The pages of one stripe are few, and whoever needs them cannot do without; those of more come
// from the cap, as many at once as it has room for.
template <typename Take>
void Reader::each_header_read(std::span<const StripePtr> stripes, uint32_t positions,
                              Priority priority, const Take& take) {
  for (size_t first = 0; first < stripes.size();) {
    size_t count = std::min(kStripesAtOnce, stripes.size() - first);
    Grant grant;
    for (; count > 1; count /= 2) {
      const uint64_t bytes = (count - 1) * shape_.n() * header_bytes(shape_);
      if (bytes > budget_.cap() / kHeaderReadsShare) continue;
      auto more = budget_.take(bytes, "the headers of stripes of a coded store");
      if (!more) continue;
      grant = std::move(*more);
      break;
    }
    std::vector<HeaderRead> reads;
    for (size_t i = first; i < first + count; ++i)
      reads.push_back({stripes[i].get(), RawHeaders(shape_), positions});
    read_headers(reads, priority);
    for (size_t i = 0; i < count; ++i) take(stripes[first + i], reads[i]);
    first += count;
  }
}

// Two threads may do so at once with a stripe: the first one's counts.
std::map<uint64_t, Error> Reader::load_headers(std::span<const StripePtr> stripes,
                                               Priority priority) {
  std::vector<StripePtr> unknown;
  HeaderPins pins(map_);
  {
    const auto map = map_.lock();
    for (const StripePtr& stripe : stripes) {
      pins.add(*map, stripe);
      if (!stripe->has_whole_headers()) unknown.push_back(stripe);
    }
  }
  std::map<uint64_t, Error> failed;
  each_header_read(unknown, UINT32_MAX, priority, [&](const StripePtr& stripe, HeaderRead& read) {
    if (!read.any) {
      failed.emplace(stripe->id, fail(Code::io,
                                      "no header of stripe {} can be read ({}): bring missing "
                                      "disks back",
                                      stripe->id, read.why));
      return;
    }
    auto merged = std::make_shared<Headers>(read.raw.merge(shape_));
    const auto map = map_.lock();
    if (stripe->has_whole_headers()) return;
    stripe->headers = std::move(merged);
    map->headers.admit(stripe);
    // What such a page says may be on the disk all the same, and be needed when others are lost.
    const uint32_t unread = map->unread_positions(shape_, *stripe);
    for (size_t c = 0; c < shape_.n(); ++c) {
      if (is_set(unread, c)) map->bad[{stripe->id, c}] = stripe;
    }
  });
  return failed;
}

// With 6+3 a third of the pages. An old block matches them only if its disk lost the new one, and
// the disks of all parities lost what tells of it.
std::map<uint64_t, Error> Reader::load_for_reading(std::span<const StripePtr> stripes,
                                                   Priority priority) {
  std::vector<StripePtr> unknown, rest;
  HeaderPins pins(map_);
  {
    const auto map = map_.lock();
    for (const StripePtr& stripe : stripes) {
      pins.add(*map, stripe);
      if (stripe->headers) continue;
      (stripe->positions_on(~map->live) == 0 ? unknown : rest).push_back(stripe);
    }
  }
  const uint32_t parities = UINT32_MAX << shape_.k;
  each_header_read(unknown, parities, priority, [&](const StripePtr& stripe, HeaderRead& read) {
    if (!read.raw.parities_agree(shape_)) {
      rest.push_back(stripe);
      return;
    }
    auto headers = std::make_shared<Headers>(read.raw.merge(shape_));
    headers->counters.clear();
    const auto map = map_.lock();
    if (stripe->headers) return;
    stripe->headers = std::move(headers);
    map->headers.admit(stripe);
  });
  return load_headers(rest, priority);
}

// Whoever finds the headers of the stripe before the first one went there before.
std::vector<StripePtr> Reader::needed_ahead(std::string_view key, uint64_t offset, size_t bytes) {
  if (bytes == 0 || loading_ahead_.load(std::memory_order_relaxed)) return {};
  const size_t first = offset / shape_.stripe_bytes();
  const size_t next = (offset + bytes - 1) / shape_.stripe_bytes() + 1;
  const auto map = map_.lock();
  const ObjectPtr object = map->table.find(key);
  if (!object || next >= object->stripes.size()) return {};
  const StripePtr before = first == 0 ? nullptr : object->stripes[first - 1];
  if (offset != 0 && (!before || !before->headers)) return {};
  // With the memory that reading them takes, and others come meanwhile: half of what is left.
  const uint64_t each = headers_bytes(shape_) + shape_.n() * header_bytes(shape_);
  const size_t most = std::min<uint64_t>(kStripesAhead, map->headers.room_bytes() / 2 / each);
  std::vector<StripePtr> stripes;
  bool soon = false;
  for (size_t i = next; i < std::min(object->stripes.size(), next + 2 * kStripesAhead); ++i) {
    const StripePtr& stripe = object->stripes[i];
    if (!stripe || stripe->headers || stripes.size() >= most) continue;
    stripes.push_back(stripe);
    soon = soon || i < next + kStripesAhead;
  }
  if (!soon || loading_ahead_.exchange(true)) return {};
  return stripes;
}

// What of it fails, fails again for whoever needs it.
void Reader::load_ahead(std::span<const StripePtr> stripes, Priority priority) {
  (void)load_for_reading(stripes, priority);
  STOKER_CHECK(loading_ahead_.exchange(false));
}

// Takes what can be read of the header pages of all live chunks, of all of these in one batch.
void Reader::read_headers(std::span<HeaderRead> all, Priority priority) {
  std::vector<AlignedBytes> memory;
  std::vector<Area> areas;
  std::vector<std::pair<size_t, size_t>> at;  // in `all`, position
  for (size_t i = 0; i < all.size(); ++i) {
    const Stripe& stripe = *all[i].stripe;
    const uint32_t positions = map_.live_positions(stripe) & all[i].positions;
    for (size_t c = 0; c < shape_.n(); ++c) {
      if (!is_set(positions, c)) continue;
      areas.push_back({stripe.shards[c], shape_.slot_at(stripe.slots[c]),
                       memory.emplace_back(header_bytes(shape_)).slice()});
      at.emplace_back(i, c);
    }
  }
  STOKER_CHECK(areas.size() == at.size() && areas.size() == memory.size());
  const std::string why = read_areas(shards_, priority, areas);
  for (size_t i = 0; i < areas.size(); ++i) {
    HeaderRead& read = all[at[i].first];
    read.raw.take(shape_, shards_.store(), read.stripe->id, at[i].second, memory[i].span());
    read.any = read.any || areas[i].any();
    read.raw.damaged = read.raw.damaged || !areas[i].all();
    if (!areas[i].any()) read.why = why;
  }
}

}  // namespace stoker::coded
