// What tests of local stores share: a store in a folder of the test's own, its volumes as they lie
// on disk, damage to them.
#pragma once

#include <gtest/gtest.h>

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "stoker/store/local/fsck.h"
#include "stoker/store/local/journal.h"
#include "stoker/store/local/store.h"
#include "stoker/store/local/volume.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/store_harness.h"

namespace stoker {

class LocalStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = testing::TempDir() + "local_store_" + std::to_string(getpid()) + "_" +
            testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(root_);
    runtime_ = std::move(*RuntimeOwner::make({.engine = "posix", .cpu_threads = 2}));
    volumes_ = {root_ + "/a"};
    options_.create = true;
    options_.capacity_bytes = 2 * kMiB;
    options_.chunk_bytes = 64 * kKiB;
    options_.objects_max = 64;
    options_.holder = "the test";
  }
  void TearDown() override {
    store_.reset();
    runtime_.reset();
    std::filesystem::remove_all(root_);
  }
  Result<std::unique_ptr<Store>> try_open(const StoreOptions& options) {
    return open_local_store(volumes_, runtime_->runtime(), options);
  }
  Result<std::unique_ptr<Store>> try_open() { return try_open(options_); }
  void open() {
    store_.reset();
    auto store = try_open();
    ASSERT_OK(store);
    store_ = std::move(*store);
  }
  void put(const std::string& key, Bytes bytes, Durability durability = Durability::durable) {
    auto change = std::move(*store_->begin());
    ASSERT_OK(change->resize(key, bytes.size()));
    ASSERT_OK(change->write(key, 0, slice_of(bytes)).wait());
    ASSERT_OK(change->commit(durability).wait());
  }
  FsckReport fsck(FsckOptions options = {}) {
    auto report = fsck_local_store(volumes_, runtime_->runtime(), options);
    EXPECT_OK(report);
    if (report) return *report;
    FsckReport failed;
    failed.problems.push_back(report.error().what);
    return failed;
  }
  std::string file(size_t volume = 0) const { return volumes_[volume] + "/stoker.volume"; }
  local::VolumeHeader header(size_t volume = 0) {
    Bytes sector = bytes_at(0, local::kHeaderBytes, volume);
    return **local::decode_header(sector);
  }
  Bytes bytes_at(uint64_t offset, size_t size, size_t volume = 0) {
    Bytes bytes(size);
    const int fd = ::open(file(volume).c_str(), O_RDONLY);
    EXPECT_EQ(pread(fd, bytes.data(), size, static_cast<off_t>(offset)),
              static_cast<ssize_t>(size));
    close(fd);
    return bytes;
  }
  void flip(uint64_t offset, size_t volume = 0, uint8_t bits = 1) {
    Bytes byte = bytes_at(offset, 1, volume);
    byte[0] ^= std::byte{bits};
    const int fd = ::open(file(volume).c_str(), O_WRONLY);
    EXPECT_EQ(pwrite(fd, byte.data(), 1, static_cast<off_t>(offset)), 1);
    close(fd);
  }
  // The offsets, within a copy of the journal, of the frames of its newest generation.
  std::vector<uint64_t> newest_frames(size_t copy, size_t volume = 0) {
    const auto head = header(volume);
    std::vector<uint64_t> newest;
    uint64_t generation = 0;
    for (uint64_t area = 0; area < 2; ++area) {
      Bytes bytes =
          bytes_at(head.journal_at[copy] + area * head.area_bytes, head.area_bytes, volume);
      MemoryLogSource source(bytes);
      const auto first = *read_frame(source, head.store, 0);
      if (!first || first->generation < generation) continue;
      generation = first->generation;
      newest.clear();
      LogScan scan(source, {head.store, generation});
      for (auto item = *scan.next(); item; item = *scan.next())
        newest.push_back(area * head.area_bytes + std::get<LogRecord>(*item).offset);
    }
    return newest;
  }

  std::string root_;
  std::vector<std::string> volumes_;
  StoreOptions options_;
  std::unique_ptr<RuntimeOwner> runtime_;
  std::unique_ptr<Store> store_;
};

}  // namespace stoker
