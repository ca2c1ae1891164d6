// Every block of the headers and the journal, damaged in every way that a disk damages: the other
// copy mends it.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "stoker/store/local/fsck.h"
#include "stoker/store/local/store.h"
#include "stoker/store/local/volume.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/sim_engine.h"
#include "stoker/testing/store_harness.h"

namespace stoker {
namespace {

enum class Damage : uint8_t { bits, unreadable, zeros, cut };
constexpr Damage kAll[] = {Damage::bits, Damage::unreadable, Damage::zeros, Damage::cut};
constexpr const char* kNames[] = {"bits", "unreadable", "zeros", "cut"};
constexpr uint64_t kObjects = 4;

class MetadataDamage : public ::testing::TestWithParam<size_t> {
 protected:
  MetadataDamage() {
    runtime_ =
        std::move(*RuntimeOwner::make(std::move(*SimEngine::make(disk_, 64)), {.cpu_threads = 1}));
    for (size_t i = 0; i < GetParam(); ++i) names_.push_back("volume" + std::to_string(i));
    StoreOptions options;
    options.create = true;
    options.capacity_bytes = kMiB;
    options.chunk_bytes = 64 * kKiB;
    auto store = std::move(*open_local_store(names_, runtime_->runtime(), options,
                                             {.files = false, .area_bytes = 10 * 4096}));
    for (uint64_t i = 0; i < kObjects; ++i) {
      auto change = std::move(*store->begin());
      Bytes bytes = pattern(5000, i);
      EXPECT_OK(change->resize(key(i), bytes.size()));
      EXPECT_OK(change->write(key(i), 0, slice_of(bytes)).wait());
      EXPECT_OK(change->commit(Durability::durable).wait());
    }
    store.reset();
    for (const std::string& name : names_) {
      whole_.push_back(disk_->image(name));
      Bytes sector(local::kHeaderBytes);
      whole_.back().read(0, sector);
      headers_.push_back(**local::decode_header(sector));
    }
  }
  static std::string key(uint64_t i) { return "object " + std::to_string(i); }

  void damage(size_t volume, uint64_t at, Damage kind) {
    SimImage image = whole_[volume];
    if (kind == Damage::bits) {
      for (const uint64_t within : {3, 70, 500, 4000}) image.flip(at + within, 1);
    } else if (kind == Damage::zeros) {
      image.write(at, Bytes(4096));
    } else if (kind == Damage::cut) {
      Bytes head(at);
      image.read(0, head);
      image = SimImage(at);
      image.write(0, head);
    }
    disk_->put(names_[volume], std::move(image));
    if (kind == Damage::unreadable) disk_->spoil(names_[volume], at);
  }
  void undo() {
    disk_->heal();
    for (size_t i = 0; i < names_.size(); ++i) disk_->put(names_[i], whole_[i]);
  }
  Result<std::unique_ptr<Store>> open(bool read_only) {
    StoreOptions options;
    options.read_only = read_only;
    return open_local_store(names_, runtime_->runtime(), options, {.files = false});
  }
  Result<FsckReport> fsck(FsckOptions options = {}) {
    return fsck_local_store(names_, runtime_->runtime(), options, {.files = false});
  }

  // All of it, but for what lay where nothing is any more, which is named.
  void expect_all(Store& store, size_t cut_volume, uint64_t cut_at) {
    EXPECT_EQ(store.list("")->size(), kObjects);
    for (uint64_t i = 0; i < kObjects; ++i) {
      Bytes into(5000);
      const auto read = store.read(key(i), 0, slice_of(into), {}).wait();
      if (read) {
        EXPECT_EQ(into, pattern(5000, i));
        continue;
      }
      const std::string& what = read.error().what;
      EXPECT_NE(what.find("'" + key(i) + "'"), std::string::npos) << what;
      EXPECT_TRUE(read.error().code == Code::io || read.error().code == Code::corruption) << what;
      EXPECT_LT(cut_at, headers_[cut_volume].data_at + headers_[cut_volume].data_bytes)
          << "nothing of it was damaged: " << what;
    }
  }
  // The blocks that hold a header, or anything of a journal.
  std::vector<uint64_t> places(size_t volume) const {
    std::vector<uint64_t> out = {local::kHeaderAt[0], 8192, local::kHeaderAt[1]};
    for (const uint64_t at : headers_[volume].journal_at) {
      const uint64_t bytes = at == 0 ? 0 : 2 * headers_[volume].area_bytes;
      for (uint64_t block = 0; block < bytes; block += 4096) out.push_back(at + block);
    }
    return out;
  }

  std::shared_ptr<SimDisk> disk_ = std::make_shared<SimDisk>();
  std::unique_ptr<RuntimeOwner> runtime_;
  std::vector<std::string> names_;
  std::vector<SimImage> whole_;
  std::vector<local::VolumeHeader> headers_;
};

TEST_P(MetadataDamage, OfAnyBlockAndKindIsBorneByEveryReader) {
  size_t tried = 0, refused = 0;
  for (size_t volume = 0; volume < names_.size(); ++volume) {
    for (const uint64_t at : places(volume)) {
      for (const Damage kind : kAll) {
        SCOPED_TRACE(std::string(kNames[static_cast<size_t>(kind)]) + " at " + std::to_string(at) +
                     " of volume " + std::to_string(volume));
        ++tried;
        damage(volume, at, kind);
        const bool cut = kind == Damage::cut;
        const uint64_t cut_at = cut ? at : UINT64_MAX;
        // With both headers or both copies of the journal gone there may be nothing to mend it by.
        // It never passes for a store that has not got so far.
        const auto& head = headers_[volume];
        if (cut && (at == 0 || (names_.size() == 1 && at < head.journal_at[1]))) {
          for (const bool read_only : {true, false}) {
            const auto store = open(read_only);
            if (store)
              expect_all(**store, volume, cut_at);
            else
              ++refused;
          }
          undo();
          continue;
        }
        const auto report = fsck();
        ASSERT_OK(report);
        EXPECT_EQ(report->committed, kObjects);
        const bool header = at == local::kHeaderAt[0] || at == local::kHeaderAt[1];
        if (header || cut) {
          EXPECT_FALSE(report->problems.empty());
        }
        {
          const auto reader = open(true);
          ASSERT_OK(reader);
          expect_all(**reader, volume, cut_at);
        }
        if (cut) {
          const auto mended = fsck({.quick = true, .repair_map = true, .progress = {}});
          ASSERT_OK(mended);
          EXPECT_TRUE(mended->repaired);
        }
        {
          const auto writer = open(false);
          ASSERT_OK(writer);
          expect_all(**writer, volume, cut_at);
          ASSERT_OK((*(*writer)->begin())->commit(Durability::durable).wait());
        }
        disk_->heal();  // a block that is not in use may stay as it is
        const auto after = fsck({.quick = true, .repair_map = false, .progress = {}});
        ASSERT_OK(after);
        EXPECT_TRUE(after->problems.empty()) << after->problems[0];
        undo();
      }
    }
  }
  EXPECT_EQ(tried, 4 * (3 * names_.size() + 40));
  EXPECT_GE(refused, 2 * names_.size());
}

TEST_P(MetadataDamage, OfTheSameBlockInBothCopiesIsCorruptionAndNeverANewStore) {
  for (const Damage kind : {Damage::bits, Damage::unreadable, Damage::zeros}) {
    SCOPED_TRACE(kNames[static_cast<size_t>(kind)]);
    for (const uint64_t at : local::kHeaderAt) damage(0, at, kind);
    if (kind != Damage::unreadable) {
      SimImage image = disk_->image(names_[0]);  // the second call began from the whole image
      kind == Damage::zeros ? image.write(0, Bytes(4096)) : image.flip(3, 1);
      disk_->put(names_[0], image);
    }
    StoreOptions options;
    options.create = true;
    options.capacity_bytes = kMiB;
    const auto store = open_local_store(names_, runtime_->runtime(), options,
                                        {.files = false, .area_bytes = 10 * 4096});
    EXPECT_FALSE(store);
    undo();
    EXPECT_OK(open(true));
  }
}

TEST_P(MetadataDamage, AnUnreadableChunkIsNamedAndEverythingElseReads) {
  const auto& head = headers_[0];
  size_t lost = 0;
  for (uint64_t block = 0; block < 4 * 16; ++block) {
    disk_->spoil(names_[0], head.data_at + block * 4096);
  }
  const auto store = open(true);
  ASSERT_OK(store);
  for (uint64_t i = 0; i < kObjects; ++i) {
    Bytes into(5000);
    const auto read = (*store)->read(key(i), 0, slice_of(into), {}).wait();
    if (read) continue;
    ++lost;
    EXPECT_EQ(read.error().code, Code::io);
    EXPECT_NE(read.error().what.find("chunk 0 of '" + key(i) + "'"), std::string::npos)
        << read.error().what;
    EXPECT_NE(read.error().what.find("'" + names_[0] + "'"), std::string::npos)
        << read.error().what;
  }
  EXPECT_GT(lost, 0U);
  const auto report = fsck();
  ASSERT_OK(report);
  EXPECT_EQ(report->problems.size(), lost);
}

INSTANTIATE_TEST_SUITE_P(Volumes, MetadataDamage, ::testing::Values(1, 2, 3),
                         [](const auto& volumes) { return "of" + std::to_string(volumes.param); });

}  // namespace
}  // namespace stoker
