// The specification's example is what we read and write.
#include <gtest/gtest.h>

#include "stoker/base/crc32c.h"
#include "stoker/store/local/journal.h"
#include "stoker/testing/format_example.h"
#include "stoker/testing/store_harness.h"

namespace stoker {
namespace {

std::vector<std::byte> example(const std::string& name, size_t bytes) {
  return format_example("local_store.md", name, bytes);
}

TEST(LocalStoreFormat, TheExampleInTheSpecificationIsWhatWeReadAndWrite) {
  const auto sector = example("header", local::kHeaderBytes);
  const auto header = local::decode_header(sector);
  ASSERT_OK(header);
  ASSERT_TRUE(header->has_value());
  EXPECT_EQ((*header)->state, local::VolumeState::ready);
  EXPECT_EQ((*header)->data_bytes, 1 * kMiB);
  EXPECT_EQ((*header)->area_bytes, 73'728U);
  EXPECT_EQ((*header)->journal_at[0], local::kHeaderRegion);
  EXPECT_EQ(local::encode_header(**header),
            std::string(reinterpret_cast<const char*>(sector.data()), sector.size()));

  std::vector<std::byte> area;
  for (const char* frame : {"frame 0", "frame 1", "frame 2", "frame 3"}) {
    const auto block = example(frame, 4096);
    area.insert(area.end(), block.begin(), block.end());
  }
  local::MapLimits limits{
      {{(*header)->data_at / 4096, ((*header)->data_at + (*header)->data_bytes) / 4096}}, 100};
  local::Map map(limits);
  local::FrameReader reader(map);
  MemoryLogSource source(area);
  LogScan scan(source, {(*header)->store, (uint64_t{1} << 32) | 0x5EED});
  for (auto item = *scan.next(); item; item = *scan.next())
    ASSERT_OK(reader.apply(std::get<LogRecord>(*item).payload));
  EXPECT_EQ(scan.cursor().sequence, 4U);
  EXPECT_TRUE(reader.image_complete());
  EXPECT_TRUE(reader.sealed());
  EXPECT_EQ(map.version(), 1U);
  const auto& object = *map.current().at("w");
  EXPECT_EQ(object.bytes, 70'000U);
  ASSERT_EQ(object.chunks.size(), 2U);
  const Bytes content(65'536, std::byte{0x42});
  EXPECT_EQ(object.chunks[0].crc, crc32c(content.data(), content.size()));
  EXPECT_EQ(object.chunks[1].stored, 4464U);
  EXPECT_EQ(object.chunks[1].crc, crc32c(content.data(), 4464));
  EXPECT_EQ(local::block_of(object.chunks[1].place), (*header)->data_at / 4096 + 16);
}

}  // namespace
}  // namespace stoker
