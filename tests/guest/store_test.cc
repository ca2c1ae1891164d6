// A local: store on an NVMe namespace is not made of what holds something else, and holds what was
// committed when the power is cut.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "stoker/store/blank.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/store_harness.h"
#include "target.h"

namespace stoker {
namespace {

// What of a GPT is at the begin of a namespace with blocks of 512 bytes.
TEST(Store, IsNotMadeOfANamespaceThatHoldsAPartitionTableUnlessItIsErased) {
  if (nvme::is_pci_target(target())) GTEST_SKIP() << "the same code as over the kernel's driver";
  auto runtime = std::move(*RuntimeOwner::make({.cpu_threads = 1}));
  ASSERT_TRUE(make_blank(runtime->loop(), {target()}));
  const auto file = runtime->loop().open({.path = target()});
  ASSERT_TRUE(file) << file.error().message();
  AlignedBytes head(4096);
  std::memset(head.data(), 0, head.size());
  std::memcpy(head.data() + 512, "EFI PART", 8);
  IoBatch write(runtime->loop(), Priority::demand);
  write.write(file->id, 0, head.slice());
  ASSERT_TRUE(write.run());
  ASSERT_TRUE(runtime->loop().close(file->id));
  StoreOptions options;
  options.create = true;
  options.capacity_bytes = 16 * kMiB;
  const auto refused = open_store("local:" + target(), runtime->runtime(), options);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::mismatch);
  EXPECT_NE(refused.error().what.find("GPT partition table"), std::string::npos)
      << refused.error().what;
  ASSERT_TRUE(make_blank(runtime->loop(), {target()}));
  const auto made = open_store("local:" + target(), runtime->runtime(), options);
  EXPECT_TRUE(made) << made.error().message();
}

// What the n-th commit writes.
Bytes content(uint64_t number) {
  Bytes bytes(300 * kKiB);
  for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {
    const uint64_t word = number * 0x9E3779B97F4A7C15ULL + at;
    std::memcpy(bytes.data() + at, &word, 8);
  }
  return bytes;
}

// Two objects that every commit changes together. It checks what is there, says "found N", and
// commits until the power is cut, each with a line "committed N". STOKER_COMMITS bounds that.
TEST(Store, HoldsWhatWasCommittedWhenThePowerIsCut) {
  const char* bound = std::getenv("STOKER_COMMITS");
  if (bound == nullptr) GTEST_SKIP() << "the power is cut only where that is asked for";
  auto runtime = std::move(*RuntimeOwner::make({.cpu_threads = 2}));
  StoreOptions options;
  options.create = true;
  options.capacity_bytes = 16 * kMiB;
  options.chunk_bytes = 64 * kKiB;
  options.objects_max = 64;
  auto store = open_store("local:" + target(), runtime->runtime(), options);
  ASSERT_TRUE(store) << store.error().message();
  const uint64_t found = (*store)->info().committed;
  if (found > 0) {
    for (const char* key : {"a", "b"})
      ASSERT_EQ(read_all(**store, key), content(found)) << key << " at " << found;
  }
  std::printf("found %zu\n", static_cast<size_t>(found));
  std::fflush(stdout);
  const uint64_t most = std::strtoull(bound, nullptr, 10);
  for (uint64_t number = found + 1; number <= found + most; ++number) {
    auto change = std::move(*(*store)->begin());
    Bytes bytes = content(number);
    for (const char* key : {"a", "b"}) {
      ASSERT_OK(change->resize(key, bytes.size()));
      ASSERT_OK(change->write(key, 0, slice_of(bytes)).wait());
    }
    ASSERT_OK(change->commit(Durability::durable).wait());
    std::printf("committed %zu\n", static_cast<size_t>(number));
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace stoker
