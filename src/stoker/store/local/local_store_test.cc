// What only a local store can show: how it is made, opened and shared, what it keeps, and in how
// much memory.
#include "stoker/store/local/store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "stoker/store/writer_lock.h"
#include "stoker/testing/local_lab.h"

namespace stoker {
namespace {

TEST_F(LocalStoreTest, ComesBackWithWhatWasDurable) {
  open();
  put("a", pattern(100'000, 1));
  put("b", pattern(10, 2), Durability::deferred);
  put("c", pattern(70'000, 3));
  put("lost", pattern(5, 4), Durability::deferred);
  EXPECT_EQ(store_->info().committed, 4U);
  EXPECT_EQ(store_->info().durable, 3U);
  open();
  EXPECT_EQ(store_->info().committed, 3U);
  EXPECT_GE(runtime_->budget().used(), store_->info().map_bytes) << "the recovered map counts, too";
  EXPECT_EQ(read_all(*store_, "a"), pattern(100'000, 1));
  EXPECT_EQ(read_all(*store_, "b"), pattern(10, 2));
  EXPECT_EQ(read_all(*store_, "c"), pattern(70'000, 3));
  EXPECT_EQ(code_of(store_->stat("lost")), Code::not_found);
  store_.reset();
  EXPECT_TRUE(fsck().problems.empty());
}

TEST_F(LocalStoreTest, ReservesItsSpaceWhenMade) {
  open();
  struct stat st {};
  ASSERT_EQ(stat(file().c_str(), &st), 0);
  EXPECT_GE(static_cast<uint64_t>(st.st_blocks) * 512, options_.capacity_bytes);
  EXPECT_EQ(store_->info().capacity_bytes, options_.capacity_bytes);
  EXPECT_EQ(store_->info().used_bytes, 0U);
}

TEST_F(LocalStoreTest, RefusesWhatIsNoStoreOrNotThere) {
  options_.create = false;
  EXPECT_EQ(code_of(try_open()), Code::not_found);
  std::filesystem::create_directories(volumes_[0]);
  EXPECT_EQ(code_of(try_open()), Code::not_found);
  std::ofstream(file()) << std::string(200'000, 'x');
  options_.create = true;
  EXPECT_EQ(code_of(try_open()), Code::mismatch);
}

TEST_F(LocalStoreTest, RefusesOptionsThatMakeNoStore) {
  StoreOptions odd = options_;
  odd.chunk_bytes = 100'000;
  EXPECT_EQ(code_of(try_open(odd)), Code::invalid_argument);
  odd = options_;
  odd.capacity_bytes = 0;
  EXPECT_EQ(code_of(try_open(odd)), Code::invalid_argument);
  odd.capacity_bytes = uint64_t{1} << 50;
  const auto full = try_open(odd);
  EXPECT_EQ(code_of(full), Code::out_of_space);
  EXPECT_FALSE(std::filesystem::exists(file()));
  open();
}

TEST_F(LocalStoreTest, ASecondWriterIsToldWhoHoldsIt) {
  open();
  const auto second = try_open();
  EXPECT_EQ(code_of(second), Code::busy);
  EXPECT_NE(second.error().what.find("in use by the test"), std::string::npos)
      << second.error().what;
  StoreOptions reader = options_;
  reader.read_only = true;
  // what a reader maps would be overwritten under it
  EXPECT_EQ(code_of(try_open(reader)), Code::busy);
  store_.reset();
  auto one = try_open(reader);
  auto two = try_open(reader);  // readers share
  EXPECT_OK(one);
  EXPECT_OK(two);
  // The name of the writer that is gone would send its user looking for the wrong process.
  const auto writer = try_open();
  EXPECT_EQ(code_of(writer), Code::busy);
  EXPECT_NE(writer.error().what.find("being read by another process"), std::string::npos)
      << writer.error().what;
  EXPECT_EQ(writer.error().what.find("the test"), std::string::npos) << writer.error().what;
}

TEST_F(LocalStoreTest, WhoeverLetsGoLeavesNoName) {
  open();
  store_.reset();
  const Bytes text = bytes_at(kHolderAt, 512);
  EXPECT_TRUE(
      std::all_of(text.begin(), text.end(), [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST_F(LocalStoreTest, AFileThatBeginsWithZerosIsTakenOnlyIfThereIsNothingElseInIt) {
  std::filesystem::create_directories(volumes_[0]);
  const uint64_t size = 16 * kMiB;
  for (const uint64_t at : {local::kHeaderRegion, 5 * kMiB + 4097, size - 1}) {
    std::ofstream(file()) << "";
    std::filesystem::resize_file(file(), size);
    const int fd = ::open(file().c_str(), O_WRONLY);
    ASSERT_EQ(pwrite(fd, "!", 1, static_cast<off_t>(at)), 1);
    close(fd);
    const auto store = try_open();
    EXPECT_EQ(code_of(store), Code::mismatch) << at;
    EXPECT_NE(store.error().what.find("from byte " + std::to_string(at / 4096 * 4096)),
              std::string::npos)
        << store.error().what;
    EXPECT_EQ(bytes_at(at, 1)[0], static_cast<std::byte>('!'));
    EXPECT_EQ(std::filesystem::file_size(file()), size);
  }
  // written, so that no hole tells that it is empty
  std::ofstream(file()) << std::string(size, '\0');
  open();
  put("a", pattern(1000, 1));
  open();
  EXPECT_EQ(read_all(*store_, "a"), pattern(1000, 1));
}

TEST_F(LocalStoreTest, WhatACutOffMakingLeavesIsMadeAgain) {
  std::filesystem::create_directories(volumes_[0]);
  std::ofstream(file()) << "";  // the name was made, the size was not
  StoreOptions reader = options_;
  reader.read_only = true;
  EXPECT_FALSE(try_open(reader));
  EXPECT_EQ(std::filesystem::file_size(file()), 0U);
  open();
  struct stat st {};
  ASSERT_EQ(stat(file().c_str(), &st), 0);
  EXPECT_GE(static_cast<uint64_t>(st.st_blocks) * 512, options_.capacity_bytes);
  store_.reset();
  const auto size = std::filesystem::file_size(file());
  std::filesystem::resize_file(file(), 0);
  std::filesystem::resize_file(file(), size);  // the size was made, the headers were not
  open();
  put("a", pattern(1000, 1));
  EXPECT_EQ(read_all(*store_, "a"), pattern(1000, 1));
}

TEST_F(LocalStoreTest, ReadOnlyWritesNothing) {
  open();
  put("a", pattern(1000, 1));
  store_.reset();
  const auto size = std::filesystem::file_size(file());
  const Bytes before = bytes_at(0, size);
  StoreOptions reader;
  reader.read_only = true;
  {
    auto store = std::move(*try_open(reader));
    EXPECT_EQ(read_all(*store, "a"), pattern(1000, 1));
    EXPECT_EQ(code_of(store->begin()), Code::read_only);
    EXPECT_EQ(code_of(store->snapshot("s").wait()), Code::read_only);
    EXPECT_FALSE(store->info().read_only.empty());
  }
  EXPECT_EQ(bytes_at(0, size), before);
  EXPECT_EQ(fsck().problems.size(), 0U);
  EXPECT_EQ(bytes_at(0, size), before);
}

TEST_F(LocalStoreTest, SmallObjectsTakeOnlyTheirBlocksAndSparseOnesNothing) {
  open();
  put("small", pattern(5000, 1));
  EXPECT_EQ(store_->info().used_bytes, 8192U);
  auto change = std::move(*store_->begin());
  ASSERT_OK(change->resize("sparse", 50 * kMiB, kMiB));
  ASSERT_OK(change->commit(Durability::durable).wait());
  EXPECT_EQ(store_->info().used_bytes, 8192U);
  const uint64_t reads_before = runtime_->loop().counters().reads.get();
  EXPECT_EQ(read_all(*store_, "sparse"), Bytes(50 * kMiB));
  EXPECT_EQ(runtime_->loop().counters().reads.get(), reads_before);
}

TEST_F(LocalStoreTest, SnapshotsHoldTheirBytesAndDroppingFreesThem) {
  options_.capacity_bytes = 512 * kKiB;
  open();
  put("a", pattern(128 * kKiB, 1));
  ASSERT_OK(store_->snapshot("one").wait());
  put("a", pattern(128 * kKiB, 2));
  ASSERT_OK(store_->snapshot("two").wait());
  put("a", pattern(128 * kKiB, 3));
  EXPECT_EQ(store_->info().used_bytes, 384 * kKiB);
  open();
  EXPECT_EQ(read_all(*store_, "a", "one"), pattern(128 * kKiB, 1));
  EXPECT_EQ(read_all(*store_, "a", "two"), pattern(128 * kKiB, 2));
  ASSERT_OK(store_->drop("two").wait());
  EXPECT_EQ(store_->info().used_bytes, 256 * kKiB);
  open();
  EXPECT_EQ(store_->info().used_bytes, 256 * kKiB);
  EXPECT_EQ(read_all(*store_, "a", "one"), pattern(128 * kKiB, 1));
  ASSERT_OK(store_->drop("one").wait());
  EXPECT_EQ(store_->info().used_bytes, 128 * kKiB);
  EXPECT_EQ(read_all(*store_, "a"), pattern(128 * kKiB, 3));
}

TEST_F(LocalStoreTest, VolumesOfOtherStoresAndMissingOnesAreRefusedInAnyOrderTheyOpen) {
  volumes_ = {root_ + "/a", root_ + "/b"};
  open();
  put("x", pattern(500'000, 1));
  store_.reset();
  std::swap(volumes_[0], volumes_[1]);
  open();
  EXPECT_EQ(read_all(*store_, "x"), pattern(500'000, 1));
  store_.reset();
  volumes_ = {root_ + "/a"};
  EXPECT_EQ(code_of(try_open()), Code::mismatch);
  volumes_ = {root_ + "/a", root_ + "/new"};
  EXPECT_EQ(code_of(try_open()), Code::mismatch);
  EXPECT_FALSE(std::filesystem::exists(root_ + "/new/stoker.volume"))
      << "what was made in vain is taken away";
  volumes_ = {root_ + "/c", root_ + "/d"};
  open();
  store_.reset();
  volumes_ = {root_ + "/a", root_ + "/d"};
  EXPECT_EQ(code_of(try_open()), Code::mismatch);
}

TEST_F(LocalStoreTest, TwoVolumesShareTheDataAndTheJournalCopies) {
  volumes_ = {root_ + "/a", root_ + "/b"};
  open();
  put("x", pattern(1'000'000, 1));
  store_.reset();
  EXPECT_NE(header(0).journal_at[0], 0U);
  EXPECT_EQ(header(0).journal_at[1], 0U);
  EXPECT_NE(header(1).journal_at[1], 0U);
  for (size_t volume = 0; volume < 2; ++volume) {
    const Bytes data = bytes_at(header(volume).data_at, header(volume).data_bytes, volume);
    EXPECT_NE(data, Bytes(data.size())) << "volume " << volume << " holds nothing";
  }
}

TEST_F(LocalStoreTest, VolumesShareTheRoomByWeight) {
  volumes_ = {root_ + "/a", root_ + "/b", root_ + "/c"};
  options_.capacity_bytes = 8 * kMiB;
  for (const auto& wrong : std::vector<std::vector<double>>{
           {1, 1}, {1, 1, 0}, {1, 1, -1}, {1, 1, std::nan("")}, {1, 1, HUGE_VAL}}) {
    options_.volume_weights = wrong;
    EXPECT_EQ(code_of(try_open()), Code::invalid_argument);
  }
  options_.volume_weights = {5, 1, 2};
  open();
  uint64_t blocks = 0;
  for (size_t volume = 0; volume < 3; ++volume) {
    EXPECT_EQ(
        header(volume).data_bytes,
        align_up(static_cast<uint64_t>(options_.volume_weights[volume]) * kMiB, local::kBlock))
        << volume;
    blocks += header(volume).data_bytes / local::kBlock;
  }
  EXPECT_EQ(blocks, options_.capacity_bytes / local::kBlock);
  put("x", pattern(7 * kMiB, 1));
  store_.reset();
  options_.volume_weights = {1, 1, 1};  // what a store was made with counts
  open();
  EXPECT_EQ(store_->info().volumes[0].capacity_bytes, 5 * kMiB);
  EXPECT_EQ(read_all(*store_, "x"), pattern(7 * kMiB, 1));
  store_.reset();
  EXPECT_TRUE(fsck().problems.empty());
}

TEST_F(LocalStoreTest, AForkedProcessDoesNotKeepTheLock) {
  open();
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  EXPECT_EQ(code_of(try_open()), Code::busy) << "the lock is held yet";
  store_.reset();
  EXPECT_OK(try_open());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

// A process that has yet to exec, say, or was forked without the C library.
TEST_F(LocalStoreTest, AForkedProcessThatStillHasItsCopiesDoesNotKeepTheLockEither) {
  open();
  const auto child = static_cast<pid_t>(syscall(SYS_fork));
  if (child == 0) {
    for (;;) pause();
  }
  EXPECT_EQ(code_of(try_open()), Code::busy) << "the lock is held yet";
  store_.reset();
  EXPECT_OK(try_open());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

// Whoever makes it again may find other disks quicker, or have less to spare.
TEST_F(LocalStoreTest, ACutOffMakingIsMadeAgainWithOtherWeights) {
  volumes_ = {root_ + "/a", root_ + "/b"};
  for (const bool with_headers : {false, true}) {
    options_.volume_weights = {3, 1};
    {
      auto set = local::VolumeSet::open(volumes_, runtime_->loop(), options_, {});
      ASSERT_OK(set);
      if (with_headers) {
        ASSERT_OK(set->write_headers(local::VolumeState::making, 1, 0));
      }
      set->keep_files();
    }
    options_.volume_weights = {1, 3};
    open();
    EXPECT_EQ(store_->info().volumes[1].capacity_bytes, 3 * kMiB / 2);
    put("x", pattern(kMiB, 1));
    store_.reset();
    EXPECT_TRUE(fsck().problems.empty());
    std::filesystem::remove_all(root_);
  }
}

TEST_F(LocalStoreTest, FsckTellsTheCommittedStep) {
  open();
  const std::string state = R"({"step": 41, "more": [1, 2]})";
  Bytes bytes(state.size());
  std::memcpy(bytes.data(), state.data(), state.size());
  put("meta/state", bytes);
  auto unfinished = std::move(*store_->begin());
  Bytes other = pattern(1000, 1);
  ASSERT_OK(unfinished->resize("half", 1000));
  ASSERT_OK(unfinished->write("half", 0, slice_of(other)).wait());
  unfinished.reset();
  store_.reset();
  const auto report = fsck();
  EXPECT_TRUE(report.problems.empty());
  EXPECT_EQ(report.committed_step, 41U);
}

uint64_t status_kib(const char* field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field, 0) == 0) return std::stoull(line.substr(line.find(':') + 1));
  }
  return 0;
}

// A map of 1 Mi chunks of 1 MiB, written through the journal; the data is never there. Memory is
// counted; the time is told.
TEST_F(LocalStoreTest, AStoreOfOneTebibyteOpensInLittleMemory) {
  constexpr uint64_t capacity = uint64_t{1} << 40;
  volumes_ = {root_ + "/sparse"};
  std::filesystem::create_directories(root_);
  { std::ofstream make(volumes_[0]); }
  if (truncate(volumes_[0].c_str(), static_cast<off_t>(capacity + (uint64_t{4} << 30))) != 0)
    GTEST_SKIP() << "the file system allows no such file";
  options_.capacity_bytes = capacity;
  options_.chunk_bytes = kMiB;
  options_.objects_max = 1 << 16;
  open();
  store_.reset();
  {
    auto volumes = local::VolumeSet::open(volumes_, runtime_->loop(), {}, {});
    ASSERT_OK(volumes);
    local::Journal journal(runtime_->loop(), *volumes);
    ASSERT_OK(journal.recover(volumes->limits()));
    local::Map map(volumes->limits());
    std::vector<local::Extent> freed;
    uint64_t block = volumes->limits().volumes[0].begin;
    for (int object = 0; object < 1024; ++object) {
      ByteWriter items;
      local::put_version(items, static_cast<Version>(object) + 1);
      local::put_object(items, "plane/" + std::to_string(object), kGiB, kMiB,
                        static_cast<Version>(object) + 1);
      std::vector<local::Chunk> chunks(1024);
      for (auto& chunk : chunks) {
        chunk = {local::make_place(0, block), static_cast<Version>(object) + 1, 0, kMiB, kMiB, 0};
        block += kMiB / 4096;
      }
      local::put_chunks(items, 0, chunks);
      const std::string bytes = items.take();
      ASSERT_OK(map.apply(std::as_bytes(std::span(bytes)), freed));
    }
    ASSERT_OK(journal.begin(map));
  }
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts from here
  const uint64_t before_kib = status_kib("VmRSS");
  const uint64_t start_ns = Clock::real().now_ns();
  options_.create = false;
  open();
  const double seconds = static_cast<double>(Clock::real().now_ns() - start_ns) / 1e9;
  const uint64_t peak_kib = status_kib("VmHWM") - before_kib;
  EXPECT_EQ(store_->info().committed, 1024U);
  EXPECT_EQ(store_->info().used_bytes, capacity);
  std::printf("1 TiB, 1 Mi chunks: opened in %.2f s, peak memory %.1f MiB, map %.1f MiB\n", seconds,
              static_cast<double>(peak_kib) / 1024,
              static_cast<double>(store_->info().map_bytes) / kMiB);
  EXPECT_LE(store_->info().map_bytes, 33 * kMiB);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LE(peak_kib, 64 * 1024U);
#endif
}

}  // namespace
}  // namespace stoker
