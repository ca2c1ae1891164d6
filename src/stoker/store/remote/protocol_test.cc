#include "stoker/store/remote/protocol.h"
#include "stoker/base/bytes.h"

#include <gtest/gtest.h>

#include <random>

#include "stoker/testing/format_example.h"
#include "stoker/testing/store_harness.h"

namespace stoker::remote {
namespace {

Request some_request() {
  Request request{.kind = Kind::read, .transaction = 1, .offset = 2, .bytes = 3, .place = 4};
  request.number = 5;
  request.key = "key";
  request.text = "text";
  request.tag = "tag";
  request.keys = {"a", "", "ccc"};
  request.pieces = {{0, 1, 2}, {2, UINT64_MAX, kReadMax - 2}};
  request.numbers = {7, UINT32_MAX};
  return request;
}

Answer some_answer() {
  Answer answer{.number = 9, .tag = "t", .blob = "b"};
  answer.error = fail(Code::unavailable, "what");
  answer.error->sys_errno = 5;
  answer.objects = {{"k", 1, 2, 3, Class::read_write, "tag"}, {"l", 4, 5, 6, {}, "other"}};
  answer.spans = {{kNoSlot, 1, 2}, {3, 4, 5}};
  return answer;
}

TEST(Protocol, TheExampleOfThePageIsAStat) {
  Request request{.kind = Kind::stat};
  request.key = "a";
  const std::string ours = encode(Header{Kind::stat, false, 7}) + encode(request);
  const auto page = format_example("serve.md", "stat", ours.size());
  ASSERT_EQ(page.size(), ours.size());
  EXPECT_EQ(std::memcmp(page.data(), ours.data(), ours.size()), 0);
  EXPECT_EQ(*decode_header(bytes_of(ours)), (Header{Kind::stat, false, 7}));
  EXPECT_EQ(*decode_request(Kind::stat, bytes_of(ours).subspan(kHeaderBytes)), request);
}

TEST(Protocol, MessagesComeAsTheyWent) {
  EXPECT_EQ(*decode_request(Kind::read, bytes_of(encode(some_request()))), some_request());
  const std::string sent = encode(some_answer());
  const auto answer = decode_answer(bytes_of(sent));
  ASSERT_OK(answer);
  EXPECT_EQ(encode(*answer), sent);
  EXPECT_EQ(answer->error->code, Code::unavailable);
  EXPECT_EQ(answer->objects[0].expected, Class::read_write);
  StoreInfo info;
  info.composition = "c";
  info.durable = 2;
  info.snapshots = {{"s", 3}};
  info.volumes = {{.path = "p", .bytes_per_second = 0.5}};
  info.cache = CacheInfo{.hit_bytes = 4, .stalls = 5, .off = "why"};
  const auto told = decode_info(encode(info));
  ASSERT_OK(told);
  EXPECT_EQ(told->cache->stalls, 5U);
  EXPECT_EQ(encode(*told), encode(info));
  Plan plan{.name = "p",
            .keys = {"a", "b"},
            .runs = {{.object = 1, .offset = 2, .bytes = 3, .items = 4, .stride = 5}},
            .order = Plan::Mixed{{1, 3}, {0.5, 2}, 7},
            .position = 6,
            .ahead = true};
  for (int order = 2; order >= 0; --order) {
    const auto came = decode_plan(*decode_request(Kind::follow, bytes_of(encode(encode(plan)))));
    ASSERT_OK(came);
    EXPECT_EQ(came->order.index(), static_cast<size_t>(order));
    EXPECT_TRUE(came->ahead);
    EXPECT_EQ(encode(encode(*came)), encode(encode(plan)));
    plan.order = order == 2 ? decltype(plan.order)(Plan::Shuffled{8}) : Plan::Listed{};
  }
  const Welcome welcome{.features = {.update = true}, .heartbeat_ms = 1, .blocks_bytes = 2};
  EXPECT_EQ(Welcome::decode(welcome.encode())->encode(), welcome.encode());
}

// Whatever is cut off, added or changed: an error, or a message that is encoded in the same way.
TEST(Protocol, DamagedMessagesAreErrors) {
  const std::string request = encode(some_request());
  const std::string answer = encode(some_answer());
  for (size_t size = 0; size < request.size(); ++size)
    EXPECT_FALSE(decode_request(Kind::read, bytes_of(request.substr(0, size)))) << size;
  for (size_t size = 0; size < answer.size(); ++size)
    EXPECT_FALSE(decode_answer(bytes_of(answer.substr(0, size)))) << size;
  EXPECT_FALSE(decode_request(Kind::read, bytes_of(request + "x")));
  std::mt19937_64 random(1);
  for (int i = 0; i < 20'000; ++i) {
    std::string changed = i % 2 == 0 ? request : answer;
    for (uint64_t left = random() % 4 + 1; left > 0; --left)
      changed[random() % changed.size()] = static_cast<char>(random());
    if (const auto got = decode_request(Kind::read, bytes_of(changed))) {
      EXPECT_EQ(encode(*got), changed);
    }
    (void)decode_answer(bytes_of(changed));
    Request follow{.kind = Kind::follow};
    follow.blob = changed;
    (void)decode_plan(std::move(follow));
    (void)decode_info(changed);
    (void)Welcome::decode(changed);
  }
}

TEST(Protocol, WhatIsTooMuchIsAnError) {
  const auto refused = [](const Request& request) {
    return !decode_request(request.kind, bytes_of(encode(request)));
  };
  Request read{.kind = Kind::read};
  EXPECT_TRUE(refused(read)) << "no piece";
  read.keys = {"a"};
  read.pieces = {{0, 0, kReadMax}};
  EXPECT_FALSE(refused(read));
  read.pieces.push_back({0, 0, 1});
  EXPECT_TRUE(refused(read)) << "more than 1 MiB";
  read.pieces = {{0, 0, UINT64_MAX}, {0, 0, 2}};
  EXPECT_TRUE(refused(read)) << "a sum that wraps";
  read.pieces = {{1, 0, 1}};
  EXPECT_TRUE(refused(read)) << "of no key";
  read.pieces.assign(kPiecesMax + 1, {0, 0, 1});
  EXPECT_TRUE(refused(read)) << "too many";
  Request stat{.kind = Kind::stat};
  stat.key.assign(kNameMax + 1, 'a');
  EXPECT_TRUE(refused(stat));
}

TEST(Protocol, APlanWithSourcesThatMixesNoneIsAnError) {
  Request request = encode(Plan{.keys = {"a"}, .order = Plan::Mixed{{1}, {1}, 7}});
  ASSERT_OK(decode_plan(request));
  request.blob[0] = 1;
  EXPECT_EQ(code_of(decode_plan(request)), Code::corruption);
}

TEST(Protocol, AnotherVersionIsAMismatch) {
  std::string header = encode(Header{Kind::stat, false, 7});
  header[4] = kVersion + 1;
  EXPECT_EQ(code_of(decode_header(bytes_of(header))), Code::mismatch);
  header[4] = kVersion;
  header[6] = 2;
  EXPECT_EQ(code_of(decode_header(bytes_of(header))), Code::corruption);
}

}  // namespace
}  // namespace stoker::remote
