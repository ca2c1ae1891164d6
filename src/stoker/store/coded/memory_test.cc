// What reads, folds and commits need beside what they were given comes from the cap on memory, in
// pieces that fit it.
#include <atomic>
#include <chrono>
#include <thread>

#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

constexpr uint64_t kCap = 256 << 20;
constexpr uint32_t kChunk = 1 << 20;
constexpr size_t kRows = kChunk / 4096;
constexpr size_t kShards = 3;  // 2 + 1
constexpr uint64_t kBlocks = 4096;

class CodedMemory : public ::testing::Test {
 protected:
  static CodedWorldOptions options() {
    CodedWorldOptions options = quiet(2, 1);
    options.budget_bytes = kCap;
    return options;
  }
  CodedMemory() : world_(options()), store_(open()) { content_ = put(*store_, "a", 2 * kChunk, 1); }
  std::unique_ptr<CodedStore> open() { return std::move(*world_.open_small(false, kChunk)); }
  Budget& budget() { return world_.runtime().budget(); }
  // All but so much of the cap is taken by somebody else.
  Grant leave(uint64_t bytes) {
    return std::move(*budget().take(kCap - budget().used() - bytes, "a test"));
  }
  // Its first chunk alone.
  Status read(Bytes& into) {
    into.assign(kChunk, std::byte{0});
    return store_->read("a", 0, slice_of(into), {}).wait();
  }
  // Without the disk that holds the first chunk.
  void lose_the_data() {
    store_.reset();
    const auto images = images_of(world_);
    for (const std::string& path : world_.paths()) {
      store_.reset();
      put_back(world_, images);
      world_.disk().remove(path);
      store_ = open();
      Bytes into;
      ASSERT_OK(read(into));
      if (store_->health().decoded_blocks > 0) return;
    }
    FAIL() << "no disk holds it";
  }
  CodedWorld world_;
  std::unique_ptr<CodedStore> store_;
  Bytes content_;
};

TEST_F(CodedMemory, AReadThatDecodesKeepsToTheCapHoweverLittleIsLeft) {
  lose_the_data();
  const Bytes first(content_.begin(), content_.begin() + kChunk);
  for (const uint64_t rows : {64, 5, 1}) {
    const uint64_t decoded = store_->health().decoded_blocks;
    const Grant others = leave(kChunk + rows * kShards * kBlocks);
    Bytes into;
    ASSERT_OK(read(into)) << rows;
    EXPECT_EQ(into, first) << rows;
    EXPECT_EQ(store_->health().decoded_blocks - decoded, kRows);
  }
  const Grant others = leave(kChunk + kShards * kBlocks - 1);
  Bytes into;
  EXPECT_EQ(code_of(read(into)), Code::over_budget);
}

TEST_F(CodedMemory, AFoldTakesAsManyRowsAsFit) {
  for (uint64_t i = 0; i < 40; ++i) update(*store_, "a", content_, i * 3 * 4096, 4096, 10 + i);
  ASSERT_EQ(store_->health().newer_blocks, 40U);
  // all of its blocks, the newest, and the parity in its frame
  constexpr uint64_t kRow = (kShards + 1 + 1) * kBlocks;
  {
    const Grant others = leave(kRow - 1);
    EXPECT_EQ(code_of(store_->fold_all().wait()), Code::over_budget);
    EXPECT_EQ(store_->health().newer_blocks, 40U);
  }
  const uint64_t folds = store_->health().folds;
  {
    const Grant others = leave(7 * kRow);
    ASSERT_OK(store_->fold_all().wait());
  }
  EXPECT_EQ(store_->health().newer_blocks, 0U);
  EXPECT_EQ(store_->health().folds - folds, 6U) << "of 7 rows each, the last of 5";
  // Rows that stand together are cut, too.
  update(*store_, "a", content_, 0, 30 * 4096, 99);
  {
    const Grant others = leave(4 * kRow);
    ASSERT_OK(store_->fold_all().wait());
  }
  EXPECT_EQ(store_->health().newer_blocks, 0U);
  EXPECT_EQ(read_all(*store_, "a"), content_);
}

TEST_F(CodedMemory, ACommitWritesAStripeInPiecesThatFit) {
  const uint64_t used = budget().used();
  Bytes whole = pattern(2 * kChunk, 5);
  // All but one block: a stripe of which all is staged does not wait for its commit.
  std::copy(content_.end() - 4096, content_.end(), whole.end() - 4096);
  const auto write = [&] {
    auto change = std::move(*store_->begin());
    EXPECT_OK(change->write("a", 0, slice_of(whole).sub(0, whole.size() - 4096)).wait());
    return change;
  };
  {
    auto change = write();
    const Grant others = leave(0);
    EXPECT_EQ(code_of(change->commit(Durability::durable).wait()), Code::over_budget);
  }
  // what the log may take of a commit of one stripe
  constexpr uint64_t kFrames = kShards * (4096 + 3 * (1 + 30) + 13 + 4 * kShards);
  {
    auto change = write();
    const Grant others = leave(kFrames + kShards * kBlocks - 1);
    EXPECT_EQ(code_of(change->commit(Durability::durable).wait()), Code::over_budget)
        << "not even for a row of it";
  }
  EXPECT_TRUE(store_->info().read_only.empty()) << "nothing was written of it";
  EXPECT_EQ(read_all(*store_, "a"), content_);
  {
    auto change = write();
    const Grant others = leave(kFrames + kShards * kBlocks);
    EXPECT_OK(change->commit(Durability::durable).wait());
  }
  EXPECT_EQ(read_all(*store_, "a"), whole);
  EXPECT_EQ(budget().used(), used);
  lose_the_data();
  EXPECT_EQ(read_all(*store_, "a"), whole);
}

// However much there is to fold: others are refused who find nothing left of the cap.
TEST(CodedMemoryShare, AFoldLeavesMostOfTheCapToOthers) {
  CodedWorldOptions options = quiet(2, 1);
  options.budget_bytes = 4 << 20;
  CodedWorld world(options);
  auto store = std::move(*world.open_small());
  const uint64_t used = world.runtime().budget().used();
  constexpr size_t kWhole = 64 << 10;  // a chunk, of 16 rows
  std::map<std::string, Bytes> content;
  for (const char* key : {"a", "b", "c", "d"}) {
    content[key] = put(*store, key, 2 * kWhole, 1);
    update(*store, key, content[key], 0, kWhole, 2);
  }
  ASSERT_EQ(store->health().newer_blocks, 64U);
  ASSERT_OK(store->fold_all().wait());
  EXPECT_EQ(store->health().newer_blocks, 0U);
  EXPECT_LE(world.runtime().budget().peak() - used, options.budget_bytes / 8)
      << "64 rows of 20 KiB would be more";
  for (const auto& [key, bytes] : content) EXPECT_EQ(read_all(*store, key), bytes);
}

// Headers come and go while everybody is at work: readers, commits, folds, a scrub.
TEST(CodedMemoryShare, HeadersTakeAShareOfTheCapHoweverMuchIsRead) {
  constexpr uint64_t kStripes = 640;
  constexpr uint64_t kStripe = 2 * 64 * kKiB;
  CodedWorldOptions options = quiet(2, 1);
  options.budget_bytes = 4 << 20;
  CodedWorld world(options);
  StoreOptions made;
  made.create = true;
  made.capacity_bytes = kStripes * kStripe;
  made.chunk_bytes = 64 << 10;
  made.objects_max = 64;
  auto store = std::move(*world.open_coded(made));
  const Budget& budget = world.runtime().budget();
  const uint64_t share = options.budget_bytes / 16;
  ASSERT_GT(kStripes * headers_bytes(store->shape()), share);
  std::vector<Bytes> blocks;
  for (uint64_t i = 0; i < kStripes; ++i) blocks.push_back(pattern(4096, i));
  for (uint64_t first = 0; first < kStripes; first += 16) {
    auto change = std::move(*store->begin());
    if (first == 0) {
      ASSERT_OK(change->resize("a", kStripes * kStripe));
    }
    for (uint64_t i = first; i < first + 16; ++i)
      ASSERT_OK(change->write("a", i * kStripe, slice_of(blocks[i])).wait());
    ASSERT_OK(change->commit(Durability::durable).wait());
  }
  store = std::move(*world.open_coded(made));
  const uint64_t used = budget.used();
  const auto read = [&](uint64_t i) {
    Bytes into(4096);
    EXPECT_OK(store->read("a", i * kStripe, slice_of(into), {}).wait());
    return into == blocks[i];
  };
  ASSERT_TRUE(read(0));
  const uint64_t outside = store->info().map_bytes;  // also of the object's class, once it is read
  for (uint64_t i = 0; i < kStripes; ++i) {
    ASSERT_TRUE(read(i)) << i;
    ASSERT_LE(budget.used() - used, share);
  }
  EXPECT_GT(budget.used() - used, share / 2) << "they stay as long as there is room";
  EXPECT_EQ(store->info().map_bytes, outside);
  const auto report = std::make_shared<ScrubReport>();
  const auto scrubbed = store->scrub(report);
  std::atomic<uint64_t> wrong = 0;
  {
    std::vector<std::jthread> readers;
    for (uint64_t nth = 0; nth < 3; ++nth)
      readers.emplace_back([&, nth] {
        // the first half: the other one is rewritten
        for (uint64_t i = 0; i < 2 * kStripes; ++i)
          wrong += read((i * 7 + nth * 100) % (kStripes / 2)) ? 0 : 1;
      });
    for (uint64_t i = 0; i < 200; ++i) {
      const uint64_t at = kStripes / 2 + i * 13 % (kStripes / 2);
      blocks[at] = pattern(4096, 1000 + i);
      auto change = std::move(*store->begin());
      ASSERT_OK(change->write("a", at * kStripe, slice_of(blocks[at])).wait());
      ASSERT_OK(change->commit(Durability::durable).wait());
      if (i % 20 == 19) {
        ASSERT_OK(store->fold_all().wait());
      }
    }
  }
  EXPECT_EQ(wrong, 0U);
  ASSERT_OK(scrubbed.wait());
  EXPECT_EQ(report->found(), 0U);
  EXPECT_TRUE(report->lost.empty());
  for (uint64_t i = 0; i < kStripes; ++i) EXPECT_TRUE(read(i)) << i;
  EXPECT_LE(budget.used() - used, share);
}

// Header pages wait for the VALs of their batch, up to 2 MiB of them: those of the commit that
// brings more are written before it.
TEST(CodedMemoryShare, ABatchKeepsFewHeaderPages) {
  CodedWorld world(quiet(1, 2));
  StoreOptions made;
  made.create = true;
  made.capacity_bytes = 32 << 20;
  made.chunk_bytes = 64 << 10;
  made.objects_max = 64;
  auto store = std::move(*world.open_coded(made));
  constexpr size_t kStripes = 50;  // of 3 times 8 KiB of pages each
  Bytes content = pattern(kStripes * made.chunk_bytes, 1);
  std::vector<std::unique_ptr<Transaction>> commits;
  for (const std::string key : {"a", "b"}) {
    commits.push_back(std::move(*store->begin()));
    ASSERT_OK(commits.back()->resize(key, content.size()));
    ASSERT_OK(commits.back()->write(key, 0, slice_of(content)).wait());
  }
  auto before = std::move(*store->begin());
  ASSERT_OK(before->resize("c", 4096));
  world.disk().start_recording();
  std::vector<Future<Version>> done;
  // The first is a batch by itself, and under way; so the others are one together.
  world.disk().hold_all("d0");
  done.push_back(before->commit(Durability::durable));
  while (world.disk().held("d0") == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (const auto& commit : commits) done.push_back(commit->commit(Durability::durable));
  world.disk().let_go("d0");
  for (Future<Version>& each : done) ASSERT_OK(each.wait());
  std::vector<Version> order;  // of the commits whose pages come, by those of data chunks
  for (const SimEvent& event : world.disk().stop_recording()) {
    if (event.kind != SimEvent::Kind::write || event.bytes->size() != 2 * kBlock) continue;
    for (const size_t copy : {size_t{0}, kBlock}) {
      const std::byte* const page = event.bytes->data() + copy;
      uint16_t position = 0;
      Stamp version = 0;
      std::memcpy(&position, page + 24, sizeof position);
      std::memcpy(&version, page + 64, sizeof version);
      if (std::memcmp(page, "SKH1", 4) == 0 && position == 0) order.push_back(number_of(version));
    }
  }
  ASSERT_EQ(order.size(), 2 * kStripes);
  EXPECT_GT(order.front(), order.back()) << "those of the second commit were not kept";
  for (const std::string key : {"a", "b"}) EXPECT_EQ(read_all(*store, key), content);
}

}  // namespace
}  // namespace stoker::coded
