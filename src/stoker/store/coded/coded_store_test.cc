#include "stoker/store/coded/coded_store.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "stoker/store/local/fsck.h"
#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

struct Counts {
  size_t writes = 0, flushes = 0;
  std::set<std::string> disks;
};
Counts counted(const std::vector<SimEvent>& events) {
  Counts counts;
  for (const SimEvent& event : events) {
    counts.writes += event.kind == SimEvent::Kind::write ? 1 : 0;
    counts.flushes += event.kind == SimEvent::Kind::flush ? 1 : 0;
    counts.disks.insert(event.path);
  }
  return counts;
}

class Counted : public ::testing::TestWithParam<std::pair<size_t, size_t>> {};

TEST_P(Counted, AnUpdateReadsNothingAndAppendsOnceOnTheDataShardAndEachParity) {
  const auto [k, m] = GetParam();
  CodedWorld world(quiet(k, m));
  auto store = std::move(*world.open_small());
  Bytes content = put(*store, "a", k * 64 * kKiB, 1);
  update(*store, "a", content, 0, 4096, 9);  // begins the segments
  const uint64_t reads = world.runtime().loop().counters().reads.get();
  std::vector<SimEvent> appends;
  for (uint64_t i = 1; i <= 5; ++i) {
    world.disk().start_recording();
    update(*store, "a", content, i * 4096, 4096, i);
    const auto events = world.disk().stop_recording();
    const Counts counts = counted(events);
    EXPECT_EQ(counts.writes, 1 + m);
    EXPECT_EQ(counts.flushes, 1 + m);
    EXPECT_EQ(counts.disks.size(), 1 + m);
    for (const SimEvent& event : events) {
      if (event.kind != SimEvent::Kind::write) continue;
      EXPECT_EQ(event.bytes->size(), 8192U) << "a block, and one for the frame and the item";
      appends.push_back(event);
    }
  }
  EXPECT_EQ(world.runtime().loop().counters().reads.get(), reads);
  // sequential: each begins where another of its disk ends, or is the first
  for (const SimEvent& each : appends) {
    const bool first = std::none_of(appends.begin(), appends.end(), [&](const SimEvent& other) {
      return other.path == each.path && other.offset < each.offset;
    });
    const bool follows = std::any_of(appends.begin(), appends.end(), [&](const SimEvent& other) {
      return other.path == each.path && other.offset + other.bytes->size() == each.offset;
    });
    EXPECT_TRUE(first || follows);
  }
  EXPECT_EQ(read_all(*store, "a"), content);
}

// A stripe without m disks: each of the k chunks that are left is read once, and all of them at
// once, however many of its data chunks are to be decoded.
TEST_P(Counted, AReadWithoutMDisksReadsEachChunkThatIsLeftOnce) {
  const auto [k, m] = GetParam();
  CodedWorldOptions options = quiet(k, m);
  options.latency_ns = 1'000'000;
  CodedWorld world(options);
  auto store = std::move(*world.open_small());
  const Bytes content = put(*store, "a", k * 64 * kKiB, 1);
  store.reset();
  for (size_t i = 0; i < m; ++i) world.disk().remove(world.paths()[i]);
  store = std::move(*world.open_small());
  const IoCounters& counters = world.runtime().loop().counters();
  uint64_t before = counters.read_bytes.get();
  EXPECT_EQ(read_all(*store, "a"), content) << "and its headers are known from now on";
  EXPECT_EQ(counters.read_bytes.get() - before, content.size() + k * header_bytes(store->shape()));
  before = counters.read_bytes.get();
  const uint64_t waits = world.waits();
  EXPECT_EQ(read_all(*store, "a"), content);
  EXPECT_EQ(counters.read_bytes.get() - before, content.size());
  EXPECT_EQ(world.waits() - waits, 1U);
}

// What a first read in a stripe wants is on its way together with the headers of the stripe, and
// counts where it is what they say.
TEST_P(Counted, AFirstReadInAStripeWaitsOnceForHeadersAndBlocks) {
  const auto [k, m] = GetParam();
  CodedWorld world(quiet(k, m));
  auto store = std::move(*world.open_small());
  const Bytes content = put(*store, "a", k * 64 * kKiB, 1);
  store.reset();
  store = std::move(*world.open_small());
  const IoCounters& counters = world.runtime().loop().counters();
  const uint64_t before = counters.read_bytes.get();
  for (const std::string& path : world.paths()) world.disk().hold_reads(path);
  const auto held = [&] {
    size_t reads = 0;
    for (const std::string& path : world.paths()) reads += world.disk().held(path);
    return reads;
  };
  Bytes chunk(64 * kKiB);
  const auto read = store->read("a", chunk.size(), slice_of(chunk), {});
  const auto begun = std::chrono::steady_clock::now();
  while (held() < m + 1 && std::chrono::steady_clock::now() - begun < std::chrono::minutes(1))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(held(), m + 1) << "of the headers, the parities' alone";
  for (const std::string& path : world.paths()) world.disk().let_go(path);
  EXPECT_OK(read.wait());
  EXPECT_TRUE(std::equal(chunk.begin(), chunk.end(), content.begin() + 64 * kKiB));
  const uint64_t headers = m * header_bytes(store->shape());
  EXPECT_EQ(counters.read_bytes.get() - before, headers + chunk.size());
}

// A block that is not what its header says is decoded there, too; and so are those of a disk that
// fails.
TEST(CodedStore, AFirstReadInAStripeBelievesNoBlockThatIsWrong) {
  for (const bool fails : {false, true}) {
    uint64_t decoded = 0;
    for (size_t disk = 0; disk < 6; ++disk) {
      CodedWorld world(quiet(4, 2));
      auto store = std::move(*world.open_small());
      const Bytes content = put(*store, "a", 300'000, 1);
      const Shape shape = store->shape();
      store.reset();
      for (size_t slot = 0; slot < shape.slots; ++slot) {
        const uint64_t at = shape.block_at(slot, 3);
        if (fails) {
          world.disk().spoil(world.paths()[disk], at);
        } else {
          world.disk().flip(world.paths()[disk], at + 5, 1);
        }
      }
      store = std::move(*world.open_small());
      EXPECT_EQ(read_all(*store, "a"), content) << fails;
      decoded += store->health().decoded_blocks;
    }
    // that block of each of the five chunks; of a disk that fails, also what is read with it
    if (fails) {
      EXPECT_GE(decoded, 5U);
    } else {
      EXPECT_EQ(decoded, 5U);
    }
  }
}

// One block: staged on m, decided on 1 + m, blocks on 1 + m, pages on 1 + m. By delta it reads the
// old and the new block and the parities; where that is more than the rest of the row, the rest of
// the row.
TEST_P(Counted, AFoldOfOneBlock) {
  const auto [k, m] = GetParam();
  CodedWorld world(quiet(k, m));
  auto store = std::move(*world.open_small());
  Bytes content = put(*store, "a", k * 64 * kKiB, 1);
  ASSERT_OK(store->fold_all().wait());
  update(*store, "a", content, 8192, 4096, 9);
  EXPECT_EQ(store->health().newer_blocks, 1U);
  const uint64_t reads = world.runtime().loop().counters().reads.get();
  world.disk().start_recording();
  ASSERT_OK(store->fold_all().wait());
  const Counts counts = counted(world.disk().stop_recording());
  const size_t n = k + m;
  EXPECT_EQ(counts.writes, m + 3 * (1 + m) + n) << "and the image of the table on all";
  EXPECT_EQ(counts.flushes, m + 3 * (1 + m) + n);
  EXPECT_EQ(world.runtime().loop().counters().reads.get() - reads, 1 + std::min(1 + m, k - 1));
  EXPECT_EQ(store->health().newer_blocks, 0U);
  EXPECT_EQ(read_all(*store, "a"), content);
}

// All data blocks of a row are new: nothing but the log is read.
TEST_P(Counted, AFoldOfAWholeRowReadsNoBase) {
  const auto [k, m] = GetParam();
  CodedWorld world(quiet(k, m));
  auto store = std::move(*world.open_small());
  Bytes content = put(*store, "a", k * 64 * kKiB, 1);
  for (size_t c = 0; c < k; ++c) update(*store, "a", content, c * 64 * kKiB + 4096, 4096, 20 + c);
  const uint64_t reads = world.runtime().loop().counters().reads.get();
  ASSERT_OK(store->fold_all().wait());
  EXPECT_EQ(world.runtime().loop().counters().reads.get() - reads, k);
  EXPECT_EQ(read_all(*store, "a"), content);
}

INSTANTIATE_TEST_SUITE_P(Codes, Counted,
                         ::testing::Values(std::pair<size_t, size_t>{4, 2},
                                           std::pair<size_t, size_t>{6, 3},
                                           std::pair<size_t, size_t>{10, 4}),
                         [](const auto& test) {
                           return std::to_string(test.param.first) + "_" +
                                  std::to_string(test.param.second);
                         });

// Every set of up to m of the shards: what is on the others suffices, base and log.
TEST(CodedStore, ReadsWithoutAnySetOfUpToMShards) {
  CodedWorld world(quiet(4, 2));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 500'000, 1);
    update(*store, "a", content, 70'000, 30'000, 2);
    ASSERT_OK(store->fold_all().wait());
    update(*store, "a", content, 4096, 4096, 3);
    update(*store, "a", content, 200'000, 5'000, 4);
  }
  std::map<std::string, SimImage> images;
  for (const auto& path : world.paths()) images[path] = world.disk().image(path);
  for (unsigned lost = 1; lost < 64; lost += kLess == 1 ? 1 : 5) {
    if (std::popcount(lost) > 2) continue;
    for (const bool read_only : {true, false}) {
      for (const auto& [path, image] : images) world.disk().put(path, image);
      for (size_t i = 0; i < 6; ++i) {
        if ((lost >> i & 1) != 0) world.disk().remove(world.paths()[i]);
      }
      auto store = world.open_small(read_only);
      ASSERT_OK(store) << lost;
      ASSERT_EQ(read_all(**store, "a"), content) << "without the shards " << lost;
      EXPECT_EQ((*store)->info().read_only.empty(), !read_only);
    }
  }
}

TEST(CodedStore, WithMoreThanMLostWhatCanBeVerifiedIsServedAndTheRestNamed) {
  CodedWorld world(quiet(4, 2));
  Bytes small, large;
  size_t home = 0;  // the shard that alone has the data of "small"
  {
    auto store = std::move(*world.open_small());
    world.disk().start_recording();
    small = put(*store, "small", 4096, 1);
    for (const SimEvent& event : world.disk().stop_recording()) {
      if (event.kind == SimEvent::Kind::write && event.bytes->size() == 4096 &&
          std::memcmp(event.bytes->data(), small.data(), 4096) == 0)
        home = static_cast<size_t>(event.path[1] - '0');
    }
    large = put(*store, "large", 256 * kKiB, 2);
  }
  size_t left = 3;
  for (size_t i = 0; i < 6 && left > 0; ++i) {
    if (i == home) continue;
    world.disk().remove(world.paths()[i]);
    --left;
  }
  auto store = world.open_small();
  ASSERT_OK(store);
  EXPECT_NE((*store)->info().read_only.find("3 of the 6 shards are missing"), std::string::npos)
      << (*store)->info().read_only;
  EXPECT_EQ(read_all(**store, "small"), small);
  Bytes into(large.size());
  const auto read = (*store)->read("large", 0, slice_of(into), {}).wait();
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, Code::corruption);
  EXPECT_NE(read.error().what.find("'large'"), std::string::npos) << read.error().what;
  EXPECT_EQ(code_of((*store)->begin()), Code::read_only);
  EXPECT_EQ((*store)->affected(), std::vector<std::string>{"large"});
  store->reset();
  CodedOptions coded;
  coded.files = false;
  const auto repaired =
      repair_coded_store({4, 2, world.paths()}, world.runtime().runtime(), {}, coded);
  ASSERT_OK(repaired);
  EXPECT_TRUE(std::any_of(
      repaired->problems.begin(), repaired->problems.end(),
      [](const std::string& each) { return each.find("'large'") != std::string::npos; }));
  EXPECT_FALSE(repaired->advice.empty());
  world.disk().remove(world.paths()[home]);
  EXPECT_EQ(code_of(world.open_small()), Code::not_found)
      << "two of six cannot tell what was written last";
}

// A disk that comes back from before, or from a copy, is recognised, not believed, and brought up
// to date.
TEST(CodedStore, AnOldCopyOfAShardIsStaleAndResynced) {
  CodedWorld world(quiet(4, 2));
  Bytes content;
  std::map<std::string, SimImage> old;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 300'000, 1);
  }
  for (const auto& path : world.paths()) old[path] = world.disk().image(path);
  {
    auto store = std::move(*world.open_small());
    for (size_t i = 0; i < 4; ++i) update(*store, "a", content, i * 64 * kKiB, 4096, 5 + i);
    ASSERT_OK(store->fold_all().wait());
  }
  for (size_t i = 0; i < 2; ++i) world.disk().put(world.paths()[i], old[world.paths()[i]]);
  {
    auto store = std::move(*world.open_small());
    EXPECT_EQ(store->health().troubles.size(), 2U);
    EXPECT_EQ(read_all(*store, "a"), content);
    ASSERT_OK(store->repair().wait());
    EXPECT_TRUE(store->health().troubles.empty());
  }
  for (size_t i = 4; i < 6; ++i) world.disk().remove(world.paths()[i]);
  auto store = std::move(*world.open_small());
  EXPECT_EQ(read_all(*store, "a"), content) << "from the two that came back and two others";
}

TEST(CodedStore, WritesGoOnWhenAShardFailsUnderThem) {
  for (uint64_t nth = 1; nth <= 40; nth += 3 * kLess) {
    for (const auto kind : {Op::Kind::write, Op::Kind::sync}) {
      CodedWorld world(quiet(4, 2));
      auto store = std::move(*world.open_small());
      Bytes content = put(*store, "a", 300'000, 1);
      world.disk().fail_nth(kind, nth, EIO);
      for (uint64_t i = 0; i < 6; ++i) {
        update(*store, "a", content, i * 20'000, 9'000, 30 + i);
        if (i != 2) continue;
        ASSERT_OK(store->fold_all().wait());
      }
      const Bytes other = put(*store, "b", 400'000, 2);
      ASSERT_TRUE(store->info().read_only.empty());
      EXPECT_EQ(read_all(*store, "a"), content);
      EXPECT_EQ(read_all(*store, "b"), other);
      ASSERT_OK(store->repair().wait());
      ASSERT_TRUE(store->health().troubles.empty()) << nth;
      store.reset();
      for (const size_t shard : {nth % 6, (nth + 3) % 6}) world.disk().remove(world.paths()[shard]);
      store = std::move(*world.open_small());
      ASSERT_EQ(read_all(*store, "a"), content) << nth;
      ASSERT_EQ(read_all(*store, "b"), other) << nth;
    }
  }
}

// A disk that is full, though the space was reserved (a thin volume, say), is a shard that failed.
TEST(CodedStore, ADiskThatIsFullIsLeftOutLikeOneThatFailed) {
  for (uint64_t nth = 1; nth <= 20; nth += 4) {
    CodedWorld world(quiet(4, 2));
    auto store = std::move(*world.open_small());
    Bytes content = put(*store, "a", 300'000, 1);
    world.disk().fail_nth(Op::Kind::write, nth, ENOSPC);
    for (uint64_t i = 0; i < 6; ++i) update(*store, "a", content, i * 20'000, 9'000, 30 + i);
    ASSERT_OK(store->fold_all().wait());
    EXPECT_TRUE(store->info().read_only.empty());
    EXPECT_EQ(store->health().troubles.size(), 1U) << nth;
    EXPECT_EQ(read_all(*store, "a"), content);
    ASSERT_OK(store->repair().wait());
    EXPECT_TRUE(store->health().troubles.empty()) << nth;
  }
}

TEST(CodedStore, ABlockThatCannotBeReadIsDecoded) {
  CodedWorld world(quiet(4, 2));
  auto store = std::move(*world.open_small());
  Bytes content = put(*store, "a", 300'000, 1);
  update(*store, "a", content, 8192, 8192, 2);
  for (uint64_t nth = 1; nth <= 8; ++nth) {
    // it is read once more before it is decoded
    for (uint64_t again = nth + 1; again <= 16; ++again) {
      world.disk().fail_nth(Op::Kind::read, nth, EIO);
      world.disk().fail_nth(Op::Kind::read, again, EIO);
      EXPECT_EQ(read_all(*store, "a"), content) << nth << " " << again;
      world.disk().restore_power();  // and forgets a fault that has not come
    }
  }
  EXPECT_GT(store->health().decoded_blocks, 0U);
  EXPECT_TRUE(store->health().troubles.empty())
      << "a read that fails is an erasure, not a failure of the shard";
}

// Nobody folds here but the commits themselves, when there is no room left: they wait for it and do
// not fail.
TEST(CodedStore, AFullLogHoldsCommitsUpAndFailsNone) {
  CodedWorldOptions options = quiet(4, 2);
  options.segment_bytes = 256 << 10;
  options.segments = 4;
  CodedWorld world(options);
  auto store = std::move(*world.open_small());
  Bytes content = put(*store, "a", 600'000, 1);
  for (uint64_t i = 0; i < 250; ++i)
    update(*store, "a", content, i * 31 % 140 * 4096, 4096, 100 + i);
  EXPECT_GT(store->health().folds, 0U);
  EXPECT_TRUE(store->info().read_only.empty());
  EXPECT_EQ(read_all(*store, "a"), content);
}

// Blocks all over the store: each fold frees next to nothing of the oldest segment, and what folds
// need must stay theirs through all of them.
TEST(CodedStore, UpdatesAllOverTheStoreNeverTakeTheRoomOfTheFolds) {
  for (const uint32_t segments : {4U, 8U}) {
    CodedWorldOptions options = quiet(4, 2);
    options.segment_bytes = 128 << 10;
    options.segments = segments;
    CodedWorld world(options);
    auto store = std::move(*world.open_small());
    Bytes content = put(*store, "a", 2'621'440, 1);
    std::mt19937_64 random(segments);
    for (uint64_t i = 0; i < 1500; ++i) {
      ASSERT_NO_FATAL_FAILURE(update(*store, "a", content, random() % 640 * 4096, 4096, 100 + i))
          << "update " << i << " of " << segments << " segments";
    }
    EXPECT_GT(store->health().folds, 100U);
    EXPECT_EQ(read_all(*store, "a"), content);
  }
}

TEST(CodedStore, AStoreThatDoesNotFitOneOfItsDisksIsNotMade) {
  CodedWorld world(quiet(4, 2));
  world.disk().limit("d3", 1 << 20);
  const auto store = world.open_small();
  ASSERT_FALSE(store);
  EXPECT_EQ(store.error().code, Code::out_of_space);
  EXPECT_NE(store.error().what.find("d3"), std::string::npos) << store.error().what;
}

// Rows that were never written are known to be zeros by every header; so they must be by that of a
// shard that was resynced, also when a fold has written the page anew since. (Found by the
// simulation: they could not be read any more once other shards were lost.)
TEST(CodedStore, ZerosThatWereNeverWrittenSurviveAResyncAndAFold) {
  for (size_t away = 0; away < 3; ++away) {
    CodedWorld world(quiet(2, 1));
    Bytes content(100'000);
    {
      auto store = std::move(*world.open_small());
      auto change = std::move(*store->begin());
      ASSERT_OK(change->resize("a", content.size()));
      ASSERT_OK(change->commit(Durability::durable).wait());
      update(*store, "a", content, 4096, 4096, 1);
    }
    const SimImage kept = world.disk().image(world.paths()[away]);
    world.disk().remove(world.paths()[away]);
    update(**world.open_small(), "a", content, 20'000, 100, 2);
    world.disk().put(world.paths()[away], kept);
    {
      auto store = std::move(*world.open_small());
      ASSERT_OK(store->repair().wait());
      update(*store, "a", content, 70'000, 100, 3);
      ASSERT_OK(store->fold_all().wait());
      EXPECT_EQ(read_all(*store, "a"), content);
    }
    for (size_t lost = 0; lost < 3; ++lost) {
      const SimImage image = world.disk().image(world.paths()[lost]);
      world.disk().remove(world.paths()[lost]);
      EXPECT_EQ(read_all(**world.open_small(true), "a"), content)
          << away << " came back, " << lost << " is lost";
      world.disk().put(world.paths()[lost], image);
    }
  }
}

// For the sanitizer of threads: whoever asks how the store is, or reads, does so beside shards that
// fail and come back.
TEST(CodedStore, MayBeAskedAndReadWhileShardsFailAndComeBack) {
  CodedWorldOptions options;
  options.k = 4;
  options.m = 2;
  CodedWorld world(options);
  auto store = std::move(*world.open_small());
  Bytes content = put(*store, "a", 300'000, 1);
  const Bytes still = put(*store, "b", 100'000, 2);
  std::atomic<bool> done = false;
  std::atomic<uint64_t> troubles = 0;
  std::thread asking([&] {
    while (!done) {
      troubles += store->health().troubles.size();
      EXPECT_EQ(read_all(*store, "b"), still);
    }
  });
  for (uint64_t i = 0; i < 8; ++i) {
    world.disk().fail_nth(i % 2 == 0 ? Op::Kind::write : Op::Kind::sync, 1 + i % 3, EIO,
                          world.paths()[i % 6]);
    update(*store, "a", content, i * 30'000, 9'000, 10 + i);
    if (i % 3 == 0) {
      EXPECT_OK(store->fold_all().wait());
    }
    // a fault that has not come does not come any more: there are never two shards that fail
    world.disk().restore_power();
    EXPECT_OK(store->repair().wait());
  }
  done = true;
  asking.join();
  EXPECT_EQ(read_all(*store, "a"), content);
}

// Wherever one bit flips on one shard: what is read is right, what was found is mended, and fsck is
// clean after a repair.
TEST(CodedStore, AFlippedBitAnywhereIsOverruledAndMended) {
  CodedWorld world(quiet(4, 2));
  Bytes content;
  {
    auto store = std::move(*world.open_small());
    content = put(*store, "a", 300'000, 1);
    update(*store, "a", content, 8192, 8192, 2);
    ASSERT_OK(store->fold_all().wait());
    update(*store, "a", content, 12'288, 8192, 3);
    update(*store, "a", content, 100'000, 50'000, 4);
  }
  std::map<std::string, SimImage> images;
  for (const auto& path : world.paths()) images[path] = world.disk().image(path);
  std::mt19937_64 random(11);
  uint64_t decoded = 0;
  uint64_t mended = 0;
  for (uint64_t i = 0; i < 80 / kLess; ++i) {
    const std::string& path = world.paths()[random() % 6];
    for (const auto& [each, image] : images) world.disk().put(each, image);
    // Most of the file is empty: look for a block that is not.
    Bytes block(4096);
    uint64_t at = 0;
    do {
      at = align_down(random() % images[path].bytes(), 4096);
      images[path].read(at, block);
    } while (std::all_of(block.begin(), block.end(),
                         [](std::byte byte) { return byte == std::byte{0}; }));
    world.disk().flip(path, at + random() % 4096, static_cast<unsigned>(random() % 8));
    auto store = world.open_small();
    ASSERT_OK(store) << path << " at " << at;
    ASSERT_EQ(read_all(**store, "a"), content) << path << " at " << at;
    ASSERT_OK((*store)->repair().wait());
    decoded += (*store)->health().decoded_blocks;
    mended += (*store)->health().mended_blocks;
    ASSERT_OK((*store)->fold_all().wait());
    ASSERT_EQ(read_all(**store, "a"), content) << path << " at " << at;
  }
  EXPECT_GT(decoded, 5 / kLess);
  EXPECT_GT(mended, 5 / kLess);
}

class CodedFiles : public ::testing::Test {
 protected:
  CodedFiles() : root_(testing::TempDir() + "coded_files." + std::to_string(getpid())) {
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
    options_.create = true;
    options_.capacity_bytes = 2 << 20;
    options_.chunk_bytes = 64 << 10;
    options_.objects_max = 64;
    options_.same_disk = true;
    small_.segment_bytes = 1 << 20;
    small_.segments = 6;
  }
  ~CodedFiles() override { std::filesystem::remove_all(root_); }
  std::string composition(const std::string& code, const std::string& disks) const {
    return "coded(" + code + ", " + root_ + disks + ")";
  }
  Result<std::unique_ptr<Store>> open(const std::string& code, const std::string& disks) {
    auto plan = coded_plan(composition(code, disks));
    if (!plan) return plan.error();
    return open_coded_store(plan->value_or(CodedPlan()), runtime_->runtime(), options_, small_);
  }
  std::string error_of(const std::string& code, const std::string& disks, Code expected) {
    const auto opened = open(code, disks);
    EXPECT_FALSE(opened) << code << " " << disks;
    if (opened) return {};
    EXPECT_EQ(opened.error().code, expected) << opened.error().message();
    return opened.error().what;
  }
  const std::string root_;
  StoreOptions options_;
  CodedOptions small_;
  std::unique_ptr<RuntimeOwner> runtime_ =
      std::move(*RuntimeOwner::make({.engine = "posix", .cpu_threads = 1}));
};

bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(CodedFiles, BadPlansAreRefusedInASentence) {
  EXPECT_TRUE(says(error_of("0+3", "/d{0..8}", Code::invalid_argument),
                   "at least one data chunk, at least one parity chunk"));
  EXPECT_TRUE(says(error_of("6+0", "/d{0..8}", Code::invalid_argument),
                   "at least one data chunk, at least one parity chunk"));
  EXPECT_TRUE(says(error_of("30+3", "/d{0..40}", Code::invalid_argument), "at most 32 chunks"));
  EXPECT_TRUE(says(error_of("6+3", "/d{0..7}", Code::invalid_argument),
                   "needs at least 9 disks, but 8 are given"));
  options_.same_disk = false;
  EXPECT_TRUE(says(error_of("2+1", "/d{0..2}", Code::invalid_argument), "are on the same disk"));
  EXPECT_FALSE(std::filesystem::exists(root_ + "/d0/stoker.shard"))
      << "what was made for nothing is gone";
  for (const char* wrong : {"coded(", "coded()", "coded(6+3)", "coded(6, /a)", "coded(a+b, /a,/b)",
                            "coded(2+1, /a,/a,/b)", "coded(2+1, /d{0..})", "coded(2+1, /d{2..0})",
                            "coded(2+1, /a,,/b)", "coded(2+1, /a"}) {
    EXPECT_EQ(code_of(open_store(wrong, runtime_->runtime(), options_)), Code::invalid_argument)
        << wrong;
  }
}

TEST_F(CodedFiles, TheRatesStandBehindTheCode) {
  using Rates = std::array<std::optional<uint64_t>, 3>;  // of scrub, repair, folds
  const auto rates = [&](const std::string& code) -> Rates {
    const auto plan = coded_plan(composition(code, "/d{0..2}"));
    EXPECT_OK(plan);
    return plan && *plan
               ? Rates{{(*plan)->scrub_rate, (*plan)->busy_repair_rate, (*plan)->busy_fold_rate}}
               : Rates();
  };
  EXPECT_EQ(rates("2+1"), Rates());
  EXPECT_EQ(rates("2+1 scrub=0"), (Rates{{0, {}, {}}}));
  EXPECT_EQ(rates(" 2 + 1  scrub=4MiB "), (Rates{{4U << 20, {}, {}}}));
  EXPECT_EQ(rates("2+1 repair=16MiB"), (Rates{{{}, 16U << 20, {}}}));
  EXPECT_EQ(rates("2+1  fold=1MiB  scrub=0 repair=0"), (Rates{{0, 0, 1U << 20}}));
  for (const char* wrong : {"2+1 scrub", "2+1 scrub=fast", "2+1 rate=1", "2+1 scrub=1 scrub=2",
                            "2+1 repair", "2+1 repair=-1", "2+1 fold=1 x"}) {
    const auto plan = coded_plan(composition(wrong, "/d{0..2}"));
    ASSERT_FALSE(plan) << wrong;
    EXPECT_TRUE(says(plan.error().what, "repair=64MiB")) << plan.error().what;
  }
  const auto store = open("2+1 scrub=1MiB repair=2MiB fold=3MiB", "/d{0..2}");
  ASSERT_OK(store);
  EXPECT_TRUE(
      says((*store)->info().composition, "coded(2+1 scrub=1048576 repair=2097152 fold=3145728, "))
      << (*store)->info().composition;
  EXPECT_OK(coded_plan((*store)->info().composition));
}

TEST_F(CodedFiles, AReplacedShardIsMadeWhereThatIsAskedForAndOnADiskOfItsOwn) {
  Bytes content;
  {
    auto store = std::move(*open("2+1", "/d{0..2}"));
    content = put(*store, "a", 100'000, 1);
  }
  std::filesystem::remove_all(root_ + "/d0");
  options_.create = false;
  options_.same_disk = false;
  options_.replace = {root_ + "/d0"};
  EXPECT_TRUE(says(error_of("2+1", "/d{0..2}", Code::invalid_argument), "are on the same disk"));
  EXPECT_FALSE(std::filesystem::exists(root_ + "/d0/stoker.shard"))
      << "what was made for nothing is gone";
  // Something else stands there: it is not touched.
  std::filesystem::create_directories(root_ + "/d0");
  std::ofstream(root_ + "/d0/stoker.shard", std::ios::binary) << "my only copy of something";
  options_.same_disk = true;
  EXPECT_TRUE(says(error_of("2+1", "/d{0..2}", Code::mismatch),
                   "holds 25 bytes that are not a shard of a coded store"));
  std::filesystem::resize_file(root_ + "/d0/stoker.shard", 0);
  std::filesystem::resize_file(root_ + "/d0/stoker.shard", 25);
  EXPECT_TRUE(
      says(error_of("2+1", "/d{0..2}", Code::out_of_space), "delete the file, or ask for less"));
  std::filesystem::remove_all(root_ + "/d0");
  {
    RepairOptions repair;
    repair.replace = options_.replace;
    repair.same_disk = true;
    std::vector<std::string> told;
    repair.plan = [&](const std::string& sentence) { told.push_back(sentence); };
    const auto report = repair_coded_store(**coded_plan(composition("2+1", "/d{0..2}")),
                                           runtime_->runtime(), repair);
    ASSERT_OK(report);
    EXPECT_TRUE(report->problems.empty()) << report->problems[0];
    ASSERT_EQ(told.size(), 1U);
    EXPECT_TRUE(says(told[0], "is rebuilt from the others")) << told[0];
  }
  options_.replace.clear();
  std::filesystem::remove_all(root_ + "/d1");
  EXPECT_EQ(read_all(**open("2+1", "/d{0..2}"), "a"), content);
  // Two of three lost: told, with the objects that it concerns, and nothing is made.
  std::filesystem::remove_all(root_ + "/d2");
  const auto report =
      repair_coded_store(**coded_plan(composition("2+1", "/d{0..2}")), runtime_->runtime(), {});
  EXPECT_FALSE(report) << "one of three cannot tell what was written last";
}

TEST_F(CodedFiles, SwappedForeignAndDoubledShardsAreRecognised) {
  Bytes content;
  {
    auto store = std::move(*open("2+1", "/d{0..2}"));
    content = put(*store, "a", 100'000, 1);
    EXPECT_EQ(code_of(open("2+1", "/d{0..2}")), Code::busy);
  }
  {
    auto store = open("2+1", "/d2," + root_ + "/d0," + root_ + "/d1");
    ASSERT_OK(store);
    EXPECT_EQ(read_all(**store, "a"), content) << "in any order";
  }
  std::filesystem::rename(root_ + "/d0", root_ + "/x");
  std::filesystem::rename(root_ + "/d1", root_ + "/d0");
  std::filesystem::rename(root_ + "/x", root_ + "/d1");
  EXPECT_EQ(read_all(**open("2+1", "/d{0..2}"), "a"), content) << "swapped";
  EXPECT_TRUE(says(error_of("3+1", "/d{0..3}", Code::mismatch), "coded 2+1 over 3 disks"));
  { EXPECT_OK(open("2+1", "/e{0..2}")); }
  EXPECT_TRUE(says(error_of("2+1", "/d0," + root_ + "/d1," + root_ + "/e2", Code::mismatch),
                   "shards of different stores"));
  std::filesystem::copy(root_ + "/d0", root_ + "/copy");
  EXPECT_TRUE(says(error_of("2+1", "/d0," + root_ + "/copy," + root_ + "/d2", Code::mismatch),
                   "is a copy of"));
  std::ofstream(root_ + "/foreign", std::ios::binary) << std::string(256 * kKiB, 'x');
  EXPECT_EQ(read_all(**open("2+1", "/d0," + root_ + "/d1," + root_ + "/foreign"), "a"), content)
      << "the others suffice";
  EXPECT_TRUE(
      says(error_of("2+1", "/new0," + root_ + "/new1," + root_ + "/foreign", Code::mismatch),
           "holds something that is not a shard"));
  EXPECT_TRUE(says(error_of("2+1", "/d0," + root_ + "/new1," + root_ + "/foreign", Code::not_found),
                   "holds something that is not a shard"));
  options_.create = false;
  EXPECT_TRUE(
      says(error_of("2+1", "/new0," + root_ + "/new1," + root_ + "/foreign", Code::mismatch),
           "holds something that is not a shard"));
  std::ostringstream foreign;
  foreign << std::ifstream(root_ + "/foreign", std::ios::binary).rdbuf();
  EXPECT_EQ(foreign.str(), std::string(256 * kKiB, 'x')) << "and what it holds is somebody's";
  EXPECT_EQ(code_of(open("2+1", "/none{0..2}")), Code::not_found);
}

TEST_F(CodedFiles, AnyMFoldersMayBeDeletedTheFirstOneToo) {
  Bytes content;
  {
    auto store = std::move(*open("6+3", "/d{0..8}"));
    content = put(*store, "a/b", 700'000, 1);
    update(*store, "a/b", content, 5'000, 20'000, 2);
  }
  for (const char* folder : {"/d0", "/d4", "/d8"}) std::filesystem::remove_all(root_ + folder);
  auto store = open("6+3", "/d{0..8}");
  ASSERT_OK(store);
  EXPECT_EQ(read_all(**store, "a/b"), content);
  update(**store, "a/b", content, 100'000, 20'000, 3);
  EXPECT_EQ(read_all(**store, "a/b"), content);
  EXPECT_FALSE(std::filesystem::exists(root_ + "/d0/stoker.shard"))
      << "a disk that is not there may only not be mounted: nothing is made in its place";
}

}  // namespace
}  // namespace stoker::coded
