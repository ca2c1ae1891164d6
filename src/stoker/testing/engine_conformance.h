// The one suite that every Engine passes. A test program includes this once and instantiates it:
//
//   INSTANTIATE_TEST_SUITE_P(Uring, EngineConformance, ::testing::Values(EngineUnderTest{...}),
//   engine_name);
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/io/engine.h"

namespace stoker {

struct EngineUnderTest {
  std::string name;
  std::function<Result<std::unique_ptr<Engine>>(uint32_t depth)> make;
  // paths are paths of this machine; false: of the engine's own world, where every folder exists
  bool real_files = true;
  // A folder on a disk of exactly 1 MiB, given back when the handle goes; null: this machine cannot
  // make one (the test is skipped).
  std::function<std::shared_ptr<std::string>()> small_disk = nullptr;
};

inline std::string engine_name(const ::testing::TestParamInfo<EngineUnderTest>& info) {
  return info.param.name;
}

class EngineConformance : public ::testing::TestWithParam<EngineUnderTest> {
 protected:
  // One op with its memory and the count of its completions.
  struct Job {
    Op op;
    int completions = 0;
    std::function<void()> then;
  };

  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) /
              ("engine-" + GetParam().name + "-" + std::to_string(++folders_));
    if (GetParam().real_files) {
      std::filesystem::remove_all(folder_);
      std::filesystem::create_directories(folder_);
    }
    arena_ = std::move(*Arena::make(32 * kMiB, budget_));
    start(32);
  }
  void TearDown() override {
    engine_.reset();
    if (GetParam().real_files) std::filesystem::remove_all(folder_);
  }

  void start(uint32_t depth) {
    engine_.reset();
    auto engine = GetParam().make(depth);
    ASSERT_TRUE(engine) << engine.error().message();
    engine_ = std::move(*engine);
  }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  FileInfo open_new(const std::string& name, uint64_t bytes) {
    auto info = engine_->open({.path = path(name), .create = true, .reserve_bytes = bytes});
    EXPECT_TRUE(info) << info.error().message();
    return info ? *info : FileInfo{};
  }

  Buffer take(size_t bytes) { return std::move(*arena_->take(bytes)); }
  static void fill(const Slice& bytes, uint64_t seed) {
    for (size_t at = 0; at < bytes.size; at += 8) {
      const uint64_t word = (seed + 1) * 0x9E3779B97F4A7C15ULL + at;
      std::memcpy(bytes.data + at, &word, 8);
    }
  }
  static bool filled(const Slice& bytes, uint64_t seed) {
    for (size_t at = 0; at < bytes.size; at += 8) {
      const uint64_t word = (seed + 1) * 0x9E3779B97F4A7C15ULL + at;
      if (std::memcmp(bytes.data + at, &word, 8) != 0) return false;
    }
    return true;
  }

  static void setup(Job& job, Op::Kind kind, FileId file, uint64_t offset, Slice bytes) {
    job.op = Op{};
    job.op.kind = kind;
    job.op.file = file;
    job.op.offset = offset;
    job.op.bytes = bytes;
    job.op.context = &job;
    job.op.done = [](Op& op) noexcept {
      auto* self = static_cast<Job*>(op.context);
      ++self->completions;
      if (self->then) self->then();
    };
  }

  // Submits and polls until all are through; each must complete exactly once, and none from within
  // submit().
  void run(std::vector<Op*> ops) {
    std::span<Op* const> left(ops);
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    size_t completed = 0;
    while (completed < ops.size()) {
      ASSERT_LT(std::chrono::steady_clock::now(), give_up) << "an op was lost";
      if (!left.empty()) left = left.subspan(engine_->submit(left));
      completed += engine_->poll(100'000'000);
    }
    EXPECT_EQ(completed, ops.size());
    EXPECT_EQ(engine_->poll(0), 0U);
    for (Op* op : ops) EXPECT_EQ(static_cast<Job*>(op->context)->completions, 1);
  }
  Result<size_t> run(Op::Kind kind, FileId file, uint64_t offset, Slice bytes) {
    Job job;
    setup(job, kind, file, offset, bytes);
    run({&job.op});
    return job.op.result;
  }
  Code code_of(const Result<size_t>& result) {
    EXPECT_FALSE(result) << "should have failed";
    if (result) return Code::cancelled;
    EXPECT_FALSE(result.error().what.empty());
    return result.error().code;
  }

  static inline std::atomic<int> folders_{0};
  Budget budget_{1 * kGiB};
  std::filesystem::path folder_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(EngineConformance, SaysWhatItIs) {
  EXPECT_FALSE(engine_->traits().name.empty());
  EXPECT_EQ(engine_->traits().depth_max, 32U);
  EXPECT_FALSE(GetParam().make(0));
}

TEST_P(EngineConformance, ReadsWhatWasWrittenAtOffsets) {
  const FileInfo file = open_new("a", 8 * kMiB);
  EXPECT_EQ(file.bytes, 8 * kMiB);
  const std::array<uint64_t, 4> offsets = {0, 4096, 1 * kMiB + 8192, 7 * kMiB};
  const std::array<size_t, 4> sizes = {4096, 64 * kKiB, 3 * kMiB, 1 * kMiB};
  for (size_t i = 0; i < offsets.size(); ++i) {
    const Buffer out = take(sizes[i]);
    fill(out.slice(), i);
    const auto result = run(Op::Kind::write, file.id, offsets[i], out.slice());
    ASSERT_TRUE(result) << result.error().message();
    EXPECT_EQ(*result, sizes[i]);
  }
  for (size_t i = 0; i < offsets.size(); ++i) {
    const Buffer in = take(sizes[i]);
    std::memset(in.data(), 0x5A, in.size());
    const auto result = run(Op::Kind::read, file.id, offsets[i], in.slice());
    ASSERT_TRUE(result) << result.error().message();
    EXPECT_EQ(*result, sizes[i]);
    EXPECT_TRUE(filled(in.slice(), i)) << "bytes at " << offsets[i];
  }
}

TEST_P(EngineConformance, NeverWrittenReservedBytesReadAsZeros) {
  const FileInfo file = open_new("zeros", 1 * kMiB);
  const Buffer in = take(64 * kKiB);
  std::memset(in.data(), 0x5A, in.size());
  ASSERT_TRUE(run(Op::Kind::read, file.id, 512 * kKiB, in.slice()));
  for (const std::byte each : in.slice().span()) ASSERT_EQ(each, std::byte{0});
}

TEST_P(EngineConformance, ContentSurvivesReopening) {
  const FileInfo file = open_new("again", 1 * kMiB);
  const Buffer buffer = take(128 * kKiB);
  fill(buffer.slice(), 9);
  ASSERT_TRUE(run(Op::Kind::write, file.id, 256 * kKiB, buffer.slice()));
  ASSERT_TRUE(run(Op::Kind::sync, file.id, 0, {}));
  ASSERT_TRUE(engine_->close(file.id));
  const auto again = engine_->open({.path = path("again"), .write = false});
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ(again->bytes, 1 * kMiB);
  std::memset(buffer.data(), 0, buffer.size());
  ASSERT_TRUE(run(Op::Kind::read, again->id, 256 * kKiB, buffer.slice()));
  EXPECT_TRUE(filled(buffer.slice(), 9));
}

TEST_P(EngineConformance, ManyFilesAtOnce) {
  constexpr size_t kFiles = 64;
  std::vector<FileInfo> files;
  std::vector<Buffer> buffers;
  std::deque<Job> jobs(kFiles);
  std::vector<Op*> ops;
  for (size_t i = 0; i < kFiles; ++i) {
    files.push_back(open_new("f" + std::to_string(i), 64 * kKiB));
    buffers.push_back(take(64 * kKiB));
    fill(buffers[i].slice(), i);
    setup(jobs[i], Op::Kind::write, files[i].id, 0, buffers[i].slice());
    ops.push_back(&jobs[i].op);
  }
  run(ops);
  for (size_t i = 0; i < kFiles; ++i) {
    ASSERT_TRUE(jobs[i].op.result) << jobs[i].op.result.error().message();
    std::memset(buffers[i].data(), 0, buffers[i].size());
    jobs[i].completions = 0;
    setup(jobs[i], Op::Kind::read, files[i].id, 0, buffers[i].slice());
  }
  run(ops);
  for (size_t i = 0; i < kFiles; ++i) EXPECT_TRUE(filled(buffers[i].slice(), i)) << i;
}

TEST_P(EngineConformance, TakesNoMoreThanItsDepthAndCallsNothingFromSubmit) {
  start(4);
  const FileInfo file = open_new("deep", 1 * kMiB);
  const Buffer buffer = take(64 * kKiB);
  std::deque<Job> jobs(16);
  std::vector<Op*> ops;
  for (size_t i = 0; i < jobs.size(); ++i) {
    setup(jobs[i], Op::Kind::read, file.id, i * 4096, buffer.slice().sub(i * 4096, 4096));
    ops.push_back(&jobs[i].op);
  }
  EXPECT_EQ(engine_->submit(ops), 4U);
  EXPECT_EQ(engine_->submit(std::span(ops).subspan(4)), 0U);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (const Job& job : jobs) EXPECT_EQ(job.completions, 0);
  size_t completed = 0;
  for (int i = 0; i < 600 && completed < 4; ++i) completed += engine_->poll(100'000'000);
  EXPECT_EQ(completed, 4U);
  run(std::vector<Op*>(ops.begin() + 4, ops.end()));
  for (const Job& job : jobs) EXPECT_TRUE(job.op.result);
}

TEST_P(EngineConformance, DoneMaySubmitAgain) {
  const FileInfo file = open_new("chain", 1 * kMiB);
  const Buffer buffer = take(4096);
  Job job;
  setup(job, Op::Kind::write, file.id, 0, buffer.slice());
  Op* op = &job.op;
  job.then = [&] {
    EXPECT_TRUE(op->result);
    if (job.completions == 20) return;
    op->offset += 4096;
    EXPECT_EQ(engine_->submit(std::span(&op, 1)), 1U);
  };
  ASSERT_EQ(engine_->submit(std::span(&op, 1)), 1U);
  size_t completed = 0;
  for (int i = 0; i < 600 && completed < 20; ++i) completed += engine_->poll(100'000'000);
  EXPECT_EQ(completed, 20U);
  EXPECT_EQ(engine_->counters().writes.get(), 20U);
}

TEST_P(EngineConformance, RefusesWhatIsNotAlignedWithAnError) {
  const FileInfo file = open_new("align", 1 * kMiB);
  const Buffer buffer = take(64 * kKiB);
  const Slice bytes = buffer.slice();
  for (const Op::Kind kind : {Op::Kind::read, Op::Kind::write}) {
    EXPECT_EQ(code_of(run(kind, file.id, 1, bytes.sub(0, 4096))), Code::invalid_argument);
    EXPECT_EQ(code_of(run(kind, file.id, 512, bytes.sub(0, 4096))), Code::invalid_argument);
    EXPECT_EQ(code_of(run(kind, file.id, 0, bytes.sub(0, 100))), Code::invalid_argument);
    EXPECT_EQ(code_of(run(kind, file.id, 0, bytes.sub(8, 4096))), Code::invalid_argument);
    EXPECT_EQ(code_of(run(kind, file.id, 0, bytes.sub(0, 0))), Code::invalid_argument);
    EXPECT_EQ(code_of(run(kind, file.id, 0, Slice{nullptr, 4096})), Code::invalid_argument);
    EXPECT_EQ(code_of(run(kind, file.id, ~uint64_t{4095}, bytes.sub(0, 8192))),
              Code::invalid_argument);
  }
  EXPECT_EQ(code_of(run(Op::Kind::sync, file.id, 0, bytes)), Code::invalid_argument);
  EXPECT_EQ(engine_->counters().reads.get() + engine_->counters().writes.get() +
                engine_->counters().syncs.get(),
            0U);
}

TEST_P(EngineConformance, OneBadOpDoesNotSpoilItsBatch) {
  const FileInfo file = open_new("mix", 1 * kMiB);
  const Buffer buffer = take(64 * kKiB);
  std::deque<Job> jobs(9);
  std::vector<Op*> ops;
  for (size_t i = 0; i < jobs.size(); ++i) {
    // every third is beyond the end, every third names no file
    const uint64_t offset = i % 3 == 1 ? 64 * kMiB : i * 4096;
    setup(jobs[i], Op::Kind::read, i % 3 == 2 ? 12345 : file.id, offset,
          buffer.slice().sub(i * 4096, 4096));
    ops.push_back(&jobs[i].op);
  }
  run(ops);
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (i % 3 == 0) {
      EXPECT_TRUE(jobs[i].op.result);
    } else {
      EXPECT_EQ(code_of(jobs[i].op.result), i % 3 == 1 ? Code::io : Code::invalid_argument);
    }
  }
  EXPECT_EQ(engine_->counters().reads.get(), 3U);
}

TEST_P(EngineConformance, ReadingBeyondTheEndIsAnError) {
  const FileInfo file = open_new("end", 64 * kKiB);
  const Buffer buffer = take(64 * kKiB);
  EXPECT_EQ(code_of(run(Op::Kind::read, file.id, 64 * kKiB, buffer.slice().sub(0, 4096))),
            Code::io);
  // half of it is there
  EXPECT_EQ(code_of(run(Op::Kind::read, file.id, 32 * kKiB, buffer.slice())), Code::io);
  EXPECT_TRUE(run(Op::Kind::read, file.id, 32 * kKiB, buffer.slice().sub(0, 32 * kKiB)));
  EXPECT_EQ(engine_->counters().read_bytes.get(), 32 * kKiB);
}

TEST_P(EngineConformance, AFileThatEndsOffTheAlignmentIsAnErrorAndNotALoop) {
  if (!GetParam().real_files) GTEST_SKIP() << "files of this engine end on the alignment";
  for (const size_t bytes : {size_t{100}, size_t{512}, size_t{5000}, size_t{8704}}) {
    std::ofstream(path("odd")) << std::string(bytes, 'x');
    const auto file = engine_->open({.path = path("odd")});
    ASSERT_TRUE(file) << file.error().message();
    EXPECT_EQ(file->bytes, bytes);
    const Buffer buffer = take(16 * kKiB);
    EXPECT_EQ(code_of(run(Op::Kind::read, file->id, 0, buffer.slice())), Code::io);
    ASSERT_TRUE(engine_->close(file->id));
  }
}

TEST_P(EngineConformance, OpeningSaysWhatIsWrong) {
  const auto missing = engine_->open({.path = path("missing")});
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::not_found);
  EXPECT_NE(missing.error().what.find("missing"), std::string::npos);
  EXPECT_FALSE(engine_->open({.path = path("c"), .create = true, .write = false}));
  if (!GetParam().real_files) return;
  EXPECT_FALSE(std::filesystem::exists(path("c")));
  const auto folder = engine_->open({.path = folder_.string()});
  ASSERT_FALSE(folder);
  EXPECT_EQ(folder.error().code, Code::invalid_argument);
  const auto nowhere = engine_->open({.path = path("no/such/folder"), .create = true});
  ASSERT_FALSE(nowhere);
  EXPECT_EQ(nowhere.error().code, Code::not_found);
}

TEST_P(EngineConformance, AFileOpenedForReadingRefusesWrites) {
  const FileInfo file = open_new("ro", 64 * kKiB);
  ASSERT_TRUE(engine_->close(file.id));
  const auto again = engine_->open({.path = path("ro"), .write = false});
  ASSERT_TRUE(again);
  const Buffer buffer = take(4096);
  EXPECT_EQ(code_of(run(Op::Kind::write, again->id, 0, buffer.slice())), Code::read_only);
  EXPECT_EQ(code_of(run(Op::Kind::trim, again->id, 0, buffer.slice())), Code::read_only);
  EXPECT_TRUE(run(Op::Kind::read, again->id, 0, buffer.slice()));
}

TEST_P(EngineConformance, CreatingKeepsWhatIsThere) {
  const FileInfo file = open_new("keep", 64 * kKiB);
  const Buffer buffer = take(4096);
  fill(buffer.slice(), 3);
  ASSERT_TRUE(run(Op::Kind::write, file.id, 0, buffer.slice()));
  ASSERT_TRUE(engine_->close(file.id));
  const FileInfo again = open_new("keep", 1 * kMiB);
  EXPECT_EQ(again.bytes, 64 * kKiB) << "reserve_bytes is for new and empty files";
  const FileInfo empty = open_new("empty", 0);
  EXPECT_EQ(empty.bytes, 0U);
  ASSERT_TRUE(engine_->close(empty.id));
  EXPECT_EQ(open_new("empty", 1 * kMiB).bytes, 1 * kMiB)
      << "as a crash leaves a file that was being made";
  std::memset(buffer.data(), 0, buffer.size());
  ASSERT_TRUE(run(Op::Kind::read, again.id, 0, buffer.slice()));
  EXPECT_TRUE(filled(buffer.slice(), 3));
}

TEST_P(EngineConformance, AFullDiskIsSaidWhenReservingAndLeavesNothing) {
  const auto disk = GetParam().small_disk ? GetParam().small_disk() : nullptr;
  if (!disk) GTEST_SKIP() << "no small disk can be made here";
  {
    const auto big =
        engine_->open({.path = *disk + "/big", .create = true, .reserve_bytes = 4 * kMiB});
    ASSERT_FALSE(big);
    EXPECT_EQ(big.error().code, Code::out_of_space);
    const auto gone = engine_->open({.path = *disk + "/big"});
    ASSERT_FALSE(gone);
    EXPECT_EQ(gone.error().code, Code::not_found);
    const auto fits =
        engine_->open({.path = *disk + "/fits", .create = true, .reserve_bytes = 512 * kKiB});
    ASSERT_TRUE(fits) << fits.error().message();
    ASSERT_TRUE(engine_->close(fits->id));
  }
}

TEST_P(EngineConformance, AFullDiskIsSaidWhenWriting) {
  const auto disk = GetParam().small_disk ? GetParam().small_disk() : nullptr;
  if (!disk) GTEST_SKIP() << "no small disk can be made here";
  const auto file = engine_->open({.path = *disk + "/grows", .create = true});
  ASSERT_TRUE(file) << file.error().message();
  const Buffer buffer = take(4 * kMiB);
  fill(buffer.slice(), 1);
  EXPECT_EQ(code_of(run(Op::Kind::write, file->id, 0, buffer.slice())), Code::out_of_space);
  EXPECT_TRUE(run(Op::Kind::write, file->id, 0, buffer.slice().sub(0, 64 * kKiB)));
  ASSERT_TRUE(engine_->close(file->id));
}

TEST_P(EngineConformance, ClosingWhatIsNotOpenIsAnErrorAndIdsAreReused) {
  EXPECT_FALSE(engine_->close(-1));
  EXPECT_FALSE(engine_->close(77));
  const FileInfo first = open_new("one", 4096);
  ASSERT_TRUE(engine_->close(first.id));
  EXPECT_FALSE(engine_->close(first.id));
  const Buffer buffer = take(4096);
  EXPECT_EQ(code_of(run(Op::Kind::read, first.id, 0, buffer.slice())), Code::invalid_argument);
  const FileInfo second = open_new("two", 8192);
  fill(buffer.slice(), 2);
  EXPECT_TRUE(run(Op::Kind::write, second.id, 4096, buffer.slice()));
}

TEST_P(EngineConformance, WakeEndsAWaitAndIsRemembered) {
  engine_->wake();
  EXPECT_EQ(engine_->poll(UINT64_MAX), 0U);  // hangs if the wake-up is lost
  std::thread waker([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    engine_->wake();
  });
  EXPECT_EQ(engine_->poll(UINT64_MAX), 0U);
  waker.join();
  for (int i = 0; i < 100; ++i) engine_->wake();  // many count as one
  EXPECT_EQ(engine_->poll(UINT64_MAX), 0U);
}

TEST_P(EngineConformance, PollDoesNotWaitForever) {
  EXPECT_EQ(engine_->poll(0), 0U);
  EXPECT_EQ(engine_->poll(1'000'000), 0U);
}

TEST_P(EngineConformance, TrimLeavesItsNeighboursAlone) {
  const FileInfo file = open_new("trim", 1 * kMiB);
  const Buffer buffer = take(192 * kKiB);
  fill(buffer.slice(), 4);
  ASSERT_TRUE(run(Op::Kind::write, file.id, 0, buffer.slice()));
  const auto trimmed = run(Op::Kind::trim, file.id, 64 * kKiB, Slice{nullptr, 64 * kKiB});
  if (!trimmed) {
    EXPECT_EQ(trimmed.error().code, Code::unsupported) << trimmed.error().message();
  } else {
    EXPECT_EQ(*trimmed, 64 * kKiB);
  }
  EXPECT_EQ(code_of(run(Op::Kind::trim, file.id, 1, Slice{nullptr, 4096})), Code::invalid_argument);
  const Buffer in = take(192 * kKiB);
  ASSERT_TRUE(run(Op::Kind::read, file.id, 0, in.slice()));
  EXPECT_EQ(std::memcmp(in.data(), buffer.data(), 64 * kKiB), 0);
  EXPECT_EQ(std::memcmp(in.data() + 128 * kKiB, buffer.data() + 128 * kKiB, 64 * kKiB), 0);
}

TEST_P(EngineConformance, MemoryMayBeAdoptedAndGivenUpAtAnyTime) {
  const FileInfo file = open_new("adopt", 4 * kMiB);
  const auto round_trip = [&](const Buffer& buffer, uint64_t seed) {
    fill(buffer.slice(), seed);
    ASSERT_TRUE(run(Op::Kind::write, file.id, 1 * kMiB, buffer.slice()));
    std::memset(buffer.data(), 0, buffer.size());
    ASSERT_TRUE(run(Op::Kind::read, file.id, 1 * kMiB, buffer.slice()));
    EXPECT_TRUE(filled(buffer.slice(), seed)) << seed;
  };
  {
    const Buffer buffer = take(1 * kMiB);
    round_trip(buffer, 1);
    ASSERT_TRUE(engine_->adopt(*arena_));
    ASSERT_TRUE(engine_->adopt(*arena_));  // twice is once
    round_trip(buffer, 2);
    for (int i = 0; i < 20; ++i) {  // others come and go meanwhile
      auto other = std::move(*Arena::make(2 * kMiB, budget_));
      ASSERT_TRUE(engine_->adopt(*other));
      {
        const Buffer elsewhere = std::move(*other->take(64 * kKiB));
        round_trip(elsewhere, 100U + static_cast<uint64_t>(i));
      }
      ASSERT_TRUE(engine_->unadopt(*other));
    }
    ASSERT_TRUE(engine_->unadopt(*arena_));
    ASSERT_TRUE(engine_->unadopt(*arena_));
    round_trip(buffer, 3);
  }
}

TEST_P(EngineConformance, FilesAndMemoryComeAndGoWhileOthersMoveBytes) {
  const FileInfo file = open_new("busy", 4 * kMiB);
  const Buffer buffer = take(4 * kMiB);
  std::atomic<bool> stop{false};
  std::thread other([&] {
    Budget budget{64 * kMiB};
    for (int i = 0; !stop || i < 3; ++i) {
      const FileInfo side = open_new("side" + std::to_string(i % 4), 4096);
      auto arena = std::move(*Arena::make(2 * kMiB, budget));
      EXPECT_TRUE(engine_->adopt(*arena));
      EXPECT_TRUE(engine_->unadopt(*arena));
      EXPECT_TRUE(engine_->close(side.id));
    }
  });
  for (uint64_t round = 0; round < 20; ++round) {
    std::deque<Job> jobs(64);
    std::vector<Op*> ops;
    fill(buffer.slice(), round);
    for (size_t i = 0; i < jobs.size(); ++i) {
      setup(jobs[i], round % 2 == 0 ? Op::Kind::write : Op::Kind::read, file.id, i * 64 * kKiB,
            buffer.slice().sub(i * 64 * kKiB, 64 * kKiB));
      ops.push_back(&jobs[i].op);
    }
    run(ops);
    for (const Job& job : jobs) EXPECT_TRUE(job.op.result);
    EXPECT_TRUE(filled(buffer.slice(), round % 2 == 0 ? round : round - 1));
  }
  stop = true;
  other.join();
}

TEST_P(EngineConformance, CountersAreExact) {
  const FileInfo file = open_new("count", 4 * kMiB);
  const Buffer buffer = take(1 * kMiB);
  std::deque<Job> jobs(12);
  std::vector<Op*> ops;
  uint64_t written = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const size_t bytes = (i + 1) * 4096;
    written += bytes;
    setup(jobs[i], Op::Kind::write, file.id, i * 128 * kKiB,
          buffer.slice().sub(i * 64 * kKiB, bytes));
    ops.push_back(&jobs[i].op);
  }
  run(ops);
  for (size_t i = 0; i < jobs.size(); ++i) {
    ASSERT_TRUE(jobs[i].op.result);
    EXPECT_EQ(*jobs[i].op.result, (i + 1) * 4096);
  }
  ASSERT_TRUE(run(Op::Kind::read, file.id, 0, buffer.slice().sub(0, 8192)));
  ASSERT_EQ(*run(Op::Kind::sync, file.id, 0, {}), 0U);
  const IoCounters& counters = engine_->counters();
  EXPECT_EQ(counters.writes.get(), 12U);
  EXPECT_EQ(counters.written_bytes.get(), written);
  EXPECT_EQ(counters.reads.get(), 1U);
  EXPECT_EQ(counters.read_bytes.get(), 8192U);
  EXPECT_EQ(counters.syncs.get(), 1U);
  EXPECT_GE(counters.submissions.get(), 3U);
  EXPECT_LE(counters.submissions.get(),
            14U + counters.short_transfers.get() + counters.retries.get());
}

}  // namespace stoker
