// The suite of all stores over a local: store on an NVMe namespace. Each test deletes what it
// holds.
#include "stoker/testing/store_conformance.h"
#include "stoker/store/blank.h"
#include "stoker/store/runtime.h"
#include "target.h"

namespace stoker {
namespace {

class NamespaceWorld final : public StoreWorld {
 public:
  NamespaceWorld() : runtime_(std::move(*RuntimeOwner::make({.cpu_threads = 2}))) {
    EXPECT_OK(make_blank(runtime_->loop(), {target()}));
  }
  Result<std::unique_ptr<Store>> open(const StoreOptions& options) override {
    return open_store("local:" + target(), runtime_->runtime(), options);
  }
  bool persists() const override { return true; }

 private:
  const std::unique_ptr<RuntimeOwner> runtime_;
};

INSTANTIATE_TEST_SUITE_P(Guest, StoreConformance,
                         ::testing::Values(StoreUnderTest{
                             "nvme", [] { return std::make_unique<NamespaceWorld>(); }}),
                         store_name);

}  // namespace
}  // namespace stoker
