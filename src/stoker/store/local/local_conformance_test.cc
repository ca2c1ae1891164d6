// LocalStore passes the suite that every Store passes, in a folder, on one volume and on two.
#include <filesystem>

#include "stoker/store/local/store.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/store_conformance.h"

namespace stoker {
namespace {

class FolderWorld final : public StoreWorld {
 public:
  FolderWorld(const char* engine, size_t volumes)
      : root_(testing::TempDir() + "local_conformance_" + std::to_string(counter_++)) {
    std::filesystem::remove_all(root_);
    runtime_ = std::move(*RuntimeOwner::make({.engine = engine, .cpu_threads = 2}));
    for (size_t i = 0; i < volumes; ++i) volumes_.push_back(root_ + "/v" + std::to_string(i));
  }
  ~FolderWorld() override {
    runtime_.reset();
    std::filesystem::remove_all(root_);
  }
  Result<std::unique_ptr<Store>> open(const StoreOptions& options) override {
    return open_local_store(volumes_, runtime_->runtime(), options);
  }
  bool persists() const override { return true; }

 private:
  static inline int counter_ = 0;
  const std::string root_;
  std::vector<std::string> volumes_;
  std::unique_ptr<RuntimeOwner> runtime_;
};

StoreUnderTest folder(const char* name, const char* engine, size_t volumes) {
  return {name, [engine, volumes] { return std::make_unique<FolderWorld>(engine, volumes); }};
}

INSTANTIATE_TEST_SUITE_P(Local, StoreConformance,
                         ::testing::Values(folder("posix", "posix", 1),
                                           folder("auto_two_volumes", "auto", 2)),
                         store_name);

}  // namespace
}  // namespace stoker
