// The engine with a door to GPU memory, over libraries that are a GPU made of software: the suite
// of all engines in host memory, and bytes in memory of the GPU, which this process cannot touch.
#include "stoker/io/gpu/gpu.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <numeric>

#include "stoker/base/bytes.h"
#include "stoker/base/mutex.h"
#include "stoker/io/gpu/engine.h"
#include "stoker/io/gpu/probe.h"
#include "stoker/testing/engine_conformance.h"
#include "stoker/testing/fake_gpu/fake_gpu.h"

namespace stoker {
namespace {

const gpu::Libraries kFake = {std::string(STOKER_FAKE_GPU) + "/libcuda.so.1",
                              std::string(STOKER_FAKE_GPU) + "/libcufile.so.0"};

FakeGpu& fake() {
  void* const library = dlopen(kFake.cuda.c_str(), RTLD_NOW | RTLD_LOCAL);
  const auto find = reinterpret_cast<FakeGpu* (*)()>(dlsym(library, "fake_gpu"));
  return *find();
}

Budget& host_budget() {
  static Budget budget(kGiB);
  return budget;
}

EngineUnderTest on_gpu() {
  return {.name = "gpu", .make = [](uint32_t depth) -> Result<std::unique_ptr<Engine>> {
            STOKER_ASSIGN(auto gpu, gpu::Gpu::open(0, kFake));
            STOKER_ASSIGN(auto made, gpu::make_gpu_engine(gpu, host_budget(), {.depth = depth}));
            return std::move(made.engine);
          }};
}

INSTANTIATE_TEST_SUITE_P(Gpu, EngineConformance, ::testing::Values(on_gpu()), engine_name);

class GpuDoor : public ::testing::Test {
 protected:
  static constexpr uint64_t kBytes = 5 * kMiB;  // more than a lane, and no multiple of two

  void SetUp() override {
    std::filesystem::create_directories(folder_);
    pattern_.resize(kBytes);
    for (size_t at = 0; at < kBytes; ++at) pattern_[at] = static_cast<std::byte>(at * 31 / 7);
  }
  void TearDown() override {
    std::filesystem::remove_all(folder_);
    FakeGpu& gpu = fake();
    gpu.driver_error = gpu.handle_error = gpu.buffer_error = gpu.transfer_error = 0;
    gpu.transfer_most = SIZE_MAX;
    for (const auto* held :
         {&gpu.contexts, &gpu.allocations, &gpu.pinned, &gpu.drivers, &gpu.handles, &gpu.buffers})
      EXPECT_EQ(*held, 0);
  }

  // Writes the pattern from GPU memory to a file, reads it back to other GPU memory, compares both.
  void round_trip(const gpu::GpuEngineOptions& options, uint64_t direct, uint64_t bounced,
                  const gpu::Libraries& libraries = kFake) {
    auto gpu = std::move(*gpu::Gpu::open(0, libraries));
    auto made = std::move(*gpu::make_gpu_engine(gpu, host_budget(), options));
    const auto counters = made.counters;
    auto loop = std::move(*Loop::make(std::move(made.engine)));
    Budget budget(64 * kMiB);
    const auto arena = std::move(*gpu->make_arena(16 * kMiB, budget));
    const Buffer from = std::move(*arena->take(kBytes)), to = std::move(*arena->take(kBytes));
    ASSERT_TRUE(loop->adopt(*arena));
    ASSERT_TRUE(gpu->copy(from.data(), pattern_.data(), kBytes));
    const auto file = loop->open({.path = path_, .create = true, .reserve_bytes = kBytes});
    ASSERT_TRUE(file) << file.error().message();
    run(*loop, Op::Kind::write, file->id, from.slice());
    run(*loop, Op::Kind::read, file->id, to.slice());
    std::vector<std::byte> back(kBytes);
    ASSERT_TRUE(gpu->copy(back.data(), to.data(), kBytes));
    EXPECT_TRUE(back == pattern_);
    EXPECT_TRUE(in_file() == pattern_);
    EXPECT_EQ(counters->direct_bytes.get(), direct);
    EXPECT_EQ(counters->bounced_bytes.get(), bounced);
    ASSERT_TRUE(loop->close(file->id));
    ASSERT_TRUE(loop->unadopt(*arena));
  }

  // In two ops: a part, and all that is left.
  static void run(Loop& loop, Op::Kind kind, FileId file, const Slice& bytes) {
    struct Waiting {
      Mutex mutex;
      CondVar changed;
      size_t left = 2;
    } waiting;
    std::array<Op, 2> ops;
    const size_t first = 12 * kKiB;
    ops[0].bytes = bytes.sub(0, first);
    ops[1].bytes = bytes.sub(first, bytes.size - first);
    ops[1].offset = first;
    for (Op& op : ops) {
      op.kind = kind;
      op.file = file;
      op.context = &waiting;
      op.done = [](Op& done) noexcept {
        auto& mine = *static_cast<Waiting*>(done.context);
        MutexLock lock(mine.mutex);
        --mine.left;
        mine.changed.notify_all();
      };
      ASSERT_TRUE(loop.submit(op));
    }
    MutexLock lock(waiting.mutex);
    waiting.changed.wait(lock, [&] { return waiting.left == 0; });
    for (const Op& op : ops) EXPECT_TRUE(op.result) << op.result.error().message();
  }

  std::vector<std::byte> in_file() const {
    std::vector<std::byte> bytes(kBytes);
    std::ifstream(path_, std::ios::binary)
        .read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(kBytes));
    return bytes;
  }

  const std::string folder_ = ::testing::TempDir() + "gpu-" + std::to_string(getpid());
  const std::string path_ = folder_ + "/file";
  std::vector<std::byte> pattern_;
};

TEST_F(GpuDoor, BytesGoByCuFile) { round_trip({}, 2 * kBytes, 0); }

TEST_F(GpuDoor, ShortTransfersGoOn) {
  fake().transfer_most = 256 * kKiB;
  round_trip({}, 2 * kBytes, 0);
}

TEST_F(GpuDoor, BytesGoThroughHostMemoryWhereThatIsAsked) {
  round_trip({.direct = false}, 0, 2 * kBytes);
}

TEST_F(GpuDoor, WithoutTheLibraryBytesGoThroughHostMemory) {
  const gpu::Libraries none{kFake.cuda, "libnone.so.0"};
  const auto gpu = gpu::Gpu::open(0, none);
  ASSERT_TRUE(gpu) << gpu.error().message();
  EXPECT_EQ((*gpu)->cufile(), nullptr);
  EXPECT_NE((*gpu)->why_no_cufile().find("libnone.so.0"), std::string::npos)
      << (*gpu)->why_no_cufile();
  round_trip({}, 0, 2 * kBytes, none);
}

TEST_F(GpuDoor, WhatCuFileRefusesGoesThroughHostMemory) {
  fake().driver_error = 5001;
  EXPECT_EQ((*gpu::Gpu::open(0, kFake))->why_no_cufile(),
            "the kernel module nvidia-fs is not loaded (cuFile error 5001)");
  round_trip({}, 0, 2 * kBytes);
  fake().driver_error = 0;
  for (std::atomic<int>* error :
       {&fake().handle_error, &fake().buffer_error, &fake().transfer_error}) {
    *error = 5008;
    round_trip({}, 0, 2 * kBytes);
    *error = 0;
  }
}

TEST_F(GpuDoor, ErrorsOfTheDiskAreNoReasonToGoAnotherWay) {
  auto gpu = std::move(*gpu::Gpu::open(0, kFake));
  auto made = std::move(*gpu::make_gpu_engine(gpu, host_budget()));
  auto loop = std::move(*Loop::make(std::move(made.engine)));
  Budget budget(8 * kMiB);
  const auto arena = std::move(*gpu->make_arena(kMiB, budget));
  ASSERT_TRUE(loop->adopt(*arena));
  const Buffer memory = std::move(*arena->take(64 * kKiB));
  const auto file = loop->open({.path = path_, .create = true, .reserve_bytes = 64 * kKiB});
  ASSERT_TRUE(file);
  const auto past = run_load(*loop, file->id, memory.slice(),
                             {Load::Kind::read, 64 * kKiB, 1, 64 * kKiB, 0, kMiB});
  ASSERT_FALSE(past);
  EXPECT_NE(past.error().message().find("the file ends before that"), std::string::npos)
      << past.error().message();
  EXPECT_EQ(made.counters->bounced_bytes.get(), 0U);
  ASSERT_TRUE(loop->close(file->id));
  ASSERT_TRUE(loop->unadopt(*arena));
}

TEST_F(GpuDoor, MemoryAndGpusThatAreNotThereAreSentences) {
  const auto second = gpu::Gpu::open(1, kFake);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, Code::not_found);
  const auto none = gpu::Gpu::open(0, {.cuda = "libnone.so.1"});
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, Code::unsupported);
  EXPECT_NE(none.error().message().find("there is no GPU to use"), std::string::npos);
  const auto gpu = std::move(*gpu::Gpu::open(0, kFake));
  Budget large(8 * kGiB), small(kMiB);
  EXPECT_EQ(gpu->make_arena(kGiB, large).error().code, Code::over_budget);
  EXPECT_EQ(gpu->make_arena(2 * kMiB, small).error().code, Code::over_budget);
  EXPECT_EQ(large.used() + small.used(), 0U);
}

TEST_F(GpuDoor, TheProbeMeasuresBothWays) {
  const gpu::GpuProbeOptions quick{.seconds = 0.1, .file_bytes = 32 * kMiB};
  const auto both = gpu::probe_gpu(folder_, *gpu::Gpu::open(0, kFake), quick);
  ASSERT_TRUE(both) << both.error().message();
  EXPECT_EQ(both->bounced_bytes, 0U);
  std::map<std::string, size_t> points;
  for (const auto& point : both->points) points[point.way] += point.bytes_per_second > 0 ? 1 : 0;
  EXPECT_EQ(points["cufile"], points["host"]);
  EXPECT_EQ(points["cufile"] + points["host"], both->points.size());
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
  fake().driver_error = 5001;
  const auto one = gpu::probe_gpu(folder_, *gpu::Gpu::open(0, kFake), quick);
  ASSERT_TRUE(one) << one.error().message();
  EXPECT_EQ(one->points.size() * 2, both->points.size());
  EXPECT_NE(one->why_no_cufile, "");
  // as on a machine without udev, where the driver opens
  fake().driver_error = 0;
  fake().handle_error = 5027;
  const auto refused = gpu::probe_gpu(folder_, *gpu::Gpu::open(0, kFake), quick);
  ASSERT_TRUE(refused) << refused.error().message();
  EXPECT_EQ(refused->points.size() * 2, both->points.size()) << "no figure is called cuFile's";
  EXPECT_EQ(refused->why_no_cufile, "it does not serve this folder; a warning says why");
}

}  // namespace
}  // namespace stoker
