#include "stoker/store/coded/coded_store.h"

#include "stoker/store/coded/coded_world.h"

namespace stoker::coded {
namespace {

Bytes put(Store& store, const std::string& key, size_t bytes, uint64_t seed) {
  Bytes content = pattern(bytes, seed);
  auto change = std::move(*store.begin());
  EXPECT_OK(change->resize(key, bytes));
  EXPECT_OK(change->write(key, 0, slice_of(content)).wait());
  EXPECT_OK(change->commit(Durability::durable).wait());
  return content;
}

TEST(CodedStore, ReadsBackWhatWasPut) {
  CodedWorld world({});
  auto store = std::move(*world.open_small());
  const Bytes content = put(*store, "a", 300'000, 1);
  EXPECT_EQ(read_all(*store, "a"), content);
}

}  // namespace
}  // namespace stoker::coded
