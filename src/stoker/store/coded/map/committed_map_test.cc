// CommittedMap without a disk: the ids and slots of stripes, what is repaired first, what is lost
// with which shards, which VALs a shard's log needs.
#include "stoker/store/coded/map/committed_map.h"

#include <algorithm>

#include "stoker/store/coded/format/headers.h"
#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

constexpr size_t kRows = 16;
constexpr uint32_t kSlots = 3;
constexpr ShardSet kAll = 0b111111;

class CodedMap : public ::testing::Test {
 protected:
  CodedMap() : map_(small_shape(kSlots), ClassTree::shipped(), budget_, "coded(4+2, x)") {
    const auto map = map_.lock();
    map->epoch = 5;
    map->live = kAll;
  }
  // An object of one stripe, all of which counts.
  StripePtr add(const std::string& key) {
    StripePtr stripe = *map_.make_stripe(Class::read_write);
    ByteWriter items;
    put_object(items, key, map_.shape().stripe_bytes(), 64 * kKiB, 1);
    put_stripe(items, 0, *stripe);
    const auto resolve = [&](uint64_t, const std::vector<uint32_t>&) { return stripe; };
    EXPECT_OK(map_.lock()->table.apply(map_.shape(), items.take(), resolve));
    return stripe;
  }
  // A block of this chunk and row becomes newer in the log.
  ValRef update(const StripePtr& stripe, size_t chunk, size_t row, Stamp stamp) {
    auto val = std::make_shared<Val>();
    val->stamp = stamp;
    val->stripe = stripe->id;
    val->chunk = chunk;
    val->first = row;
    const auto map = map_.lock();
    stripe->overlay[row * map_.shape().k + chunk] = {val, 0};
    map->dirty[stripe->id] = stripe;
    return val;
  }
  size_t position_of(const Stripe& stripe, size_t shard) const {
    return static_cast<size_t>(std::find(stripe.shards.begin(), stripe.shards.end(), shard) -
                               stripe.shards.begin());
  }
  Budget budget_{1 << 20};
  CommittedMap map_;
};

TEST_F(CodedMap, AStripeHasAnIdOfTheEpochAndASlotOnEachShardUntilItGoes) {
  std::vector<StripePtr> stripes;
  for (uint64_t nth = 1; nth <= kSlots; ++nth) {
    stripes.push_back(*map_.make_stripe(Class::read_write));
    EXPECT_EQ(stripes.back()->id, make_stamp(5, nth));
  }
  EXPECT_EQ(map_.slots().used(), kSlots * 6);
  const auto full = map_.make_stripe(Class::read_write);
  ASSERT_FALSE(full);
  EXPECT_EQ(full.error().code, Code::out_of_space);
  EXPECT_NE(full.error().what.find("coded(4+2, x)"), std::string::npos);
  stripes.pop_back();
  EXPECT_OK(map_.make_stripe(Class::read_write));
}

TEST_F(CodedMap, OnlyLivePositionsCount) {
  const StripePtr stripe = add("a");
  EXPECT_EQ(map_.live_positions(*stripe), 0b111111U);
  map_.lock()->live = kAll & ~shard_bit(2);
  EXPECT_EQ(map_.live_positions(*stripe), 0b111111U & ~(1U << position_of(*stripe, 2)));
}

TEST_F(CodedMap, APageIsUnreadWhereItsShardCounts) {
  const StripePtr stripe = add("a");
  const auto map = map_.lock();
  stripe->headers = std::make_shared<Headers>(blank_headers(map_.shape()));
  std::fill(stripe->headers->counters.begin(), stripe->headers->counters.end(), 1);
  EXPECT_EQ(map->unread_positions(map_.shape(), *stripe), 0U);
  const size_t position = 3;
  stripe->headers->counters[position * map_.shape().pages()] = 0;
  EXPECT_EQ(map->unread_positions(map_.shape(), *stripe), 1U << position);
  map->live = kAll & ~shard_bit(stripe->shards[position]);
  EXPECT_EQ(map->unread_positions(map_.shape(), *stripe), 0U);
}

TEST_F(CodedMap, WhatHasLostMostIsTheMostUrgentThenWhatReadersMiss) {
  const StripePtr whole = add("a");
  const StripePtr missed = add("b");
  const StripePtr hurt = add("c");
  const auto map = map_.lock();
  missed->misses = 7;
  map->bad[{hurt->id, 0}] = hurt;
  EXPECT_LT(map->urgency(*whole), map->urgency(*missed));
  EXPECT_LT(map->urgency(*missed), map->urgency(*hurt));
  map->lost[{missed->id, 1}] = {missed, "why"};
  EXPECT_LT(map->urgency(*hurt), map->urgency(*missed));
}

TEST_F(CodedMap, ObjectsAreAffectedWhereDataIsOnNoLiveShardAndCannotBeDecoded) {
  const StripePtr stripe = add("a");
  const auto without = [&](std::initializer_list<size_t> positions) {
    ShardSet live = kAll;
    for (const size_t each : positions) live &= ~shard_bit(stripe->shards[each]);
    map_.lock()->live = live;
    return map_.affected();
  };
  EXPECT_TRUE(without({}).empty());
  EXPECT_TRUE(without({0, 1}).empty());  // decoded
  EXPECT_EQ(without({0, 4, 5}), std::vector<std::string>{"a"});
  EXPECT_EQ(without({1, 2, 3}), std::vector<std::string>{"a"});
}

TEST_F(CodedMap, AShardNeedsTheValsOfItsChunkAndAParityAllOfThem) {
  const StripePtr stripe = add("a");
  const ValRef second = update(stripe, 1, 3, make_stamp(5, 9));
  const ValRef first = update(stripe, 0, 2, make_stamp(5, 8));
  const auto of = [&](size_t position) {
    std::vector<ValRef> vals;
    for (const auto& [whose, val] : map_.vals_of(stripe->shards[position])) vals.push_back(val);
    return vals;
  };
  EXPECT_EQ(of(0), std::vector<ValRef>{first});
  EXPECT_EQ(of(1), std::vector<ValRef>{second});
  EXPECT_TRUE(of(2).empty());
  EXPECT_EQ(of(5), (std::vector<ValRef>{first, second}));  // the oldest first
}

TEST_F(CodedMap, WhatIsStuckIsNotWaitedFor) {
  const StripePtr stripe = add("a");
  update(stripe, 0, 2, make_stamp(5, 8));
  EXPECT_TRUE(map_.folded_up_to(make_stamp(5, 7)));
  EXPECT_FALSE(map_.folded_up_to(make_stamp(5, 8)));
  map_.lock()->stuck[stripe->id] = "too much is lost";
  EXPECT_TRUE(map_.folded_up_to(make_stamp(5, 8)));
}

TEST_F(CodedMap, AFullStoreIsToldAtOnceWhereNothingIsAbandoned) {
  std::vector<StripePtr> stripes;
  for (uint32_t nth = 0; nth < kSlots; ++nth)
    stripes.push_back(*map_.make_stripe(Class::read_write));
  EXPECT_FALSE(map_.await_abandoned());
  EXPECT_FALSE(map_.make_stripe(Class::read_only));
}

}  // namespace
}  // namespace stoker::coded
