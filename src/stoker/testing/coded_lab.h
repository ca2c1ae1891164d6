// What tests of coded stores share: writing to one, and its disks as they are.
#pragma once

#include <cstring>
#include <map>
#include <string>

#include "stoker/store/local/fsck.h"
#include "stoker/testing/coded_world.h"

namespace stoker::coded {

inline Bytes put(Store& store, const std::string& key, size_t bytes, uint64_t seed) {
  Bytes content = pattern(bytes, seed);
  auto change = std::move(*store.begin());
  EXPECT_OK(change->resize(key, bytes));
  EXPECT_OK(change->write(key, 0, slice_of(content)).wait());
  EXPECT_OK(change->commit(Durability::durable).wait());
  return content;
}

inline void update(Store& store, const std::string& key, Bytes& content, size_t offset,
                   size_t bytes, uint64_t seed) {
  Bytes from = pattern(bytes, seed);
  auto change = std::move(*store.begin());
  ASSERT_OK(change->write(key, offset, slice_of(from)).wait());
  ASSERT_OK(change->commit(Durability::durable).wait());
  std::memcpy(content.data() + offset, from.data(), bytes);
}

// By updates of this object, over what is in the logs of others: opening reads no headers of those
// then.
inline void write_logs_anew(CodedStore& store, const std::string& key, Bytes& content) {
  for (uint64_t i = 0; i < 200; ++i) {
    ASSERT_NO_FATAL_FAILURE(update(store, key, content, i % 2 * 65'536, 53'248, 100 + i));
    ASSERT_OK(store.fold_all().wait());
  }
}

inline CodedWorldOptions quiet(size_t k, size_t m) {
  CodedWorldOptions options;
  options.k = k;
  options.m = m;
  options.background = false;
  return options;
}

inline std::map<std::string, SimImage> images_of(CodedWorld& world) {
  std::map<std::string, SimImage> images;
  for (const auto& path : world.paths()) images[path] = world.disk().image(path);
  return images;
}
inline void put_back(CodedWorld& world, const std::map<std::string, SimImage>& images) {
  for (const auto& [path, image] : images) world.disk().put(path, image);
}

inline Result<FsckReport> fsck(CodedWorld& world, size_t k, size_t m) {
  CodedOptions coded;
  coded.files = false;
  return fsck_coded_store({k, m, world.paths()}, world.runtime().runtime(), {}, coded);
}

// Of 4+2 shards with chunks of 16 blocks, for parts that know of no disk.
inline Shape small_shape(uint32_t slots) {
  Shape shape;
  shape.k = 4;
  shape.m = 2;
  shape.shards = 6;
  shape.chunk_bytes = 16 * kBlock;
  shape.segment_bytes = 1 << 20;
  shape.area_bytes = 1 << 20;
  shape.segments = 4;
  shape.slots = slots;
  return shape;
}

}  // namespace stoker::coded
