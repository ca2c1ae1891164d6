// S3Store passes the suite that every Store passes, against a small server of the tests' own.
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

INSTANTIATE_TEST_SUITE_P(S3, StoreConformance,
                         ::testing::Values(StoreUnderTest{
                             "small_server", [] { return std::make_unique<S3World>(); }}),
                         store_name);

}  // namespace
}  // namespace stoker
