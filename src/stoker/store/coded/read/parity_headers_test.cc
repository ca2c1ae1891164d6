// Reading by the header pages of the parities alone, and where these do not do.
#include <algorithm>
#include <cstring>
#include <utility>

#include "stoker/store/coded/coded_store.h"
#include "stoker/store/coded/format/headers.h"
#include "stoker/testing/coded_lab.h"

namespace stoker::coded {
namespace {

CodedWorldOptions small_logs(size_t k, size_t m) {
  CodedWorldOptions options = quiet(k, m);
  options.segment_bytes = 256 << 10;
  options.segments = 4;
  return options;
}

void write_logs_anew(CodedStore& store) {
  Bytes other = put(store, "other", 120'000, 2);
  write_logs_anew(store, "other", other);
}

class ParityHeaders : public ::testing::TestWithParam<std::pair<size_t, size_t>> {
 protected:
  const size_t k_ = GetParam().first, m_ = GetParam().second;
  const size_t stripe_ = k_ * 64 * kKiB;
  // How many bytes of header pages it takes to read all of "a", beside so many bytes of blocks.
  uint64_t read(CodedWorld& world, CodedStore& store, const Bytes& content, uint64_t blocks) {
    const IoCounters& counters = world.runtime().loop().counters();
    const uint64_t before = counters.read_bytes.get();
    EXPECT_EQ(read_all(store, "a"), content);
    return counters.read_bytes.get() - before - blocks;
  }
};

// An object of as many bytes, of which only these were ever written.
void make_sparse(CodedStore& store, Bytes& content, size_t offset, size_t bytes) {
  Bytes written = pattern(bytes, 3);
  const auto change = std::move(*store.begin());
  ASSERT_OK(change->resize("a", content.size()));
  ASSERT_OK(change->write("a", offset, slice_of(written)).wait());
  ASSERT_OK(change->commit(Durability::durable).wait());
  std::copy(written.begin(), written.end(), content.begin() + static_cast<ptrdiff_t>(offset));
}

TEST_P(ParityHeaders, AFoldReadsAllThatReadingDidNot) {
  CodedWorld world(small_logs(k_, m_));
  auto store = std::move(*world.open_small());
  Bytes content = put(*store, "a", stripe_, 1);
  const uint64_t each = header_bytes(store->shape());
  ASSERT_NO_FATAL_FAILURE(write_logs_anew(*store));
  store.reset();
  store = std::move(*world.open_small());
  EXPECT_EQ(read(world, *store, content, stripe_), m_ * each);
  EXPECT_EQ(read(world, *store, content, stripe_), 0U) << "they stay in memory";
  const IoCounters& counters = world.runtime().loop().counters();
  for (uint64_t round = 0; round < 3; ++round) {
    update(*store, "a", content, 8192, 4096, 20 + round);
    EXPECT_EQ(read(world, *store, content, stripe_), 0U) << "the log says what is newer";
    const uint64_t before = counters.read_bytes.get();
    ASSERT_OK(store->fold_all().wait());
    const uint64_t blocks = (1 + std::min(1 + m_, k_ - 1)) * kBlock;
    EXPECT_EQ(counters.read_bytes.get() - before, blocks + (round == 0 ? (k_ + m_) * each : 0));
    EXPECT_EQ(read(world, *store, content, stripe_), 0U) << "and these stay";
  }
  store.reset();
  store = std::move(*world.open_small());
  EXPECT_EQ(read_all(*store, "a"), content);
  store.reset();
  const auto report = fsck(world, k_, m_);
  ASSERT_OK(report);
  EXPECT_TRUE(report->problems.empty()) << report->problems.front();
}

// There is no checksum that would tell zeros from what a parity does not know of.
TEST_P(ParityHeaders, ZerosAreBelievedOfAllHeadersOnly) {
  CodedWorld world(small_logs(k_, m_));
  auto store = std::move(*world.open_small());
  Bytes content(2 * stripe_);
  ASSERT_NO_FATAL_FAILURE(make_sparse(*store, content, 4096, stripe_ - 4096));
  ASSERT_NO_FATAL_FAILURE(write_logs_anew(*store));
  const uint64_t each = header_bytes(store->shape());
  store.reset();
  store = std::move(*world.open_small());
  // what is read beside the headers is read whether it is zeros or not, and not again
  EXPECT_EQ(read(world, *store, content, stripe_), (m_ + k_ + m_) * each);
  EXPECT_EQ(read(world, *store, content, stripe_ - 4096), 0U);
}

// A block that rots, or a page of which the newer copy does: the older one says less of the blocks,
// and that some of them were never written.
TEST_P(ParityHeaders, OneFlippedBitOnADiskChangesNothing) {
  CodedWorld world(small_logs(k_, m_));
  auto store = std::move(*world.open_small());
  Bytes content(2 * stripe_);
  ASSERT_NO_FATAL_FAILURE(make_sparse(*store, content, 0, stripe_ + 4096));
  for (uint64_t i = 0; i < 2; ++i) {  // a block that was there, and one that was not
    update(*store, "a", content, 8192, 4096, 10 + i);
    update(*store, "a", content, stripe_ + (i + 1) * 4096, 4096, 20 + i);
    ASSERT_OK(store->fold_all().wait());
  }
  ASSERT_NO_FATAL_FAILURE(write_logs_anew(*store));
  const Shape shape = store->shape();
  store.reset();
  const auto images = images_of(world);
  for (const std::string& path : world.paths()) {
    for (size_t block = 0; block < 2 * shape.pages() + 4; ++block) {
      put_back(world, images);
      for (size_t slot = 0; slot < shape.slots; ++slot)
        world.disk().flip(path, shape.slot_at(slot) + block * kBlock + 80, 3);
      store = std::move(*world.open_small());
      EXPECT_EQ(read_all(*store, "a"), content) << path << ", block " << block;
      EXPECT_EQ(read_all(*store, "a"), content) << path << ", block " << block;
      store.reset();
    }
  }
}

// The disk of a block has lost its last write, and of the parities a header page has one copy, the
// older: rotten is the other, or not to be read. With one parity that is more than it takes, but
// what is old is told as lost.
TEST_P(ParityHeaders, AnOldBlockIsNotTakenForTheNewOne) {
  CodedWorld world(small_logs(k_, m_));
  auto store = std::move(*world.open_small());
  Bytes content = put(*store, "a", stripe_, 1);
  const auto before = images_of(world);
  const Bytes old(content.begin() + 8192, content.begin() + 12288);
  update(*store, "a", content, 8192, 4096, 10);
  ASSERT_OK(store->fold_all().wait());
  ASSERT_NO_FATAL_FAILURE(write_logs_anew(*store));
  const Shape shape = store->shape();
  store.reset();
  const auto now = images_of(world);
  const auto lose_write = [&](const std::string& path) {
    for (size_t slot = 0; slot < shape.slots; ++slot) {
      Bytes block(kBlock);
      before.at(path).read(shape.block_at(slot, 2), block);
      if (block != old) continue;
      SimImage image = now.at(path);
      image.write(shape.block_at(slot, 2), block);
      world.disk().put(path, image);
      return true;
    }
    return false;
  };
  size_t tried = 0;
  for (const std::string& home : world.paths()) {
    for (const bool rotten : {false, true}) {
      for (size_t copy = 0; copy < 2; ++copy) {
        put_back(world, now);
        world.disk().heal();
        if (!lose_write(home)) continue;
        for (const std::string& path : world.paths()) {
          for (size_t slot = 0; slot < shape.slots && path != home; ++slot) {
            const uint64_t at = shape.slot_at(slot) + copy * kBlock;
            rotten ? world.disk().flip(path, at + 80, 3) : world.disk().spoil(path, at);
          }
        }
        store = std::move(*world.open_small());
        Bytes into(stripe_);
        const Status read = store->read("a", 0, slice_of(into), {}).wait();
        EXPECT_TRUE(read ? into == content : read.error().code == Code::corruption)
            << home << ", copy " << copy << ": " << (read ? "old bytes" : read.error().message());
        store.reset();
        ++tried;
      }
    }
  }
  EXPECT_EQ(tried, 4U) << "one disk has the block";
}

// A disk is lost after the headers of the parities were read: what is decoded takes the others.
TEST_P(ParityHeaders, WhatIsLostLaterIsDecodedByAllThatAreLeft) {
  CodedWorld world(small_logs(k_, m_));
  auto store = std::move(*world.open_small());
  const Bytes content = put(*store, "a", stripe_, 1);
  ASSERT_NO_FATAL_FAILURE(write_logs_anew(*store));
  const uint64_t each = header_bytes(store->shape());
  for (const std::string& path : world.paths()) {
    store.reset();
    store = std::move(*world.open_small());
    ASSERT_EQ(read(world, *store, content, content.size()), m_ * each);
    world.disk().fail_nth(Op::Kind::write, 1, EIO, path);
    put(*store, "more" + path, 8192, 5);
    ASSERT_EQ(store->health().troubles.size(), 1U);
    EXPECT_EQ(read_all(*store, "a"), content) << path;
    ASSERT_OK(store->repair().wait());
  }
}

INSTANTIATE_TEST_SUITE_P(Codes, ParityHeaders, ::testing::Values(std::pair{2, 1}, std::pair{4, 2}));

}  // namespace
}  // namespace stoker::coded
