// Disks that stop answering, and do not even fail: each is given up after a second here, and the
// store goes on as without it. What comes from it later changes nothing.
#include <chrono>
#include <future>
#include <thread>

#include "stoker/store/blocking_io.h"
#include "stoker/testing/coded_lab.h"
#include "stoker/testing/sanitized.h"

namespace stoker::coded {
namespace {

constexpr size_t kStallChunk = 64 << 10;
constexpr auto kPatience = std::chrono::seconds(20);

class Stalled {
 public:
  explicit Stalled(std::vector<size_t> lost = {}, uint32_t chunk_bytes = kStallChunk)
      : world_(options(std::move(lost))), chunk_bytes_(chunk_bytes) {
    world_.disk().put("clock", SimImage(kBlock));
    clock_ = world_.runtime().loop().open({.path = "clock"})->id;
    StoreOptions made;
    made.create = true;
    made.capacity_bytes = uint64_t{64} * chunk_bytes_;
    made.chunk_bytes = chunk_bytes_;
    made.objects_max = 64;
    auto opened = world_.open(made);
    store_.reset(static_cast<CodedStore*>(opened->release()));
  }
  ~Stalled() {
    for (const std::string& path : world_.paths()) world_.disk().let_go(path);
    store_.reset();
    tick();
  }
  CodedStore& store() { return *store_; }
  SimDisk& disk() { return world_.disk(); }
  const std::vector<std::string>& paths() const { return world_.paths(); }
  Bytes put_here(const std::string& key, size_t bytes) {
    disk().start_recording();
    Bytes content = put(*store_, key, bytes, 1);
    for (const SimEvent& event : disk().stop_recording()) {
      if (event.kind != SimEvent::Kind::write || event.bytes->size() != chunk_bytes_ ||
          std::memcmp(event.bytes->data(), content.data(), chunk_bytes_) != 0)
        continue;
      first_path_ = event.path;
      first_at_ = event.offset;
    }
    EXPECT_FALSE(first_path_.empty());
    return content;
  }
  // Where the first chunk of what was put here lies.
  const std::string& first_path() const { return first_path_; }
  uint64_t first_at() const { return first_at_; }
  // A tenth of a second passes.
  void tick() {
    const AlignedBytes into(kBlock);
    IoBatch batch(world_.runtime().loop(), Priority::demand);
    batch.read(clock_, 0, into.slice());
    EXPECT_OK(batch.run());
  }
  // Time passes until it is done.
  template <typename Done>
  bool await(Done done) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (!done() && std::chrono::steady_clock::now() < until) tick();
    return done();
  }
  bool close() {
    auto closed = std::async(std::launch::async, [&] { store_.reset(); });
    return await(
        [&] { return closed.wait_for(std::chrono::milliseconds(0)) == std::future_status::ready; });
  }
  // What was held has come, and is seen by nobody.
  void let_go(const std::string& path) {
    disk().let_go(path);
    for (int i = 0; i < 3; ++i) tick();
  }

 private:
  static CodedWorldOptions options(std::vector<size_t> lost) {
    CodedWorldOptions options = quiet(4, 2);
    options.lost = std::move(lost);
    options.latency_ns = 100'000'000;
    options.stall_seconds = 1;
    return options;
  }
  CodedWorld world_;
  const uint32_t chunk_bytes_;
  FileId clock_ = -1;
  std::unique_ptr<CodedStore> store_;
  std::string first_path_;
  uint64_t first_at_ = 0;
};

TEST(CodedStall, ABlockOfADiskThatStoppedAnsweringIsDecoded) {
  Stalled run;
  const Bytes content = run.put_here("a", 4 * kStallChunk);
  run.disk().hold_reads(run.first_path());
  Bytes into(4096);
  const auto late = run.store().read("a", 0, slice_of(into), {});
  ASSERT_TRUE(run.await([&] { return late.ready(); })) << "it waits for a disk that was given up";
  ASSERT_OK(late.wait());
  EXPECT_EQ(into, Bytes(content.begin(), content.begin() + 4096));
  const auto next = run.store().read("a", 8192, slice_of(into), {});
  ASSERT_TRUE(next.wait_for(kPatience)) << "no time passes: it is not asked again";
  ASSERT_OK(next.wait());
  EXPECT_EQ(into, Bytes(content.begin() + 8192, content.begin() + 8192 + 4096));
  run.let_go(run.first_path());
  EXPECT_EQ(read_all(run.store(), "a"), content);
}

// While other rows are decoded the disk brings, at last, something else than what it should.
TEST(CodedStall, WhatADiskBringsLateIsNotRead) {
  if (kThreadsSanitized) GTEST_SKIP() << "what comes late into lost memory races with its reader";
  constexpr uint32_t chunk = 1 << 20;
  Stalled run({}, chunk);
  const Bytes content = run.put_here("a", size_t{32} * chunk);
  for (uint64_t row = 0; row < 64; ++row)
    run.disk().flip(run.first_path(), run.first_at() + row * kBlock + 77, 3);
  run.disk().hold_reads(run.first_path());
  Bytes into(content.size());
  const auto late = run.store().read("a", 0, slice_of(into), {});
  ASSERT_TRUE(run.await([&] { return run.store().health().decoded_blocks > 0; }));
  run.disk().let_go(run.first_path());
  ASSERT_TRUE(run.await([&] { return late.ready(); }));
  ASSERT_OK(late.wait());
  EXPECT_EQ(std::memcmp(into.data(), content.data(), content.size()), 0);
}

TEST(CodedStall, AFoldGoesOnWithoutADiskThatStoppedAnswering) {
  for (size_t silent = 0; silent < 6; ++silent) {
    Stalled run;
    Bytes content = run.put_here("a", 4 * kStallChunk);
    update(run.store(), "a", content, 0, 4096, 2);
    update(run.store(), "a", content, 2 * kStallChunk + 8192, 8192, 3);
    const std::string& path = run.paths()[silent];
    run.disk().hold_reads(path);
    const auto folded = run.store().fold_all();
    ASSERT_TRUE(run.await([&] { return folded.ready(); })) << path;
    ASSERT_OK(folded.wait()) << path;
    EXPECT_EQ(run.store().health().newer_blocks, 0U);
    Bytes into(content.size());
    const auto read = run.store().read("a", 0, slice_of(into), {});
    ASSERT_TRUE(run.await([&] { return read.ready(); })) << path;
    ASSERT_OK(read.wait());
    EXPECT_EQ(into, content) << path;
    run.let_go(path);
    EXPECT_EQ(read_all(run.store(), "a"), content) << path;
    const auto report = std::make_shared<ScrubReport>();
    ASSERT_OK(run.store().scrub(report).wait());
    EXPECT_EQ(run.store().health().lost_chunks, 0U) << path;
    EXPECT_EQ(run.store().health().mended_blocks, 0U) << path;
  }
}

TEST(CodedStall, ACommitGoesOnWithoutADiskThatStoppedAnswering) {
  for (size_t silent = 0; silent < 6; ++silent) {
    Stalled run;
    const Bytes before = run.put_here("a", 4 * kStallChunk);
    const std::string& path = run.paths()[silent];
    run.disk().hold_all(path);
    const Bytes content = pattern(8 * kStallChunk, 2);
    auto change = std::move(*run.store().begin());
    ASSERT_OK(change->resize("b", content.size()));
    ASSERT_OK(
        change->write("b", 0, {const_cast<std::byte*>(content.data()), content.size(), -1}).wait());
    const auto committed = change->commit(Durability::durable);
    ASSERT_TRUE(run.await([&] { return committed.ready(); })) << path;
    ASSERT_OK(committed.wait()) << path;
    ASSERT_EQ(run.store().health().live.size(), 5U) << "it is left out";
    EXPECT_EQ(read_all(run.store(), "b"), content) << path;
    run.let_go(path);
    EXPECT_EQ(read_all(run.store(), "a"), before) << path;
    EXPECT_EQ(read_all(run.store(), "b"), content) << path;
    put(run.store(), "c", 4 * kStallChunk, 3);
  }
}

TEST(CodedStall, ClosingDoesNotWaitForWhatWasLeftBehindOnADiskThatStoppedAnswering) {
  for (const size_t silent : {0, 2, 3, 4, 5}) {
    Stalled run({1});
    const Bytes content = put(run.store(), "a", 12 * kStallChunk, 1);
    EXPECT_EQ(read_all(run.store(), "a"), content);
    run.disk().hold_reads(run.paths()[silent]);
    Bytes into(4096);
    for (size_t chunk = 0; chunk < 12; ++chunk) {
      const auto read = run.store().read("a", chunk * kStallChunk, slice_of(into), {});
      ASSERT_TRUE(run.await([&] { return read.ready(); })) << run.paths()[silent];
      ASSERT_OK(read.wait());
      EXPECT_EQ(std::memcmp(into.data(), content.data() + chunk * kStallChunk, into.size()), 0);
    }
    EXPECT_GT(run.disk().held(run.paths()[silent]), 0U);
    EXPECT_TRUE(run.close());
    run.let_go(run.paths()[silent]);
  }
}

}  // namespace
}  // namespace stoker::coded
