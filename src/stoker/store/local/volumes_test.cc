// Which volume a write goes to, over simulated disks of known speeds. Their clock is virtual: nothing here depends on the machine.
#include <gtest/gtest.h>

#include <algorithm>

#include "stoker/store/blocking_io.h"
#include "stoker/store/local/store.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/sim_engine.h"
#include "stoker/testing/store_harness.h"

namespace stoker {
namespace {

TEST(LocalStoreVolumes, AVolumeThatBecomesSlowGetsLessAndOneThatRecoversGetsMore) {
  auto disk = std::make_shared<SimDisk>();
  auto engine = std::move(*SimEngine::make(disk, 64));
  const Clock& clock = static_cast<SimEngine&>(*engine).clock();
  auto runtime = std::move(*RuntimeOwner::make(std::move(engine), {.cpu_threads = 1}, clock));
  StoreOptions options;
  options.create = true;
  options.capacity_bytes = 256 * kMiB;
  auto store = std::move(*open_local_store({"a", "b"}, runtime->runtime(), options, {.files = false}));
  disk->throttle("a", 100'000'000);
  disk->throttle("b", 100'000'000);

  const AlignedBytes bytes(64 * kMiB);  // or the few lanes of the bounce path would be what is measured
  std::fill(bytes.span().begin(), bytes.span().end(), std::byte{5});
  std::vector<uint64_t> before(2);
  const auto share_of_b = [&] {  // of what writing the object anew moves
    auto change = std::move(*store->begin());
    EXPECT_OK(change->resize("x", bytes.size()));
    EXPECT_OK(change->write("x", 0, bytes.slice()).wait());
    EXPECT_OK(change->commit(Durability::durable).wait());
    const auto volumes = store->info().volumes;
    const uint64_t a = volumes[0].written_bytes - before[0], b = volumes[1].written_bytes - before[1];
    before = {volumes[0].written_bytes, volumes[1].written_bytes};
    EXPECT_EQ(a + b, bytes.size());
    return static_cast<double>(b) / static_cast<double>(a + b);
  };
  EXPECT_NEAR(share_of_b(), 0.5, 0.05);
  EXPECT_NEAR(share_of_b(), 0.5, 0.05);
  disk->throttle("b", 25'000'000);
  for (int i = 0; i < 8; ++i) static_cast<void>(share_of_b());  // its speed is that of the last gigabyte
  EXPECT_LT(share_of_b(), 0.3);
  EXPECT_LT(store->info().volumes[1].bytes_per_second, 0.5 * store->info().volumes[0].bytes_per_second);
  disk->throttle("b", 100'000'000);
  for (int i = 0; i < 32; ++i) static_cast<void>(share_of_b());
  EXPECT_GT(share_of_b(), 0.35);
}

}  // namespace
}  // namespace stoker
