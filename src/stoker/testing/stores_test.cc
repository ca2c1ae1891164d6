// Runs the stores' conformance suite on every store, on every world it can live in.
#include <filesystem>
#include <fstream>
#include <sstream>

#include "stoker/store/local/store.h"
#include "stoker/store/memory_store.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/fault_store.h"
#include "stoker/testing/sim_engine.h"
#include "stoker/testing/slow_store.h"
#include "stoker/testing/store_conformance.h"

namespace stoker {
namespace {

class MemoryWorld final : public StoreWorld {
 public:
  Result<std::unique_ptr<Store>> open(const StoreOptions& options) override {
    STOKER_ASSIGN(std::unique_ptr<Store> store,
                  MemoryStore::make(budget_, {options.chunk_bytes, options.capacity_bytes}));
    return store;
  }

 private:
  Budget budget_{256 * kMiB};
};

INSTANTIATE_TEST_SUITE_P(Memory, StoreConformance,
                         ::testing::Values(StoreUnderTest{
                             "memory", [] { return std::make_unique<MemoryWorld>(); }}),
                         store_name);

// The wrappers must not change what a store means. A write is slow here, so "a commit is done after
// its writes" needs a slower commit.
class WrappedWorld final : public StoreWorld {
 public:
  explicit WrappedWorld(bool slow) : slow_(slow) {}
  Result<std::unique_ptr<Store>> open(const StoreOptions& options) override {
    STOKER_ASSIGN(auto store, memory_.open(options));
    if (!slow_) return std::unique_ptr<Store>(new FaultStore(std::move(store)));
    const SlowDelays delays{std::chrono::microseconds(50), std::chrono::microseconds(50),
                            std::chrono::milliseconds(1)};
    return std::unique_ptr<Store>(new SlowStore(std::move(store), delays));
  }

 private:
  const bool slow_;
  MemoryWorld memory_;
};

INSTANTIATE_TEST_SUITE_P(
    Wrapped, StoreConformance,
    ::testing::Values(StoreUnderTest{"fault", [] { return std::make_unique<WrappedWorld>(false); }},
                      StoreUnderTest{"slow", [] { return std::make_unique<WrappedWorld>(true); }}),
    store_name);

// The local store on simulated disks that complete in any order, a part at a time, and are
// interrupted.
class SimWorld final : public StoreWorld {
 public:
  explicit SimWorld(size_t volumes) {
    for (size_t i = 0; i < volumes; ++i) volumes_.push_back("v" + std::to_string(i));
    SimFaults faults;
    faults.short_transfer = 100'000;
    faults.interrupted = 100'000;
    disk_->set_faults(faults);
    auto engine = std::move(*SimEngine::make(disk_, 64));
    const Clock& clock = static_cast<SimEngine&>(*engine).clock();
    RuntimeOptions options;
    options.cpu_threads = 2;
    runtime_ = std::move(*RuntimeOwner::make(std::move(engine), options, clock));
  }
  Result<std::unique_ptr<Store>> open(const StoreOptions& options) override {
    LocalOptions local;
    local.files = false;
    return open_local_store(volumes_, runtime_->runtime(), options, local);
  }
  bool persists() const override { return true; }

 private:
  std::shared_ptr<SimDisk> disk_ = std::make_shared<SimDisk>();
  std::vector<std::string> volumes_;
  std::unique_ptr<RuntimeOwner> runtime_;
};

INSTANTIATE_TEST_SUITE_P(
    LocalOnSim, StoreConformance,
    ::testing::Values(StoreUnderTest{"one_volume", [] { return std::make_unique<SimWorld>(1); }},
                      StoreUnderTest{"three_volumes",
                                     [] { return std::make_unique<SimWorld>(3); }}),
    store_name);

// Somebody's file that is no store, named by mistake: refused, and not one byte of it changed.
TEST(LocalStore, AForeignFileIsRefusedUnharmed) {
  const std::string path = ::testing::TempDir() + "foreign.bin";
  const std::string content(256 * kKiB, 'x');
  std::ofstream(path, std::ios::binary) << content;
  auto owner = std::move(*RuntimeOwner::make({.engine = "posix", .cpu_threads = 1}));
  StoreOptions options;
  options.create = true;
  options.capacity_bytes = 1 * kMiB;
  options.holder = "a test";
  EXPECT_EQ(code_of(open_local_store({path}, owner->runtime(), options)), Code::mismatch);
  std::ostringstream after;
  after << std::ifstream(path, std::ios::binary).rdbuf();
  EXPECT_TRUE(after.str() == content);
  std::filesystem::remove(path);
}

TEST(FaultStore, FailsTheNthCallOfAKindOnce) {
  Budget budget(4 * kMiB);
  FaultStore store(std::move(*MemoryStore::make(budget)));
  Bytes bytes(100);
  store.plan().fail_nth(StoreCall::write, 2, Code::io);
  store.plan().fail_nth(StoreCall::commit, 2, Code::out_of_space);
  {
    auto change = std::move(*store.begin());
    EXPECT_OK(change->resize("a", 100));
    EXPECT_OK(change->write("a", 0, slice_of(bytes)).wait());
    EXPECT_EQ(code_of(change->write("a", 0, slice_of(bytes)).wait()), Code::io);
    EXPECT_EQ(code_of(change->commit(Durability::durable).wait()), Code::io);
  }
  EXPECT_EQ(code_of(store.stat("a")), Code::not_found);
  EXPECT_EQ(code_of((*store.begin())->commit(Durability::durable).wait()), Code::out_of_space);
  EXPECT_OK((*store.begin())->commit(Durability::durable).wait());
  EXPECT_EQ(store.plan().calls(StoreCall::commit), 3U);
}

TEST(SlowStore, CompletesLaterAndNothingIsLost) {
  Budget budget(4 * kMiB);
  SlowStore store(std::move(*MemoryStore::make(budget)), {std::chrono::milliseconds(20), {}, {}});
  {
    auto change = std::move(*store.begin());
    EXPECT_OK(change->resize("a", 100));
    EXPECT_OK(change->commit(Durability::durable).wait());
  }
  Bytes into(100, std::byte{1});
  const auto begun = std::chrono::steady_clock::now();
  const auto read = store.read("a", 0, slice_of(into));
  EXPECT_FALSE(read.ready());
  EXPECT_OK(read.wait());
  EXPECT_GE(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(20));
  EXPECT_EQ(into, Bytes(100));
}

TEST(MemoryStore, DrawsOnTheBudgetAndGivesBack) {
  Budget budget(1 * kMiB);
  {
    auto store = std::move(*MemoryStore::make(budget));
    auto change = std::move(*store->begin());
    Bytes bytes(600 * kKiB);
    ASSERT_OK(change->resize("a", 2 * kMiB));
    ASSERT_OK(change->write("a", 0, slice_of(bytes)).wait());
    EXPECT_GE(budget.used(), 600 * kKiB);
    EXPECT_EQ(code_of(change->write("a", 1 * kMiB, slice_of(bytes)).wait()), Code::over_budget);
    EXPECT_EQ(code_of(change->commit(Durability::durable).wait()), Code::over_budget);
  }
  EXPECT_EQ(budget.used(), 0U);
}

}  // namespace
}  // namespace stoker
