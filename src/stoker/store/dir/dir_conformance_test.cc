// DirStore passes the suite that every Store passes: on a kernel that has everything, and on one
// that has not.
#include <filesystem>

#include "stoker/store/dir/store.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/store_conformance.h"

namespace stoker {
namespace {

class DirWorld final : public StoreWorld {
 public:
  DirWorld(const char* engine, DirOptions dir)
      : root_(testing::TempDir() + "dir_conformance_" + std::to_string(counter_++)),
        dir_(std::move(dir)) {
    std::filesystem::remove_all(root_);
    runtime_ = std::move(*RuntimeOwner::make({.engine = engine, .cpu_threads = 2}));
  }
  ~DirWorld() override {
    runtime_.reset();
    std::filesystem::remove_all(root_);
  }
  Result<std::unique_ptr<Store>> open(const StoreOptions& options) override {
    return open_dir_store(root_, runtime_->runtime(), options, dir_);
  }
  bool persists() const override { return true; }

 private:
  static inline int counter_ = 0;
  const std::string root_;
  const DirOptions dir_;
  std::unique_ptr<RuntimeOwner> runtime_;
};

StoreUnderTest folder(const char* name, const char* engine, DirOptions dir) {
  return {name, [engine, dir] { return std::make_unique<DirWorld>(engine, dir); }};
}

INSTANTIATE_TEST_SUITE_P(Dir, StoreConformance,
                         ::testing::Values(folder("auto", "auto", {}),
                                           folder("posix_old_kernel", "posix",
                                                  {.openat2 = false, .no_replace = false})),
                         store_name);

}  // namespace
}  // namespace stoker
