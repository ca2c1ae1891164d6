#include "stoker/store/coded/map/committed_map.h"

#include <algorithm>
#include <array>
#include <bit>

#include "stoker/base/check.h"
#include "stoker/store/coded/format/rows.h"

namespace stoker::coded {
namespace {

// with more shards than chunks: stripes that would need a full shard are passed over
constexpr int kPlacementTries = 64;

}  // namespace

ObjectInfo MapState::info_of(std::string_view key, const Object& object) const {
  ObjectInfo info{std::string(key), object.bytes, object.chunk_bytes,
                  object.number,    {},           tag_of(object)};
  if (classes.known(class_id(key))) info.expected = classes.of(class_id(key));
  return info;
}

// Each of them has such a page (a fresh stripe gets all of them), so what it says is not known
// until it is compared.
uint32_t MapState::unread_positions(const Shape& shape, const Stripe& stripe) const {
  STOKER_CHECK(stripe.has_whole_headers());
  uint32_t positions = 0;
  for (size_t at = 0; at < stripe.headers->counters.size(); ++at) {
    const size_t position = at / shape.pages();
    if (stripe.headers->counters[at] == 0 && is_live(stripe.shards[position]))
      positions |= uint32_t{1} << position;
  }
  return positions;
}

// What has lost most, be it with a shard or by itself; then by class (what is rewritten: its
// updates are on fewer disks, and each fold of it has to decode; what is read: its readers have to;
// what is only written is missed by nobody yet); then what readers had to decode most often.
MapState::Urgency MapState::urgency(const Stripe& stripe) const {
  size_t missing = 0;
  for (size_t position = 0; position < stripe.shards.size(); ++position) {
    const ChunkAt at(stripe.id, position);
    missing += !is_live(stripe.shards[position]) || bad.contains(at) || lost.contains(at) ? 1 : 0;
  }
  // read_only, write_only, read_write
  constexpr std::array<size_t, kClasses.size()> kRank = {1, 0, 2};
  return {missing, kRank[static_cast<size_t>(classes.of(stripe.object))], stripe.misses};
}

CommittedMap::CommittedMap(const Shape& shape, const ClassTree& tree, Budget& budget,
                           std::string name)
    : shape_(shape), name_(std::move(name)), slots_(shape), state_(shape, tree, budget) {}

HeaderPins::HeaderPins(CommittedMap& map, const StripePtr& stripe) : map_(map) {
  add(*map_.lock(), stripe);
}

HeaderPins::~HeaderPins() {
  if (stripes_.empty()) return;
  const auto map = map_.lock();
  for (const StripePtr& stripe : stripes_) {
    STOKER_CHECK(stripe->header_pins > 0);
    --stripe->header_pins;
  }
}

void HeaderPins::add(const MapState&, const StripePtr& stripe) {
  STOKER_CHECK(stripe != nullptr);
  ++stripe->header_pins;
  stripes_.push_back(stripe);
}

ShardSet CommittedMap::live() const { return lock()->live; }

uint32_t CommittedMap::live_positions(const Stripe& stripe) const {
  return stripe.positions_on(live());
}

std::optional<Error> CommittedMap::refused() const { return lock()->refused; }

Result<StripePtr> CommittedMap::make_stripe(Class expected) {
  for (int i = 0; i < kPlacementTries; ++i) {
    const uint64_t id = lock()->take_id();
    std::vector<size_t> shards = placement(shape_, id);
    auto slots = slots_.take(shards, expected);
    if (!slots && await_abandoned()) slots = slots_.take(shards, expected);
    if (slots) return std::make_shared<Stripe>(id, std::move(shards), std::move(*slots), slots_);
  }
  return fail(Code::out_of_space,
              "the store {} of {} is full: remove objects, or make a larger one", name_,
              human_bytes(shape_.capacity_bytes()));
}

std::vector<std::pair<StripePtr, ValRef>> CommittedMap::vals_of(size_t shard) const {
  std::vector<std::pair<StripePtr, ValRef>> vals;
  const auto map = lock();
  for (const auto& [id, weak] : map->dirty) {
    const StripePtr stripe = weak.lock();
    if (!stripe) continue;
    const auto position = static_cast<size_t>(
        std::find(stripe->shards.begin(), stripe->shards.end(), shard) - stripe->shards.begin());
    if (position == shape_.n()) continue;
    for (const auto& [block, newer] : stripe->overlay) {
      if (position >= shape_.k || position == newer.val->chunk)
        vals.emplace_back(stripe, newer.val);
    }
  }
  // The oldest are folded first, and segments come free.
  std::sort(vals.begin(), vals.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->stamp, a.second) < std::pair(b.second->stamp, b.second);
  });
  vals.erase(std::unique(vals.begin(), vals.end()), vals.end());
  return vals;
}

bool CommittedMap::folded_up_to(Stamp stamp) const {
  const auto map = lock();
  for (const auto& [id, weak] : map->dirty) {
    const StripePtr stripe = weak.lock();
    if (!stripe || map->stuck.contains(id)) continue;
    if (std::any_of(stripe->overlay.begin(), stripe->overlay.end(),
                    [stamp](const auto& each) { return each.second.val->stamp <= stamp; }))
      return false;
  }
  return true;
}

std::vector<std::string> CommittedMap::affected() const {
  std::vector<std::string> keys;
  const auto map = lock();
  // each stripe has k chunks left
  if (static_cast<size_t>(std::popcount(map->live)) + shape_.m >= shape_.shards) return keys;
  const auto is_live = [&](size_t shard) { return map->is_live(shard); };
  for (const auto& [key, object] : map->table.objects()) {
    uint64_t left = object->bytes;
    bool lost = false;
    for (const StripePtr& stripe : object->stripes) {
      const uint64_t bytes = std::min<uint64_t>(left, shape_.stripe_bytes());
      left -= bytes;
      if (!stripe) continue;
      const auto end_of_data =
          stripe->shards.begin() +
          static_cast<ptrdiff_t>((bytes + shape_.chunk_bytes - 1) / shape_.chunk_bytes);
      const bool decodes = static_cast<size_t>(std::count_if(
                               stripe->shards.begin(), stripe->shards.end(), is_live)) >= shape_.k;
      lost = lost || (!decodes && !std::all_of(stripe->shards.begin(), end_of_data, is_live));
    }
    if (lost) keys.push_back(key);
  }
  return keys;
}

// Whoever finds no room waits for those before it is refused.
bool CommittedMap::await_abandoned() {
  auto map = lock();
  if (map->abandoned == 0) return false;
  map.wait([&] { return map->abandoned == 0; });
  return true;
}

}  // namespace stoker::coded
