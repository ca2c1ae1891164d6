// A served store passes the suite that every Store passes: with blocks to lend, with too few of
// them, and with none.
#include <unistd.h>

#include <filesystem>

#include "stoker/store/remote/server.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/s3_server.h"
#include "stoker/testing/store_conformance.h"

namespace stoker {
namespace {

class RemoteWorld final : public StoreWorld {
 public:
  // "ROOT" in the name of the store stands for a folder of the test's own.
  RemoteWorld(std::string composition, uint64_t memory)
      : root_(testing::TempDir() + "remote_" + std::to_string(getpid()) + "_" +
              std::to_string(counter_++)),
        composition_(std::move(composition)),
        memory_(memory),
        runtime_(std::move(*RuntimeOwner::make({.engine = "posix", .cpu_threads = 2}))) {
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
    if (const size_t at = composition_.find("ROOT"); at != std::string::npos)
      composition_.replace(at, 4, root_);
  }
  ~RemoteWorld() override {
    server_.reset();
    store_.reset();
    runtime_.reset();
    std::filesystem::remove_all(root_);
  }
  Result<std::unique_ptr<Store>> open(const StoreOptions& options) override {
    server_.reset();
    store_.reset();
    StoreOptions inner = options;
    inner.read_only = false;
    STOKER_ASSIGN(store_, open_store(composition_, runtime_->runtime(), inner));
    const ServeOptions serving{
        .path = root_ + "/socket", .memory_bytes = memory_, .block_bytes = 64 * kKiB};
    STOKER_ASSIGN(server_, serve(*store_, runtime_->runtime(), serving));
    return open_store("unix:" + serving.path, runtime_->runtime(), options);
  }
  bool persists() const override { return composition_ != "memory:"; }

 private:
  static inline int counter_ = 0;
  const std::string root_;
  std::string composition_;
  const uint64_t memory_;
  std::unique_ptr<RuntimeOwner> runtime_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Server> server_;
};

StoreUnderTest served(std::string name, std::string composition, uint64_t memory) {
  return {std::move(name), [composition = std::move(composition), memory] {
            return std::make_unique<RemoteWorld>(composition, memory);
          }};
}

S3Server& server() {
  static S3Server one;
  return one;
}

std::vector<StoreUnderTest> compositions() {
  return {served("memory", "memory:", 16 * kMiB),
          served("memory_no_blocks", "memory:", 0),
          served("local_few_blocks", "local:ROOT/store", 512 * kKiB),
          served("dir", "dir:ROOT/store", 4 * kMiB),
          served("cached", "cached(memory:, dir:ROOT/slow, disk=4MiB, dram=2MiB, block=64KiB)",
                 512 * kKiB),
          {"s3", [] {
             server().control({{"clear", true}, {"page", 3}});
             return std::make_unique<RemoteWorld>(server().store(), 4 * kMiB);
           }}};
}

INSTANTIATE_TEST_SUITE_P(Remote, StoreConformance, ::testing::ValuesIn(compositions()), store_name);

}  // namespace
}  // namespace stoker
