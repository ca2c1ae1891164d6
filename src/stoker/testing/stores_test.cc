// Runs the stores' conformance suite on every store, on every world it can live in.
#include "stoker/store/memory_store.h"
#include "stoker/testing/store_conformance.h"

namespace stoker {
namespace {

class MemoryWorld final : public StoreWorld {
 public:
  Result<std::unique_ptr<Store>> open(const StoreOptions& options) override {
    STOKER_ASSIGN(std::unique_ptr<Store> store, MemoryStore::make(budget_, {options.chunk_bytes, options.capacity_bytes}));
    return store;
  }

 private:
  Budget budget_{256 * kMiB};
};

INSTANTIATE_TEST_SUITE_P(Memory, StoreConformance, ::testing::Values(StoreUnderTest{"memory", [] { return std::make_unique<MemoryWorld>(); }}), store_name);

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
