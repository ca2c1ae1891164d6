// Damaged bytes on a volume: named, mended from the other copy, or refused; never taken for good.
#include <algorithm>
#include <filesystem>

#include "stoker/testing/local_lab.h"

namespace stoker {
namespace {

TEST_F(LocalStoreTest, AFlippedDataBitNamesKeyAndChunkAndTheSnapshotStillReads) {
  open();
  put("a", pattern(200'000, 1));
  ASSERT_OK(store_->snapshot("good").wait());
  auto change = std::move(*store_->begin());
  Bytes bytes(64 * kKiB, std::byte{0x99});
  ASSERT_OK(change->write("a", 128 * kKiB, slice_of(bytes)).wait());
  ASSERT_OK(change->commit(Durability::durable).wait());
  change.reset();
  store_.reset();
  const auto head = header();
  const Bytes data = bytes_at(head.data_at, head.data_bytes);
  const auto found = std::search(data.begin(), data.end(), bytes.begin(), bytes.end());
  ASSERT_NE(found, data.end());
  flip(head.data_at + static_cast<uint64_t>(found - data.begin()) + 777);
  open();
  Bytes into(200'000);
  const auto read = store_->read("a", 0, slice_of(into), {}).wait();
  EXPECT_EQ(code_of(read), Code::corruption);
  EXPECT_NE(read.error().what.find("chunk 2 of 'a'"), std::string::npos) << read.error().what;
  EXPECT_NE(read.error().what.find("snapshot 'good' has an earlier form of it"), std::string::npos)
      << read.error().what;
  EXPECT_OK(store_->read("a", 0, {into.data(), 128 * kKiB}, {}).wait());
  EXPECT_EQ(read_all(*store_, "a", "good"), pattern(200'000, 1));
  // A part of a chunk is merged with verified bytes only.
  change = std::move(*store_->begin());
  EXPECT_EQ(code_of(change->write("a", 128 * kKiB + 5, {into.data(), 10}).wait()),
            Code::corruption);
  EXPECT_EQ(code_of(change->commit(Durability::durable).wait()), Code::corruption);
  change.reset();
  store_.reset();
  const auto report = fsck();
  ASSERT_EQ(report.problems.size(), 1U);
  EXPECT_NE(report.problems[0].find("chunk 2 of 'a'"), std::string::npos);
  ASSERT_EQ(report.advice.size(), 1U);
  EXPECT_NE(report.advice[0].find("snapshot 'good' is whole"), std::string::npos)
      << report.advice[0];
  EXPECT_TRUE(fsck({.quick = true, .repair_map = false, .progress = {}}).problems.empty());
}

TEST_F(LocalStoreTest, AFlippedBitInAnyFrameOfTheJournalIsMendedFromTheOtherCopy) {
  open();
  for (uint64_t i = 0; i < 5; ++i) put("k" + std::to_string(i), pattern(1000, i));
  store_.reset();
  const size_t frames = newest_frames(0).size();
  ASSERT_EQ(frames, 3U + 5U);  // image, its end, seal, records
  for (size_t frame = 0; frame < frames; ++frame) {
    for (size_t copy = 0; copy < 2; ++copy) {
      for (const uint64_t within : {0, 30, 70, 2000}) {  // magic, generation, payload, padding
        const auto offsets = newest_frames(copy);
        const uint64_t at = header().journal_at[copy] + offsets[frame] + within;
        flip(at);
        SCOPED_TRACE("frame " + std::to_string(frame) + " of copy " + std::to_string(copy) +
                     " at " + std::to_string(within));
        const auto report = fsck();
        EXPECT_EQ(report.problems.empty(), frame + 1 == frames)
            << "the last one could as well be cut short: a note";
        EXPECT_EQ(report.notes.empty(), frame + 1 != frames);
        EXPECT_EQ(report.committed, 5U);
        StoreOptions reader;
        reader.read_only = true;
        auto store = try_open(reader);
        ASSERT_OK(store);
        for (uint64_t i = 0; i < 5; ++i)
          EXPECT_EQ(read_all(**store, "k" + std::to_string(i)), pattern(1000, i));
        store->reset();
        flip(at);
      }
    }
  }
  flip(header().journal_at[1] + newest_frames(1)[4] + 70);
  const auto repaired = fsck({.quick = false, .repair_map = true, .progress = {}});
  EXPECT_TRUE(repaired.repaired);
  EXPECT_TRUE(repaired.problems.empty());
  EXPECT_TRUE(fsck().problems.empty());
  open();
  for (uint64_t i = 0; i < 5; ++i)
    EXPECT_EQ(read_all(*store_, "k" + std::to_string(i)), pattern(1000, i));
}

TEST_F(LocalStoreTest, ARecordDamagedInBothCopiesIsCorruptionAndNeverTheEnd) {
  open();
  for (uint64_t i = 0; i < 5; ++i) put("k" + std::to_string(i), pattern(1000, i));
  store_.reset();
  // of the image, its end, a record in the middle
  for (size_t frame : {size_t{0}, size_t{1}, size_t{4}}) {
    const uint64_t at[] = {header().journal_at[0] + newest_frames(0)[frame],
                           header().journal_at[1] + newest_frames(1)[frame]};
    for (const uint64_t each : at) flip(each + 70);
    const auto store = try_open();
    EXPECT_EQ(code_of(store), Code::corruption) << frame;
    for (const uint64_t each : at) flip(each + 70);
  }
  // Different frames in the two copies: together they are whole.
  flip(header().journal_at[0] + newest_frames(0)[3] + 70);
  flip(header().journal_at[1] + newest_frames(1)[5] + 70);
  open();
  for (uint64_t i = 0; i < 5; ++i)
    EXPECT_EQ(read_all(*store_, "k" + std::to_string(i)), pattern(1000, i));
}

TEST_F(LocalStoreTest, ADamagedHeaderIsTakenFromItsOtherCopyAndMended) {
  open();
  put("a", pattern(1000, 1));
  store_.reset();
  for (const uint64_t copy : local::kHeaderAt) {
    flip(copy + 20);
    EXPECT_EQ(fsck().problems.size(), 1U);
    open();
    EXPECT_EQ(read_all(*store_, "a"), pattern(1000, 1));
    store_.reset();
    EXPECT_TRUE(fsck().problems.empty());
  }
  for (const uint64_t copy : local::kHeaderAt) flip(copy + 20);
  EXPECT_EQ(code_of(try_open()), Code::mismatch);  // and it is not made anew
}

TEST_F(LocalStoreTest, ATruncatedVolumeIsSaidToBeAndWhatIsLeftOfItReads) {
  open();
  put("a", pattern(1000, 1));
  store_.reset();
  const auto whole = std::filesystem::file_size(file());
  std::filesystem::resize_file(file(), whole - 4096);
  const auto report = fsck();
  ASSERT_EQ(report.problems.size(), 1U);
  EXPECT_NE(report.problems[0].find("cut short"), std::string::npos) << report.problems[0];
  StoreOptions reading;
  reading.read_only = true;
  {
    const auto reader = try_open(reading);
    ASSERT_OK(reader);
    EXPECT_EQ(read_all(**reader, "a"), pattern(1000, 1));
  }
  EXPECT_EQ(std::filesystem::file_size(file()), whole - 4096);
  open();
  EXPECT_EQ(std::filesystem::file_size(file()), whole);
  EXPECT_EQ(read_all(*store_, "a"), pattern(1000, 1));
  store_.reset();
  EXPECT_TRUE(fsck().problems.empty());
}

TEST_F(LocalStoreTest, AnOlderCopyOfOneVolumeIsNotWrittenTo) {
  volumes_ = {root_ + "/a", root_ + "/b", root_ + "/c"};
  open();
  for (uint64_t i = 0; i < 6; ++i) put("k" + std::to_string(i), pattern(200'000, i));
  for (size_t volume = 0; volume < volumes_.size(); ++volume) {
    store_.reset();
    const std::string older = root_ + "/older", newer = root_ + "/newer";
    std::filesystem::copy_file(file(volume), older,
                               std::filesystem::copy_options::overwrite_existing);
    open();
    for (uint64_t i = 0; i < 6; ++i) {
      put("k" + std::to_string(i), pattern(200'000, 100 * volume + i));
    }
    store_.reset();
    std::filesystem::copy_file(file(volume), newer,
                               std::filesystem::copy_options::overwrite_existing);
    std::filesystem::copy_file(older, file(volume),
                               std::filesystem::copy_options::overwrite_existing);
    const auto refused = try_open();
    EXPECT_EQ(code_of(refused), Code::mismatch);
    EXPECT_NE(refused.error().what.find("'" + volumes_[volume] + "' is an older copy"),
              std::string::npos)
        << refused.error().what;
    const auto report = fsck();
    EXPECT_TRUE(std::any_of(
        report.problems.begin(), report.problems.end(),
        [](const std::string& each) { return each.find("older copy") != std::string::npos; }));
    std::filesystem::copy_file(newer, file(volume),
                               std::filesystem::copy_options::overwrite_existing);
    open();
    for (uint64_t i = 0; i < 6; ++i) {
      EXPECT_EQ(read_all(*store_, "k" + std::to_string(i)), pattern(200'000, 100 * volume + i));
    }
  }
}

}  // namespace
}  // namespace stoker
