// HeaderCache without a disk: what it counts, and which headers go.
#include "stoker/store/coded/map/header_cache.h"

#include <string>
#include <vector>

#include "stoker/store/coded/format/headers.h"
#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

class CodedHeaderCache : public ::testing::Test {
 protected:
  static constexpr size_t kRoom = 4;  // stripes in its share
  StripePtr add() {
    const std::vector<size_t> shards = placement(shape_, ++id_);
    auto stripe =
        std::make_shared<Stripe>(id_, shards, *slots_.take(shards, Class::read_write), slots_);
    load(stripe);
    return stripe;
  }
  void load(const StripePtr& stripe) {
    stripe->headers = std::make_shared<Headers>(blank_headers(shape_));
    cache_.admit(stripe);
  }
  std::vector<StripePtr> add_some(size_t count) {
    std::vector<StripePtr> stripes;
    for (size_t i = 0; i < count; ++i) stripes.push_back(add());
    return stripes;
  }
  // "1.1": of the first and the third of these they are in memory
  static std::string in_memory(const std::vector<StripePtr>& stripes) {
    std::string told;
    for (const StripePtr& stripe : stripes) told += stripe->headers ? '1' : '.';
    return told;
  }
  uint64_t counted() const { return budget_.used() / headers_bytes(shape_); }

  const Shape shape_ = small_shape(64);
  Slots slots_{shape_};
  Budget budget_{16 * kRoom * headers_bytes(shape_)};
  HeaderCache cache_{shape_, budget_};
  uint64_t id_ = 0;
};

TEST_F(CodedHeaderCache, CountsAShareOfTheCapAndNoMore) {
  std::vector<StripePtr> stripes = add_some(kRoom);
  EXPECT_EQ(budget_.used(), kRoom * headers_bytes(shape_));
  for (int i = 0; i < 20; ++i) stripes.push_back(add());
  EXPECT_EQ(budget_.used(), kRoom * headers_bytes(shape_));
  EXPECT_EQ(in_memory(stripes), std::string(20, '.') + "1111") << "the last ones";
  stripes.clear();
  EXPECT_EQ(budget_.used(), 0U) << "what goes takes its share with it";
  stripes = add_some(kRoom);
  EXPECT_EQ(in_memory(stripes), "1111") << "what is gone takes no place";
}

TEST_F(CodedHeaderCache, WhatIsUsedStays) {
  const std::vector<StripePtr> stripes = add_some(kRoom);
  std::vector<StripePtr> more = {add()};  // each was looked at now
  ASSERT_EQ(in_memory(stripes), ".111");
  HeaderCache::used(*stripes[1]);
  more.push_back(add());
  more.push_back(add());
  EXPECT_EQ(in_memory(stripes), ".1..");
  EXPECT_EQ(in_memory(more), "111");
}

TEST_F(CodedHeaderCache, WhatIsNeededStaysEvenBeyondTheShare) {
  const std::vector<StripePtr> stripes = add_some(kRoom + 1);
  ASSERT_EQ(in_memory(stripes), ".1111");
  ++stripes[1]->readers;
  ++stripes[2]->header_pins;
  stripes[3]->folding = true;
  stripes[4]->overlay[0] = {};
  const StripePtr fifth = add();
  const StripePtr sixth = add();
  EXPECT_EQ(in_memory(stripes), ".1111");
  EXPECT_FALSE(fifth->headers) << "the only one that nobody needs";
  EXPECT_TRUE(sixth->headers);
  EXPECT_EQ(counted(), kRoom + 1);
  cache_.forget(*stripes[1]);
  EXPECT_TRUE(stripes[1]->headers);
  --stripes[1]->readers;
  cache_.forget(*stripes[1]);
  EXPECT_FALSE(stripes[1]->headers);
  EXPECT_EQ(counted(), kRoom);
  load(stripes[1]);
  EXPECT_TRUE(stripes[1]->headers);
}

TEST_F(CodedHeaderCache, WhereNothingIsLeftOfTheCapOthersGoFirst) {
  const std::vector<StripePtr> stripes = add_some(2);
  const Grant others = std::move(*budget_.take(budget_.cap() - budget_.used(), "a test"));
  const StripePtr third = add();
  EXPECT_EQ(in_memory(stripes), ".1");
  EXPECT_EQ(third->headers_grant.bytes(), headers_bytes(shape_));
  ++third->readers;
  ++stripes[1]->readers;
  const StripePtr fourth = add();
  EXPECT_TRUE(fourth->headers) << "who needs them cannot do without";
  EXPECT_EQ(fourth->headers_grant.bytes(), 0U);
  EXPECT_EQ(budget_.used(), budget_.cap());
  const StripePtr fifth = add();
  EXPECT_FALSE(fourth->headers) << "the next one takes its place";
  EXPECT_TRUE(fifth->headers);
}

TEST_F(CodedHeaderCache, KeepsAllWhereItMustAndNoneOfThemCountsBeyondTheShare) {
  cache_.keep_all(true);
  std::vector<StripePtr> stripes = add_some(3 * kRoom);
  EXPECT_EQ(in_memory(stripes), std::string(3 * kRoom, '1'));
  EXPECT_EQ(counted(), kRoom);
  cache_.forget(*stripes[0]);
  EXPECT_TRUE(stripes[0]->headers);
  cache_.keep_all(false);
  for (int i = 0; i < 3; ++i) stripes.push_back(add());
  size_t left = 0;
  for (const StripePtr& stripe : stripes) left += stripe->headers ? 1 : 0;
  EXPECT_EQ(left, kRoom);
  EXPECT_LE(counted(), kRoom);
}

}  // namespace
}  // namespace stoker::coded
