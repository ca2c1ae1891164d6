// The suite of all engines over NVMe namespaces, and what only they do. Each test overwrites the
// target.
#include <gtest/gtest.h>

#include <cstring>

#include "stoker/testing/engine_conformance.h"
#include "stoker/testing/namespace_files.h"
#include "target.h"

namespace stoker {
namespace {

EngineUnderTest on_namespace() {
  return {.name = "nvme",
          .make = [](uint32_t depth) -> Result<std::unique_ptr<Engine>> {
            STOKER_ASSIGN(auto engine, make_engine_of_target(depth));
            return NamespaceFiles::make(std::move(engine), target());
          },
          .real_files = false};
}

INSTANTIATE_TEST_SUITE_P(Guest, EngineConformance, ::testing::Values(on_namespace()), engine_name);

class Namespace : public ::testing::Test {
 protected:
  void SetUp() override {
    auto engine = make_engine_of_target(8);
    ASSERT_TRUE(engine) << engine.error().message();
    engine_ = std::move(*engine);
    arena_ = std::move(*Arena::make(16 * kMiB, budget_));
  }
  Result<size_t> run(Op::Kind kind, FileId file, uint64_t offset, Slice bytes) {
    return run_op(*engine_, kind, file, offset, bytes);
  }

  Budget budget_{64 * kMiB};
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(Namespace, ATransferLargerThanOneCommandMovesWholeRegisteredAndNot) {
  const auto file = engine_->open({.path = target()});
  ASSERT_TRUE(file) << file.error().message();
  const Buffer out = std::move(*arena_->take(6 * kMiB)), in = std::move(*arena_->take(6 * kMiB));
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    for (size_t at = 0; at < out.size(); at += 8) {
      const uint64_t word = seed * 0x9E3779B97F4A7C15ULL + at;
      std::memcpy(out.data() + at, &word, 8);
    }
    const uint64_t before = engine_->counters().submissions.get();
    ASSERT_TRUE(run(Op::Kind::write, file->id, 4096, out.slice()));
    EXPECT_GT(engine_->counters().submissions.get() - before, 2U) << "one command took it all";
    ASSERT_TRUE(run(Op::Kind::read, file->id, 4096, in.slice()));
    EXPECT_EQ(std::memcmp(in.data(), out.data(), in.size()), 0);
    ASSERT_TRUE(engine_->adopt(*arena_));
  }
}

TEST_F(Namespace, ATrimmedRangeReadsAsZeros) {
  const auto file = engine_->open({.path = target()});
  ASSERT_TRUE(file) << file.error().message();
  const Buffer buffer = std::move(*arena_->take(64 * kKiB));
  std::memset(buffer.data(), 0x5A, buffer.size());
  const uint64_t last = file->bytes - 64 * kKiB;
  ASSERT_TRUE(run(Op::Kind::write, file->id, last, buffer.slice()));
  ASSERT_TRUE(run(Op::Kind::trim, file->id, 0, Slice{nullptr, file->bytes}));
  ASSERT_TRUE(run(Op::Kind::read, file->id, last, buffer.slice()));
  for (const std::byte each : buffer.slice().span()) ASSERT_EQ(each, std::byte{0});
}

TEST_F(Namespace, WhatCannotBeOpenedIsSaid) {
  const auto code_of = [&](const std::string& path) {
    const auto file = engine_->open({.path = path});
    EXPECT_FALSE(file) << path;
    return file ? Code::cancelled : file.error().code;
  };
  EXPECT_EQ(code_of("nvme:"), Code::invalid_argument);
  if (engine_->traits().name == "vfio") {
    EXPECT_EQ(code_of("nvme:0000:00:1f.9"), Code::not_found);
    EXPECT_EQ(code_of(target() + "/99"), Code::not_found);
    EXPECT_EQ(code_of(target() + "/x"), Code::invalid_argument);
  } else {
    EXPECT_EQ(code_of("nvme:/dev/ng9n9"), Code::not_found);
    EXPECT_EQ(code_of("nvme:/dev/null"), Code::invalid_argument);
    EXPECT_EQ(code_of("nvme:/dev/nvme0n1"), Code::invalid_argument) << "the block device";
    EXPECT_EQ(code_of("nvme:0000:00:04.0"), Code::unsupported);
  }
  EXPECT_EQ(code_of(target() + "@0+1000GiB"), Code::invalid_argument);
  EXPECT_EQ(code_of(target() + "@100+4096"), Code::invalid_argument);
}

}  // namespace
}  // namespace stoker
