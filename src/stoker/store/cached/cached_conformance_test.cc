// A cache over a folder and over a bucket passes the suite that every Store passes. The cache is
// small, so that blocks come and go.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "stoker/store/runtime.h"
#include "stoker/testing/s3_server.h"
#include "stoker/testing/store_conformance.h"

namespace stoker {
namespace {

S3Server& server() {
  static S3Server one;
  return one;
}

class CachedWorld final : public StoreWorld {
 public:
  // "ROOT" in the names of stores stands for a folder of the test's own.
  CachedWorld(std::string fast, std::string slow)
      : root_(testing::TempDir() + "cached_conformance_" + std::to_string(counter_++)),
        runtime_(std::move(*RuntimeOwner::make({.engine = "posix", .cpu_threads = 2}))) {
    std::filesystem::remove_all(root_);
    composition_ = "cached(" + fast + ", " + slow + ", disk=4MiB, dram=2MiB, block=64KiB)";
    for (size_t at = 0; (at = composition_.find("ROOT")) != std::string::npos;)
      composition_.replace(at, 4, root_);
  }
  ~CachedWorld() override {
    runtime_.reset();
    std::filesystem::remove_all(root_);
  }
  Result<std::unique_ptr<Store>> open(const StoreOptions& options) override {
    return open_store(composition_, runtime_->runtime(), options);
  }
  bool persists() const override { return true; }

 private:
  static inline int counter_ = 0;
  const std::string root_;
  std::string composition_;
  std::unique_ptr<RuntimeOwner> runtime_;
};

std::vector<StoreUnderTest> compositions() {
  const auto over = [](const char* fast, const char* slow) {
    return [fast, slow] { return std::make_unique<CachedWorld>(fast, slow); };
  };
  std::vector<StoreUnderTest> all = {{"local_dir", over("local:ROOT/fast", "dir:ROOT/slow")},
                                     {"memory_dir", over("memory:", "dir:ROOT/slow")},
                                     {"local_s3", [] {
                                        server().control({{"clear", true}, {"page", 3}});
                                        return std::make_unique<CachedWorld>("local:ROOT/fast",
                                                                             server().store());
                                      }}};
  // As in s3_conformance_test.cc.
  if (const char* given = std::getenv("STOKER_TEST_S3"); given != nullptr)
    all.push_back({"given", [text = std::string(given)] {
                     static int worlds = 0;
                     const size_t bar = text.find('|');
                     return std::make_unique<CachedWorld>(
                         "local:ROOT/fast", text.substr(0, bar) + "/cached-" +
                                                std::to_string(getpid()) + "-" +
                                                std::to_string(++worlds) + text.substr(bar + 1));
                   }});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cached, StoreConformance, ::testing::ValuesIn(compositions()), store_name);

}  // namespace
}  // namespace stoker
