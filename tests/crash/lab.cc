#include "lab.h"

#include <spdlog/spdlog.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "stoker/base/log.h"
#include "stoker/store/local/fsck.h"

namespace stoker {

uint64_t soak_factor = 1;
uint64_t cases_checked = 0;
uint64_t story_seed = 0;

Lab::Lab(const LabOptions& options, uint64_t seed)
    : options_(options), disk_(std::make_shared<SimDisk>(seed)) {
  for (size_t i = 0; i < options.volumes; ++i) volumes_.push_back("v" + std::to_string(i));
  SimDevice device;
  device.seed = seed;
  auto engine = std::move(*SimEngine::make(disk_, 64, device));
  const Clock& clock = static_cast<SimEngine&>(*engine).clock();
  RuntimeOptions runtime;
  runtime.cpu_threads = 1;
  runtime_ = std::move(*RuntimeOwner::make(std::move(engine), runtime, clock));
}

Result<std::unique_ptr<Store>> Lab::open(bool read_only) {
  StoreOptions options;
  options.create = !read_only;
  options.read_only = read_only;
  options.capacity_bytes = options_.capacity_bytes;
  options.chunk_bytes = 64 * kKiB;
  options.objects_max = 16;
  LocalOptions local;
  local.files = false;
  local.area_bytes = options_.area_bytes;
  return open_local_store(volumes_, runtime_->runtime(), options, local);
}

Images Lab::images() const {
  Images images;
  for (const auto& volume : volumes_) images[volume] = disk_->image(volume);
  return images;
}

void Lab::put(const Images& images) {
  for (const auto& [path, image] : images) disk_->put(path, image);
}

Images Lab::blank() {
  auto store = open();
  EXPECT_OK(store);
  store->reset();
  Images images;
  for (const auto& volume : volumes_) images[volume] = SimImage(disk_->image(volume).bytes());
  put(images);
  return images;
}

Result<size_t> Lab::recover(const Timeline& timeline, Admissible range) {
  ++cases_checked;
  STOKER_ASSIGN(auto store, open());
  return find_point(*store, timeline, range);
}

Status Lab::fsck(bool finished) {
  LocalOptions local;
  local.files = false;
  const auto report = fsck_local_store(volumes_, runtime_->runtime(), {}, local);
  if (!report) return finished ? Status(report.error().with("fsck")) : Status();
  if (!report->problems.empty()) return fail(Code::corruption, "fsck: {}", report->problems[0]);
  return {};
}

Status Lab::works(const Timeline& timeline, size_t point) {
  Timeline further = {timeline[point]};
  {
    STOKER_ASSIGN(auto store, open());
    Recorder recorder(*disk_, *store, further);
    STOKER_TRY(recorder.commit({{"works", 70'000, 0, 70'000, 99}}, Durability::durable));
    STOKER_TRY(recorder.commit({{"works", 0}}, Durability::durable));
  }
  STOKER_ASSIGN(const size_t found, recover(further, {further.size() - 1, further.size() - 1}));
  static_cast<void>(found);
  return {};
}

}  // namespace stoker

// A check in the store ends the process, and does not know of stories.
extern "C" void tell_the_seed(int signal) {
  if (stoker::story_seed != 0)
    std::fprintf(stderr, "in a story: tell it again with --seed=%llu\n",
                 static_cast<unsigned long long>(stoker::story_seed));
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

// stoker_X_test [--soak] [--seed=N] [gtest flags]
int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--soak") == 0) {
      stoker::soak_factor = 20;
    } else if (std::strncmp(argv[i], "--seed=", 7) == 0) {
      stoker::story_seed = std::strtoull(argv[i] + 7, nullptr, 10);
    } else {
      std::fprintf(stderr, "unknown argument '%s'; there are --soak and --seed=N\n", argv[i]);
      return 2;
    }
  }
  std::signal(SIGABRT, tell_the_seed);
  // thousands of failing disks are the subject here, not news
  stoker::log().logger().set_level(spdlog::level::off);
  const int failed = RUN_ALL_TESTS();
  std::printf("%llu cases\n", static_cast<unsigned long long>(stoker::cases_checked));
  return failed;
}
