// The adapter for SPDK over declarations of our own and a drive made of software: SPDK itself is
// not tested here.
#include <gtest/gtest.h>

#include <cstring>

#include "stoker/base/bytes.h"
#include "stoker/io/load.h"
#include "stoker/io/spdk/engine.h"
#include "stoker/testing/engine_conformance.h"
#include "stoker/testing/fake_spdk/fake_spdk.h"
#include "stoker/testing/namespace_files.h"

namespace stoker {
namespace {

constexpr const char* kTarget = "nvme:spdk:0000:00:04.0";

EngineUnderTest on_fake() {
  return {.name = "spdk",
          .make = [](uint32_t depth) -> Result<std::unique_ptr<Engine>> {
            STOKER_ASSIGN(auto made, make_spdk_engine({kTarget}, depth));
            return NamespaceFiles::make(std::move(made.engine), kTarget);
          },
          .real_files = false};
}

INSTANTIATE_TEST_SUITE_P(Spdk, EngineConformance, ::testing::Values(on_fake()), engine_name);

class SpdkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto made = std::move(*make_spdk_engine({kTarget}, 8));
    counters_ = made.counters;
    loop_ = std::move(*Loop::make(std::move(made.engine)));
    const auto file = loop_->open({.path = kTarget});
    ASSERT_TRUE(file) << file.error().message();
    EXPECT_EQ(file->bytes, fake_spdk().disk.size());
    file_ = file->id;
    arena_ = std::move(*Arena::make(4 * kMiB, budget_));
    memory_ = std::move(*arena_->take(2 * kMiB));
    for (size_t at = 0; at < memory_.size(); ++at)
      memory_.data()[at] = static_cast<std::byte>(at * 31 / 7);
  }
  void TearDown() override {
    EXPECT_TRUE(loop_->close(file_));
    loop_.reset();
    const FakeSpdk& spdk = fake_spdk();
    EXPECT_EQ(spdk.attached + spdk.queues + spdk.regions + spdk.copies, 0U);
    fake_spdk().requests_max = 1024;
    fake_spdk().iommu = true;
    fake_spdk().lost = false;
    fake_spdk().bad_block = UINT64_MAX;
  }
  // 2 MiB, in transfers of 256 KiB: two commands each.
  Status write() {
    const auto done =
        run_load(*loop_, file_, memory_.slice(), {Load::Kind::write, 256 * kKiB, 8, 2 * kMiB});
    return done ? Status{} : Status(done.error());
  }
  bool written() const {
    return std::memcmp(fake_spdk().disk.data(), memory_.data(), memory_.size()) == 0;
  }

  Budget budget_{64 * kMiB};
  std::unique_ptr<Loop> loop_;
  std::shared_ptr<const SpdkCounters> counters_;
  std::unique_ptr<Arena> arena_;
  Buffer memory_;
  FileId file_ = -1;
};

TEST_F(SpdkTest, ArenasAreRegisteredOnceAndNothingIsCopied) {
  auto second = std::move(*make_spdk_engine({kTarget}, 8));
  ASSERT_TRUE(loop_->adopt(*arena_));
  ASSERT_TRUE(second.engine->adopt(*arena_));
  EXPECT_EQ(fake_spdk().regions, 1U);
  ASSERT_TRUE(write());
  EXPECT_TRUE(written());
  EXPECT_EQ(counters_->bounced_bytes.get(), 0U);
  ASSERT_TRUE(second.engine->unadopt(*arena_));
  EXPECT_EQ(fake_spdk().regions, 1U);
  ASSERT_TRUE(loop_->unadopt(*arena_));
  EXPECT_EQ(fake_spdk().regions, 0U);
}

TEST_F(SpdkTest, WhatTheDriveDoesNotReachIsCopied) {
  fake_spdk().iommu = false;
  ASSERT_TRUE(loop_->adopt(*arena_));
  const bool stays = arena_->pages().kind == PageReport::Kind::hugetlb;
  EXPECT_EQ(fake_spdk().regions, stays ? 1U : 0U);
  ASSERT_TRUE(write());
  EXPECT_TRUE(written());
  EXPECT_EQ(counters_->bounced_bytes.get(), stays ? 0U : 2 * kMiB);
  ASSERT_TRUE(loop_->unadopt(*arena_));
}

TEST_F(SpdkTest, AFullQueueIsWaitedFor) {
  fake_spdk().requests_max = 1;
  ASSERT_TRUE(write());
  EXPECT_TRUE(written());
}

TEST_F(SpdkTest, StatusesOfTheDriveAreSentences) {
  fake_spdk().bad_block = 600;
  const Status failed = write();
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, Code::io);
  EXPECT_NE(failed.error().message().find("of '" + std::string(kTarget) + "'"), std::string::npos)
      << failed.error().message();
}

TEST_F(SpdkTest, ALostDriveEndsWhatIsUnderWayAndWhatComes) {
  fake_spdk().lost = true;
  EXPECT_FALSE(write());
  EXPECT_FALSE(write());
}

TEST_F(SpdkTest, OtherDrivesAreNotTouched) {
  EXPECT_EQ(fake_spdk().shown, std::vector<std::string>{"0000:00:04.0"});
  const auto other = make_spdk_engine({"nvme:spdk:0000:00:05.0"});
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, Code::busy);
  EXPECT_NE(other.error().message().find("nvme:0000:00:05.0"), std::string::npos);
  EXPECT_EQ(loop_->open({.path = "nvme:spdk:0000:00:05.0"}).error().code, Code::busy);
  EXPECT_EQ(loop_->open({.path = "nvme:spdk:0000:00:04.0/2"}).error().code, Code::not_found);
  EXPECT_EQ(loop_->open({.path = "nvme:spdk:0000:00:04.0/x"}).error().code, Code::invalid_argument);
  EXPECT_EQ(loop_->open({.path = "a/file"}).error().code, Code::unsupported);
}

}  // namespace
}  // namespace stoker
