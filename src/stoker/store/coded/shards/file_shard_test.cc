#include "stoker/store/coded/shards/file_shard.h"

#include "stoker/testing/shard_conformance.h"

namespace stoker::coded {
namespace {

std::unique_ptr<Shard> make(Loop& loop, Pool& pool, const std::string& path) {
  const auto file = loop.open({.path = path, .write = true});
  EXPECT_OK(file);
  return std::make_unique<FileShard>(loop, pool, file->id);
}

INSTANTIATE_TEST_SUITE_P(File, ShardConformance, ::testing::Values(ShardUnderTest{"file", make}),
                         [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace stoker::coded
