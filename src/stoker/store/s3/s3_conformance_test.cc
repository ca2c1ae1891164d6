// S3Store passes the suite that every Store passes, against a small server of the tests' own, and
// against the one that STOKER_TEST_S3 names (tests/python/test_rgw.py): the composition of a store
// without options, "|", and its options.
#include <unistd.h>

#include <cstdlib>

#include "stoker/store/runtime.h"
#include "stoker/store/s3/store.h"
#include "stoker/testing/s3_server.h"
#include "stoker/testing/store_conformance.h"

namespace stoker {
namespace {

S3Server& server() {
  static S3Server one;
  return one;
}

class S3World final : public StoreWorld {
 public:
  S3World() : runtime_(std::move(*RuntimeOwner::make({.engine = "posix", .cpu_threads = 2}))) {
    server().control({{"clear", true}, {"page", 3}});
  }
  Result<std::unique_ptr<Store>> open(const StoreOptions& options) override {
    return open_s3_store(server().store(), runtime_->runtime(), options);
  }
  bool persists() const override { return true; }

 private:
  std::unique_ptr<RuntimeOwner> runtime_;
};

// A folder of its own for each test in a bucket that somebody gave us.
class GivenWorld final : public StoreWorld {
 public:
  explicit GivenWorld(const std::string& given)
      : runtime_(std::move(*RuntimeOwner::make({.engine = "posix", .cpu_threads = 2}))) {
    static int worlds = 0;
    const size_t bar = given.find('|');
    composition_ = given.substr(0, bar) + "/" + std::to_string(getpid()) + "-" +
                   std::to_string(++worlds) + given.substr(bar + 1);
  }
  Result<std::unique_ptr<Store>> open(const StoreOptions& options) override {
    return open_s3_store(composition_, runtime_->runtime(), options);
  }
  bool persists() const override { return true; }

 private:
  std::unique_ptr<RuntimeOwner> runtime_;
  std::string composition_;
};

std::vector<StoreUnderTest> servers() {
  std::vector<StoreUnderTest> found = {
      {"small_server", [] { return std::make_unique<S3World>(); }}};
  if (const char* given = std::getenv("STOKER_TEST_S3"); given != nullptr)
    found.push_back({"given", [given] { return std::make_unique<GivenWorld>(given); }});
  return found;
}

INSTANTIATE_TEST_SUITE_P(S3, StoreConformance, ::testing::ValuesIn(servers()), store_name);

}  // namespace
}  // namespace stoker
