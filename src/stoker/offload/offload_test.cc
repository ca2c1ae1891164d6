#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <thread>

#include "stoker/base/bytes.h"
#include "stoker/offload/session.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/sanitized.h"

namespace stoker::offload {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

using optim::MomentType;

constexpr uint64_t kSeed = 77;

// Of 8-bit moments two cells, so that a tile is cut as well.
uint32_t smallest_tile(MomentType moments) {
  return moments == MomentType::q8 ? 2 * kMomentCell : kTileElementsMin;
}

std::unique_ptr<RuntimeOwner> make_runtime() {
  RuntimeOptions options;
  options.cpu_threads = 2;
  auto runtime = RuntimeOwner::make(options);
  STOKER_CHECK(runtime.has_value());
  return std::move(*runtime);
}

// Forwards to another store; fails reads or writes whose key and offset match, and can hold reads
// back. Only what the pipeline calls.
class FaultyStore final : public Store {
 public:
  explicit FaultyStore(Store& under) : under_(under) {}
  std::atomic<bool> fail_reads{false}, fail_writes{false};
  std::string key;
  uint64_t from = 0;
  std::optional<Future<void>> gate;        // reads come back when it is done, if there is one
  std::optional<Future<void>> write_gate;  // writes begin when it is done, if there is one

  bool hits(const std::atomic<bool>& armed, std::string_view k, uint64_t offset) const {
    return armed && k == key && offset >= from;
  }
  Features features() const override { return under_.features(); }
  Result<ObjectInfo> stat(std::string_view k, std::string_view s) override {
    return under_.stat(k, s);
  }
  Result<std::vector<ObjectInfo>> list(std::string_view p, std::string_view s) override {
    return under_.list(p, s);
  }
  Future<void> read(std::string_view k, uint64_t offset, Slice into, ReadOptions options) override {
    if (hits(fail_reads, k, offset)) return fail(Code::corruption, "chunk is rotten");
    const Future<void> done = under_.read(k, offset, into, options);
    if (!gate) return done;
    const auto promise = std::make_shared<Promise<void>>();
    gate->on_done([promise, done](const Status&) {
      done.on_done([promise](const Status& status) { promise->complete(status); });
    });
    return promise->future();
  }
  Result<std::unique_ptr<Transaction>> begin() override;
  Future<void> snapshot(std::string_view n) override { return under_.snapshot(n); }
  Future<void> drop(std::string_view n, Durability durability) override {
    return under_.drop(n, durability);
  }
  StoreInfo info() const override { return under_.info(); }

 private:
  Store& under_;
};

class FaultyTransaction final : public Transaction {
 public:
  FaultyTransaction(FaultyStore& store, std::unique_ptr<Transaction> under)
      : store_(store), under_(std::move(under)) {}
  Status resize(std::string_view k, uint64_t bytes, uint32_t chunk) override {
    return under_->resize(k, bytes, chunk);
  }
  Future<void> write(std::string_view k, uint64_t offset, Slice from, Priority priority) override {
    if (store_.hits(store_.fail_writes, k, offset))
      return fail(Code::out_of_space, "the disk is full");
    if (!store_.write_gate) return under_->write(k, offset, from, priority);
    const auto promise = std::make_shared<Promise<void>>();
    store_.write_gate->on_done(
        [this, promise, key = std::string(k), offset, from, priority](const Status&) {
          under_->write(key, offset, from, priority).on_done([promise](const Status& status) {
            promise->complete(status);
          });
        });
    return promise->future();
  }
  Status remove(std::string_view k) override { return under_->remove(k); }
  Future<void> read(std::string_view k, uint64_t offset, Slice into, ReadOptions options) override {
    return under_->read(k, offset, into, options);
  }
  Status require(std::string_view k, std::string_view tag) override {
    return under_->require(k, tag);
  }
  Future<Version> commit(Durability durability) override { return under_->commit(durability); }

 private:
  FaultyStore& store_;
  std::unique_ptr<Transaction> under_;
};

Result<std::unique_ptr<Transaction>> FaultyStore::begin() {
  STOKER_ASSIGN(auto under, under_.begin());
  return std::unique_ptr<Transaction>(std::make_unique<FaultyTransaction>(*this, std::move(under)));
}

// A moment of a whole block in plain memory.
struct PlainMoment {
  explicit PlainMoment(const BlockLayout& of)
      : layout(of),
        data(of.elements() * optim::moment_bytes(of.moments())),
        scales(optim::moment_scales(of.moments(), of.elements())) {}
  const BlockLayout& layout;
  std::vector<std::byte> data;
  std::vector<float> scales;

  optim::KeptMoment at(uint64_t element) {
    return {data.data() + element * optim::moment_bytes(layout.moments()),
            scales.empty() ? nullptr : scales.data() + element / optim::kMomentGroup};
  }
  // The plane as docs/formats/planes.md tells it: cell by cell codes, then scales, then zeros up to
  // 4 KiB.
  std::vector<std::byte> plane(Plane plane) {
    std::vector<std::byte> bytes(layout.plane_bytes(plane));
    if (scales.empty())
      std::copy(data.begin(), data.begin() + static_cast<std::ptrdiff_t>(bytes.size()),
                bytes.begin());
    for (uint64_t first = 0; !bytes.empty() && !scales.empty() && first < layout.elements();
         first += 131072) {
      const uint64_t count = std::min<uint64_t>(131072, layout.elements() - first);
      std::byte* const to = bytes.data() + first / 131072 * (131072 + 4096);
      std::memcpy(to, at(first).data, count);
      std::memcpy(to + count, at(first).scales, count / 256 * sizeof(float));
    }
    return bytes;
  }
};

// The planes of one block in plain memory, updated by one call of the kernel a segment: what the
// pipeline must equal.
struct Reference {
  explicit Reference(const BlockLayout& layout)
      : weights(layout.plane_bytes(Plane::weight)),
        remainder(layout.elements()),
        m(layout),
        v(layout) {}
  std::vector<std::byte> weights;
  std::vector<uint16_t> remainder;
  PlainMoment m, v;

  void update(const BlockLayout& layout, const std::vector<Segment>& segments) {
    const uint32_t width = layout.element_bytes(Plane::weight);
    for (const Segment& s : segments) {
      const optim::Planes planes{.weight_in = weights.data() + s.offset * width,
                                 .weight_out = weights.data() + s.offset * width,
                                 .remainder = width == 2 ? remainder.data() + s.offset : nullptr,
                                 .grad = s.grad};
      const optim::Moments moments{
          .type = layout.moments(),
          .m = optim::uses_m(s.hyper) ? m.at(s.offset) : optim::KeptMoment{},
          .v = optim::uses_v(s.hyper) ? v.at(s.offset) : optim::KeptMoment{},
          .seed = kSeed,
          .parameter = s.parameter};
      optim::update(s.hyper, layout.weight_type(), s.grad_type, planes, moments,
                    optim::Part::all(s.count));
    }
  }
};

struct Setting {
  std::string store;
  MomentType moments;
};

// On every kind of store that training may use, with every way to keep moments.
class OffloadTest : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    std::string folder = ::testing::TempDir() + "stoker_offload_XXXXXX";
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    StoreOptions options;
    options.create = true;
    options.capacity_bytes = 192 * kMiB;
    auto store = open_store(GetParam().store == "local:" ? "local:" + folder : GetParam().store,
                            runtime_->runtime(), options);
    ASSERT_TRUE(store) << store.error().message();
    store_ = std::move(*store);
    faulty_ = std::make_unique<FaultyStore>(*store_);
    auto arena = Arena::make(48 * kMiB, runtime_->budget());
    ASSERT_TRUE(arena);
    arena_ = std::move(*arena);
    ASSERT_TRUE(runtime_->loop().adopt(*arena_));
    open_session(3);
  }
  void TearDown() override {
    slot_ = {};
    session_.reset();
    EXPECT_EQ(arena_->used(), 0U) << "the session keeps memory";
    store_.reset();
    EXPECT_TRUE(runtime_->loop().unadopt(*arena_));
    std::filesystem::remove_all(folder_);
  }

  void open_session(uint32_t tiles) {
    session_.reset();
    auto session = Session::make(*faulty_, runtime_->runtime(), *arena_,
                                 {tiles, tile_, GetParam().moments, kSeed});
    ASSERT_TRUE(session) << session.error().message();
    session_ = std::move(*session);
  }

  std::shared_ptr<StepTransaction> begin() {
    auto transaction = faulty_->begin();
    STOKER_CHECK(transaction.has_value());
    return std::make_shared<StepTransaction>(std::move(*transaction));
  }
  static void commit(StepTransaction& transaction, Durability durability = Durability::durable) {
    const auto done = transaction.commit(durability);
    ASSERT_TRUE(done.wait()) << done.wait().error().message();
  }

  // Declares the block, fills its weights with noise and commits them; the reference starts equal.
  BlockId make_block(BlockSpec spec) {
    const BlockId id = session_->add_block(std::move(spec)).value();
    layout_ = session_->layout(id).value();
    reference_ = std::make_unique<Reference>(*layout_);
    fill_weights(reference_->weights);
    slot_ = arena_->take(layout_->plane_bytes(Plane::weight)).value();
    std::memcpy(slot_.data(), reference_->weights.data(), reference_->weights.size());
    auto transaction = begin();
    EXPECT_TRUE(layout_->create(transaction->raw()));
    EXPECT_TRUE(session_->store_weights(id, plane_slot(), *transaction).wait());
    commit(*transaction);
    EXPECT_TRUE(layout_->check(*faulty_));
    return id;
  }
  Slice plane_slot() const { return slot_.slice().sub(0, layout_->plane_bytes(Plane::weight)); }

  void fill_weights(std::vector<std::byte>& bytes) {
    std::normal_distribution<float> normal;
    if (layout_->weight_type() == optim::WeightType::f32) {
      for (size_t at = 0; at < bytes.size(); at += 4) {
        const float value = normal(random_);
        std::memcpy(&bytes[at], &value, 4);
      }
      return;
    }
    for (size_t at = 0; at < bytes.size(); at += 2) {
      const uint32_t bits = std::bit_cast<uint32_t>(normal(random_));
      std::memcpy(&bytes[at], reinterpret_cast<const std::byte*>(&bits) + 2, 2);
    }
  }

  // Segments anywhere at multiples of 64 (of a group with 8-bit moments), some parts of the block
  // in none; mixed gradient types.
  std::vector<Segment> random_segments(uint64_t step,
                                       optim::Algorithm algorithm = optim::Algorithm::adamw) {
    std::vector<Segment> segments;
    std::normal_distribution<float> normal;
    grads_.clear();
    const uint64_t border = GetParam().moments == MomentType::q8 ? optim::kMomentGroup : 64;
    uint64_t at = align_down(random_() % 5000, border);
    while (at < layout_->elements()) {
      const uint64_t count =
          std::min<uint64_t>(1 + random_() % (3 * tile_), layout_->elements() - at);
      Segment s;
      s.parameter = static_cast<uint32_t>(segments.size());
      s.offset = at;
      s.count = count;
      s.grad_type = random_() % 2 == 0 ? optim::GradType::bf16 : optim::GradType::f32;
      s.hyper = {.algorithm = algorithm,
                 .lr = 1e-3 * static_cast<double>(1 + random_() % 5),
                 .weight_decay = 0.1,
                 .momentum = 0.9,
                 .step = step};
      auto& grad = grads_.emplace_back(count * optim::grad_bytes(s.grad_type));
      for (uint64_t i = 0; i < count; ++i) {
        const uint32_t bits = std::bit_cast<uint32_t>(normal(random_));
        const size_t width = optim::grad_bytes(s.grad_type);
        std::memcpy(&grad[i * width], reinterpret_cast<const std::byte*>(&bits) + (4 - width),
                    width);
      }
      segments.push_back(s);
      at = align_up(at + count, border) +
           (random_() % 3 == 0 ? align_down(random_() % (2 * tile_), border) : 0);
    }
    for (size_t i = 0; i < segments.size(); ++i) segments[i].grad = grads_[i].data();
    return segments;
  }

  UpdateRequest request(std::vector<Segment> segments,
                        std::shared_ptr<StepTransaction> transaction) {
    UpdateRequest r;
    r.segments = std::move(segments);
    r.transaction = std::move(transaction);
    return r;
  }

  std::vector<std::byte> stored(Plane plane) {
    std::vector<std::byte> bytes(layout_->plane_bytes(plane));
    const auto done = store_->read(layout_->key(plane), 0, {bytes.data(), bytes.size()});
    EXPECT_TRUE(done.wait());
    return bytes;
  }
  void expect_equal() {
    EXPECT_TRUE(stored(Plane::weight) == reference_->weights);
    const auto same = [&](Plane plane, const void* data) {
      if (layout_->has(plane)) {
        EXPECT_EQ(std::memcmp(stored(plane).data(), data, layout_->plane_bytes(plane)), 0)
            << name(plane);
      }
    };
    same(Plane::remainder, reference_->remainder.data());
    same(Plane::m, reference_->m.plane(Plane::m).data());
    same(Plane::v, reference_->v.plane(Plane::v).data());
  }
  uint64_t read(Plane plane) {
    return session_->traffic().read_bytes[static_cast<size_t>(plane)].get();
  }
  uint64_t wrote(Plane plane) {
    return session_->traffic().written_bytes[static_cast<size_t>(plane)].get();
  }

  // Bytes of as many elements of m or v, in whole tiles.
  static uint64_t moment_bytes(uint64_t elements) {
    return moment_plane_bytes(GetParam().moments, elements);
  }

  const uint32_t tile_ = smallest_tile(GetParam().moments);
  std::mt19937_64 random_{20240229};
  std::unique_ptr<RuntimeOwner> runtime_ = make_runtime();
  std::filesystem::path folder_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<FaultyStore> faulty_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Session> session_;
  const BlockLayout* layout_ = nullptr;
  std::unique_ptr<Reference> reference_;
  Buffer slot_;
  std::vector<std::vector<std::byte>> grads_;
};

TEST_P(OffloadTest, LayoutPadsPlanesAndMakesATileOneChunkOfEach) {
  const MomentType moments = GetParam().moments;
  auto layout =
      BlockLayout::make({.name = "a", .elements = 5 * tile_ + 1, .moments = moments}, tile_);
  ASSERT_TRUE(layout);
  EXPECT_EQ(layout->elements(), 5 * tile_ + kElementAlign);
  EXPECT_EQ(layout->tiles(), 6U);
  EXPECT_EQ(layout->tile_count(4), tile_);
  EXPECT_EQ(layout->tile_count(5), kElementAlign);
  EXPECT_EQ(layout->key(Plane::remainder), "r/a");
  for (Plane plane : kAllPlanes) {
    EXPECT_EQ(layout->plane_bytes(plane) % 4096, 0U);
    EXPECT_GE(layout->chunk_bytes(plane), 64 * kKiB);
    EXPECT_EQ(layout->plane_bytes(plane),
              5 * layout->chunk_bytes(plane) + layout->tile_bytes(plane, 5));
  }
  const uint64_t chunk = moments == MomentType::f32    ? 128 * kKiB
                         : moments == MomentType::bf16 ? 64 * kKiB
                                                       : 2 * 132 * kKiB;
  const uint64_t last = moments == MomentType::f32 ? 8 * kKiB : 4 * kKiB;
  EXPECT_EQ(layout->plane_bytes(Plane::m), 5 * chunk + last);
  EXPECT_EQ(layout->plane_bytes(Plane::remainder), 2 * layout->elements());
  EXPECT_EQ(layout->state_bytes(), layout->elements() * 2 + 2 * (5 * chunk + last));
  EXPECT_EQ(BlockLayout::make({.name = "a", .elements = 1}, 100).error().code,
            Code::invalid_argument);
  EXPECT_EQ(BlockLayout::make({.name = "a", .elements = 1, .weight_bytes = 3}, tile_).error().code,
            Code::invalid_argument);
  EXPECT_EQ(
      BlockLayout::make({.name = "a", .elements = 1, .moments = MomentType::q8}, kTileElementsMin)
          .error()
          .code,
      Code::invalid_argument);
}

TEST_P(OffloadTest, GroupsOf8BitMomentsAreNotCut) {
  const BlockId block = make_block({.name = "b", .elements = 3 * tile_});
  std::vector<std::byte> grad(1024);
  Segment segment;
  segment.offset = 128;
  segment.count = 100;
  segment.grad = grad.data();
  auto transaction = begin();
  const auto job = session_->update(block, request({segment}, transaction));
  if (GetParam().moments != MomentType::q8) {
    ASSERT_TRUE(job);
    EXPECT_TRUE((*job)->written().wait());
    return;
  }
  ASSERT_FALSE(job);
  EXPECT_THAT(job.error().what, HasSubstr("multiple of 256"));
}

TEST_P(OffloadTest, EqualsTheKernelInOneShot) {
  for (uint32_t width : {2U, 4U}) {
    const BlockId block = make_block({.name = "b" + std::to_string(width),
                                      .elements = 7 * tile_ + 12345,
                                      .weight_bytes = width});
    for (uint64_t step = 1; step <= 6; ++step) {
      const auto segments = random_segments(step);
      auto transaction = begin();
      UpdateRequest r = request(segments, transaction);
      // All ways weights come and go: slot to slot, slot to staging, store to staging, store to
      // slot.
      if (step % 4 < 2) r.weight_in = plane_slot();
      if (step % 2 == 0) r.weight_out = plane_slot();
      if (step % 3 == 0) {
        ASSERT_TRUE(session_->prefetch_state(block, nullptr, step == 3));
      }
      auto job = session_->update(block, std::move(r));
      ASSERT_TRUE(job) << job.error().message();
      ASSERT_TRUE((*job)->written().wait()) << (*job)->written().wait().error().message();
      reference_->update(*layout_, segments);
      if (step % 2 == 0) {
        EXPECT_EQ(std::memcmp(slot_.data(), reference_->weights.data(), reference_->weights.size()),
                  0);
      }
      commit(*transaction, step % 2 == 0 ? Durability::durable : Durability::deferred);
      expect_equal();
      ASSERT_TRUE(session_->fetch_weights(block, plane_slot(), Priority::demand).wait());
      EXPECT_EQ(std::memcmp(slot_.data(), reference_->weights.data(), reference_->weights.size()),
                0);
    }
  }
}

// The elements of a float32 parameter beyond a multiple of 8 are its rest (optim.h) wherever tiles
// cut it: before them, between them, and where the whole parameter has fewer than 8.
TEST_P(OffloadTest, ARestThatATileCutsEqualsTheKernelInOneShot) {
  if (GetParam().moments == MomentType::q8) GTEST_SKIP() << "there parameters begin at groups";
  const BlockId block = make_block({.name = "b", .elements = 4 * tile_, .weight_bytes = 4});
  std::normal_distribution<float> normal;
  for (uint64_t step = 1; step <= 4; ++step) {
    std::vector<Segment> segments;
    grads_.clear();
    const std::pair<uint64_t, uint64_t> parameters[] = {
        {0, tile_ + 5}, {2 * tile_ - 5, 7}, {2 * tile_ + 64, tile_ - 61}, {4 * tile_ - 9, 9}};
    for (const auto& [offset, count] : parameters) {
      auto& grad = grads_.emplace_back(count * 4);
      for (uint64_t i = 0; i < count; ++i) {
        const float value = normal(random_);
        std::memcpy(&grad[i * 4], &value, 4);
      }
      Segment segment;
      segment.offset = offset;
      segment.count = count;
      segment.grad = grad.data();
      segment.grad_type = optim::GradType::f32;
      segment.hyper = {.weight_decay = 0.1, .step = step};
      segments.push_back(segment);
    }
    auto transaction = begin();
    const auto job = session_->update(block, request(segments, transaction)).value();
    ASSERT_TRUE(job->written().wait());
    commit(*transaction);
    reference_->update(*layout_, segments);
    expect_equal();
  }
}

TEST_P(OffloadTest, StateThatTheAlgorithmHasNotIsNeverMoved) {
  for (auto algorithm : {optim::Algorithm::sgd, optim::Algorithm::lion}) {
    const BlockId block = make_block({.name = "b" + std::to_string(static_cast<int>(algorithm)),
                                      .elements = 3 * tile_,
                                      .v = false});
    for (uint64_t step = 1; step <= 3; ++step) {
      const auto segments = random_segments(step, algorithm);
      auto transaction = begin();
      UpdateRequest r = request(segments, transaction);
      auto job = session_->update(block, std::move(r)).value();
      ASSERT_TRUE(job->written().wait());
      commit(*transaction);
      reference_->update(*layout_, segments);
      expect_equal();
    }
  }
  EXPECT_EQ(read(Plane::v) + wrote(Plane::v), 0U);
}

TEST_P(OffloadTest, ByteCountsAreExact) {
  const BlockId block = make_block({.name = "b", .elements = 6 * tile_ + 100});
  const uint64_t padded = layout_->elements();
  const uint64_t before = wrote(Plane::weight);  // the first weights
  Segment all;
  std::vector<std::byte> grad(2 * padded);
  all.count = 6 * tile_ + 100;
  all.grad = grad.data();
  auto transaction = begin();
  UpdateRequest r = request({all}, transaction);
  r.weight_in = plane_slot();
  ASSERT_TRUE(session_->update(block, std::move(r)).value()->written().wait());
  commit(*transaction);
  EXPECT_EQ(read(Plane::weight), 0U);
  EXPECT_EQ(read(Plane::remainder), 2 * padded);
  EXPECT_EQ(read(Plane::m), moment_bytes(padded));
  EXPECT_EQ(read(Plane::v), moment_bytes(padded));
  EXPECT_EQ(wrote(Plane::weight) - before, 2 * padded);
  EXPECT_EQ(wrote(Plane::remainder), 2 * padded);
  EXPECT_EQ(wrote(Plane::m), moment_bytes(padded));
  EXPECT_EQ(wrote(Plane::v), moment_bytes(padded));
  // A segment inside one tile moves that tile only; weights not given are read too.
  auto second = begin();
  all.offset = 2 * tile_;
  all.count = 64;
  ASSERT_TRUE(session_->update(block, request({all}, second)).value()->written().wait());
  EXPECT_EQ(read(Plane::weight), 2 * tile_);
  EXPECT_EQ(read(Plane::m), moment_bytes(padded) + moment_bytes(tile_));
  EXPECT_EQ(wrote(Plane::v), moment_bytes(padded) + moment_bytes(tile_));
}

TEST_P(OffloadTest, HashesAgreeWithAPassOfTheirOwnAndSeeEveryByte) {
  const BlockId block = make_block({.name = "b", .elements = 9 * tile_});
  auto segments = random_segments(1);
  auto transaction = begin();
  UpdateRequest r = request(segments, transaction);
  r.hashes = true;
  const auto job = session_->update(block, std::move(r)).value();
  ASSERT_TRUE(job->written().wait());
  std::vector<std::span<const std::byte>> spans(grads_.begin(), grads_.end());
  EXPECT_EQ(job->hashes(), hash(runtime_->pool(), spans));
  for (size_t i = 0; i < grads_.size(); ++i) {
    auto& byte = grads_[i][random_() % grads_[i].size()];
    byte ^= std::byte{1};
    EXPECT_NE(hash(runtime_->pool(), spans)[i], job->hashes()[i]);
    byte ^= std::byte{1};
  }
  // The length counts, not only the bytes.
  const std::vector<std::byte> zeros(kHashPiece * 2);
  const std::vector<std::span<const std::byte>> two = {std::span(zeros).first(10),
                                                       std::span(zeros).first(11)};
  const auto lengths = hash(runtime_->pool(), two);
  EXPECT_NE(lengths[0], lengths[1]);
}

TEST_P(OffloadTest, PrefetchedStateOfAnOlderVersionIsNotUsed) {
  const BlockId block = make_block({.name = "b", .elements = 2 * tile_});
  for (uint64_t step = 1; step <= 3; ++step) {
    const auto segments = random_segments(step);
    auto transaction = begin();
    const auto job = session_->update(block, request(segments, transaction)).value();
    ASSERT_TRUE(job->written().wait());
    // Read before the commit from the committed version: of the past when the next update comes.
    EXPECT_EQ(session_->prefetch_state(block).value(), 2U);
    commit(*transaction);
    reference_->update(*layout_, segments);
  }
  expect_equal();
  EXPECT_EQ(session_->traffic().tiles_prefetched.get(), 0U);
  // Read from the transaction itself: of use before and after its commit.
  for (uint64_t step = 4; step <= 6; ++step) {
    const auto segments = random_segments(step);
    auto transaction = begin();
    ASSERT_TRUE(session_->update(block, request(segments, transaction)).value()->written().wait());
    EXPECT_EQ(session_->prefetch_state(block, transaction).value(), 2U);
    commit(*transaction);
    reference_->update(*layout_, segments);
    expect_equal();
  }
  EXPECT_GT(session_->traffic().tiles_prefetched.get(), 0U);
}

TEST_P(OffloadTest, PrefetchOfOneBlockNeverStarvesAnother) {
  const BlockId first = make_block({.name = "first", .elements = 8 * tile_});
  slot_ = {};
  const BlockId second = make_block({.name = "second", .elements = 8 * tile_});
  const auto segments = random_segments(1);
  EXPECT_EQ(session_->prefetch_state(first).value(), 3U) << "takes every tile memory";
  auto transaction = begin();
  ASSERT_TRUE(session_->update(second, request(segments, transaction)).value()->written().wait());
  commit(*transaction);
  reference_->update(*layout_, segments);
  expect_equal();
  EXPECT_GT(session_->traffic().prefetch_dropped.get(), 0U);
}

// Lent memory holds what was prefetched and is the lender's again after recall(): whatever the
// update is doing then.
TEST_P(OffloadTest, LentMemoryIsFilledAheadAndComesBackWhole) {
  const BlockId block = make_block({.name = "b", .elements = 9 * tile_});
  const uint64_t place = tile_memory_bytes(tile_, GetParam().moments);
  const Buffer idle = arena_->take(4 * place + 4096).value();
  const std::byte mark{0x5a};
  for (uint64_t step = 1; step <= 8; ++step) {
    const auto segments = random_segments(step);
    EXPECT_EQ(session_->lend(idle.slice()), 4U);
    EXPECT_EQ(session_->lend(idle.slice()), 0U) << "it is lent already";
    EXPECT_EQ(session_->prefetch_state(block).value(), 7U) << "own and lent memory";
    if (step % 3 == 0) session_->recall(idle.slice());  // drops what was read there
    auto transaction = begin();
    const auto job = session_->update(block, request(segments, transaction)).value();
    session_->recall(idle.slice());
    std::fill_n(idle.data(), idle.size(), mark);
    ASSERT_TRUE(job->written().wait());
    commit(*transaction);
    EXPECT_EQ(std::count(idle.data(), idle.data() + idle.size(), mark),
              static_cast<std::ptrdiff_t>(idle.size()))
        << "step " << step;
    reference_->update(*layout_, segments);
    expect_equal();
  }
  EXPECT_GT(session_->traffic().tiles_prefetched.get(), 8U * 4U);
  session_->recall(idle.slice());  // of nothing
  EXPECT_EQ(session_->lend(idle.slice().sub(0, place - 1)), 0U) << "no tile fits";
}

TEST_P(OffloadTest, PrefetchedTilesInLentMemoryNeverStarveAnUpdate) {
  const BlockId first = make_block({.name = "first", .elements = 8 * tile_});
  slot_ = {};
  const BlockId second = make_block({.name = "second", .elements = 8 * tile_});
  slot_ = {};
  const BlockId third = make_block({.name = "third", .elements = 8 * tile_});
  const Buffer idle = arena_->take(2 * tile_memory_bytes(tile_, GetParam().moments)).value();
  const auto segments = random_segments(1);
  EXPECT_EQ(session_->prefetch_state(first).value(), 3U) << "takes all own memory";
  EXPECT_EQ(session_->lend(idle.slice()), 2U);
  // the lent places are filled: the newest prefetched tiles lie there
  session_->prefetch_state(second).value();
  auto transaction = begin();
  ASSERT_TRUE(session_->update(third, request(segments, transaction)).value()->written().wait());
  commit(*transaction);
  reference_->update(*layout_, segments);
  expect_equal();
  session_->recall(idle.slice());
}

TEST_P(OffloadTest, ASecondUpdateInOneTransactionReplacesTheFirst) {
  const BlockId block = make_block({.name = "b", .elements = 5 * tile_});
  for (bool retained : {false, true}) {
    if (retained) {
      ASSERT_TRUE(session_->retain(block));
    }
    for (uint64_t step = 1; step <= 3; ++step) {
      auto transaction = begin();
      const auto discarded = random_segments(step);
      const auto old_grads = grads_;
      auto wrong = discarded;
      for (size_t i = 0; i < wrong.size(); ++i) wrong[i].grad = old_grads[i].data();
      const auto first = session_->update(block, request(wrong, transaction)).value();
      // Not waited for: the second one takes its turn by itself.
      auto right = discarded;
      for (Segment& s : right) s.hyper.lr *= 3;
      const auto second = session_->update(block, request(right, transaction)).value();
      ASSERT_TRUE(second->written().wait());
      ASSERT_TRUE(first->written().wait());
      commit(*transaction);
      reference_->update(*layout_, right);
      expect_equal();
    }
  }
}

TEST_P(OffloadTest, AChainThroughAnOpenTransactionReadsItsBytes) {
  const BlockId block = make_block({.name = "b", .elements = 4 * tile_});
  auto transaction = begin();
  for (uint64_t step = 1; step <= 3; ++step) {
    const auto segments = random_segments(step);
    UpdateRequest r = request(segments, transaction);
    r.source = transaction;
    ASSERT_TRUE(session_->update(block, std::move(r)).value()->written().wait());
    reference_->update(*layout_, segments);
    ASSERT_TRUE(
        session_->fetch_weights(block, plane_slot(), Priority::demand, transaction.get()).wait());
    EXPECT_EQ(std::memcmp(slot_.data(), reference_->weights.data(), reference_->weights.size()), 0);
  }
  commit(*transaction);
  expect_equal();
}

TEST_P(OffloadTest, RetainedStateIsReadOnceAndNoticesAbandonedSteps) {
  const BlockId block = make_block({.name = "b", .elements = 5 * tile_});
  ASSERT_TRUE(session_->retain(block));
  EXPECT_EQ(session_->retain(block).error().code, Code::busy);
  EXPECT_EQ(session_->retained_bytes(), layout_->state_bytes());
  const auto step_once = [&](uint64_t step, bool keep) {
    auto segments = random_segments(step);
    auto transaction = begin();
    ASSERT_TRUE(session_->update(block, request(segments, transaction)).value()->written().wait());
    if (!keep) return;
    commit(*transaction);
    reference_->update(*layout_, segments);
  };
  step_once(1, true);
  const uint64_t cold = read(Plane::m);
  step_once(2, true);
  const uint64_t warm = read(Plane::m);
  EXPECT_LE(warm - cold, layout_->plane_bytes(Plane::m) - cold)
      << "only tiles the first step left out";
  step_once(3, false);  // abandoned
  step_once(3, true);
  EXPECT_GT(read(Plane::m), warm) << "state of the abandoned step was taken for the committed one";
  expect_equal();
  ASSERT_TRUE(session_->invalidate(block));
  step_once(4, true);
  ASSERT_TRUE(session_->release(block));
  EXPECT_EQ(session_->retained_bytes(), 0U);
  step_once(5, true);
  expect_equal();
}

TEST_P(OffloadTest, AFailedReadNamesBlockAndPlaneAndPoisonsTheStep) {
  const BlockId block = make_block({.name = "h.3", .elements = 6 * tile_});
  for (bool prefetched : {false, true}) {
    faulty_->key = "v/h.3";
    faulty_->from = layout_->tile_offset(Plane::v, 3);
    faulty_->fail_reads = true;
    auto transaction = begin();
    if (prefetched) {
      ASSERT_TRUE(session_->prefetch_state(block));
    }
    const auto segments = random_segments(1);
    const auto job = session_->update(block, request(segments, transaction)).value();
    const Status done = job->written().wait();
    ASSERT_FALSE(done);
    EXPECT_EQ(done.error().code, Code::corruption);
    EXPECT_THAT(done.error().what,
                ContainsRegex("block h.3, reading v, tile [345]: chunk is rotten"));
    EXPECT_EQ(transaction->commit(Durability::durable).wait().error().code, Code::corruption);
    faulty_->fail_reads = false;
    transaction.reset();
    // The session goes on from what is committed.
    auto next = begin();
    ASSERT_TRUE(session_->update(block, request(segments, next)).value()->written().wait());
  }
}

TEST_P(OffloadTest, AFailedPrefetchIsReadAgain) {
  const BlockId block = make_block({.name = "b", .elements = 2 * tile_});
  faulty_->key = "m/b";
  faulty_->fail_reads = true;
  EXPECT_EQ(session_->prefetch_state(block).value(), 2U);
  faulty_->fail_reads = false;
  const auto segments = random_segments(1);
  auto transaction = begin();
  ASSERT_TRUE(session_->update(block, request(segments, transaction)).value()->written().wait());
  commit(*transaction);
  reference_->update(*layout_, segments);
  expect_equal();
}

TEST_P(OffloadTest, AFailedWriteLeavesTheCommittedStepAndTheSessionIntact) {
  const BlockId block = make_block({.name = "b", .elements = 6 * tile_});
  ASSERT_TRUE(session_->retain(block));
  const auto segments = random_segments(1);
  faulty_->key = "r/b";
  faulty_->fail_writes = true;
  auto transaction = begin();
  const auto job = session_->update(block, request(segments, transaction)).value();
  const Status done = job->written().wait();
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, Code::out_of_space);
  EXPECT_THAT(done.error().what, HasSubstr("writing remainder"));
  EXPECT_FALSE(transaction->commit(Durability::durable).wait());
  transaction.reset();
  expect_equal();
  faulty_->fail_writes = false;
  auto next = begin();
  ASSERT_TRUE(session_->update(block, request(segments, next)).value()->written().wait());
  commit(*next);
  reference_->update(*layout_, segments);
  expect_equal();
}

TEST_P(OffloadTest, AnAbandonedTransactionCancelsWhatHasNotBegun) {
  const BlockId block = make_block({.name = "b", .elements = 2 << 20});
  auto transaction = begin();
  const auto segments = random_segments(1);
  const uint64_t written = wrote(Plane::weight);
  Promise<void> let_go;
  faulty_->gate = let_go.future();
  const auto job = session_->update(block, request(segments, transaction)).value();
  transaction->abandon();  // all tiles wait for their reads, or for memory
  let_go.complete({});
  const Status& done = job->written().wait();
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, Code::cancelled);
  transaction->jobs()->wait_none();
  faulty_->gate.reset();
  EXPECT_EQ(wrote(Plane::weight), written);
  EXPECT_EQ(transaction.use_count(), 1);
  EXPECT_EQ(session_->update(block, request(segments, transaction)).error().code, Code::cancelled);
  transaction.reset();
  expect_equal();
}

TEST_P(OffloadTest, APrefetchKeepsNoAbandonedTransactionAlive) {
  const BlockId block = make_block({.name = "b", .elements = 16 * tile_});
  for (int round = 0; round < 5; ++round) {
    auto transaction = begin();
    auto segments = random_segments(1);
    ASSERT_TRUE(session_->update(block, request(segments, transaction)).value()->written().wait());
    // more than fits: the rest waits for memory
    ASSERT_TRUE(session_->prefetch_state(block, transaction));
    transaction->abandon();
    transaction->jobs()->wait_none();
    EXPECT_EQ(transaction.use_count(), 1);
    transaction.reset();
    // The next step owns the objects at once and starts from what is committed.
    auto next = begin();
    ASSERT_TRUE(session_->update(block, request(segments, next)).value()->written().wait());
    commit(*next);
    reference_->update(*layout_, segments);
    expect_equal();
  }
}

TEST_P(OffloadTest, APrefetchGoesOnFromTheStoreOnceItsTransactionIsCommitted) {
  make_block({.name = "other", .elements = 3 * tile_});
  slot_ = {};
  const BlockId other = 0;
  const BlockId block = make_block({.name = "b", .elements = 9 * tile_});
  for (uint64_t step = 1; step <= 5; ++step) {
    const auto segments = random_segments(step);
    auto transaction = begin();
    ASSERT_TRUE(session_->update(block, request(segments, transaction)).value()->written().wait());
    reference_->update(*layout_, segments);
    EXPECT_EQ(session_->prefetch_state(other).value(), 3U);
    EXPECT_EQ(session_->prefetch_state(block, transaction).value(), 0U)
        << "all memory is taken: it waits for some";
    commit(*transaction);
    transaction.reset();
    ASSERT_TRUE(session_->invalidate(other));  // gives the memory free
    expect_equal();
  }
  EXPECT_GT(session_->traffic().tiles_prefetched.get(), 0U);
}

TEST_P(OffloadTest, AStepCommitsWhileItsLastWritesAreOnTheirWay) {
  const BlockId block = make_block({.name = "b", .elements = 12 * tile_});
  ASSERT_TRUE(session_->retain(block));
  for (uint64_t step = 1; step <= 8; ++step) {
    const auto segments = random_segments(step);
    auto transaction = begin();
    const auto job = session_->update(block, request(segments, transaction)).value();
    ASSERT_TRUE(job->computed().wait());
    commit(*transaction, step % 2 == 0 ? Durability::durable : Durability::deferred);
    transaction.reset();
    reference_->update(*layout_, segments);
    expect_equal();
  }
}

// From then on it is the user's, who may write to it while the disk is slow.
TEST_P(OffloadTest, NoWriteReadsTheNewWeightsOnceTheyAreComputed) {
  for (uint32_t width : {2U, 4U}) {
    const BlockId block = make_block(
        {.name = "b" + std::to_string(width), .elements = 2 * tile_ + 4711, .weight_bytes = width});
    // old weights in memory or read; state read or kept in memory
    for (uint64_t step = 1; step <= 4; ++step) {
      SCOPED_TRACE("width " + std::to_string(width) + ", step " + std::to_string(step));
      if (step == 3) {
        ASSERT_TRUE(session_->retain(block));
      }
      const auto segments = random_segments(step);
      Promise<void> later;
      faulty_->write_gate = later.future();
      auto transaction = begin();
      UpdateRequest r = request(segments, transaction);
      if (step % 2 == 0) r.weight_in = plane_slot();
      r.weight_out = plane_slot();
      const auto job = session_->update(block, std::move(r)).value();
      ASSERT_TRUE(job->computed().wait());
      reference_->update(*layout_, segments);
      EXPECT_EQ(std::memcmp(slot_.data(), reference_->weights.data(), reference_->weights.size()),
                0);
      std::memset(slot_.data(), 0x5a, reference_->weights.size());
      later.complete(Status{});
      ASSERT_TRUE(job->written().wait());
      faulty_->write_gate.reset();
      commit(*transaction);
      expect_equal();
      ASSERT_TRUE(session_->fetch_weights(block, plane_slot(), Priority::demand).wait());
    }
  }
}

TEST_P(OffloadTest, CommitBesideARunningUpdateIsRefused) {
  auto transaction = begin();
  ASSERT_TRUE(transaction->begin_job());
  EXPECT_EQ(transaction->commit(Durability::durable).wait().error().code, Code::busy);
  transaction->jobs()->computed();
  transaction->jobs()->end();
  EXPECT_TRUE(transaction->commit(Durability::durable).wait());
  EXPECT_EQ(transaction->begin_job().error().code, Code::invalid_argument);
}

TEST_P(OffloadTest, ManyBlocksAtOnceFromOneThreadEach) {
  std::vector<BlockId> blocks;
  std::vector<const BlockLayout*> layouts;
  auto creation = begin();
  for (int i = 0; i < 8; ++i) {
    blocks.push_back(
        session_->add_block({.name = "b" + std::to_string(i), .elements = (2 + i % 3) * tile_})
            .value());
    layouts.push_back(session_->layout(blocks.back()).value());
    ASSERT_TRUE(layouts.back()->create(creation->raw()));
  }
  commit(*creation);
  creation.reset();
  std::vector<std::byte> grad(4 * 5 * tile_);
  for (int step = 1; step <= 5; ++step) {
    auto transaction = begin();
    std::vector<std::thread> threads;
    for (size_t i = 0; i < blocks.size(); ++i) {
      threads.emplace_back([&, i] {
        Segment all;
        all.count = layouts[i]->elements();
        all.grad = grad.data();
        all.hyper.step = static_cast<uint64_t>(step);
        EXPECT_TRUE(session_->prefetch_state(blocks[(i + 1) % blocks.size()]));
        const auto job = session_->update(blocks[i], request({all}, transaction)).value();
        EXPECT_TRUE(job->computed().wait());
        EXPECT_TRUE(job->written().wait());
      });
    }
    for (auto& thread : threads) thread.join();
    commit(*transaction);
  }
  session_->drop_prefetched();
}

TEST_P(OffloadTest, AnEmptyUpdateEndsAtOnce) {
  const BlockId block = make_block({.name = "b", .elements = tile_});
  auto transaction = begin();
  const auto job = session_->update(block, request({}, transaction)).value();
  EXPECT_TRUE(job->computed().wait());
  EXPECT_TRUE(job->written().wait());
  commit(*transaction);
  expect_equal();
}

TEST_P(OffloadTest, GradientSumsDoNotDependOnThreads) {
  Pool one(1);
  Pool three(3);
  std::vector<float> grad(5 * optim::kNormPiece + 77);
  std::normal_distribution<float> normal;
  for (float& g : grad) g = normal(random_);
  const std::vector<GradSpan> spans = {
      {reinterpret_cast<std::byte*>(grad.data()), grad.size(), optim::GradType::f32}, {}};
  const auto sums = sums_of_squares(one, spans);
  EXPECT_EQ(sums, sums_of_squares(three, spans));
  EXPECT_EQ(sums[0], optim::sum_of_squares(reinterpret_cast<const std::byte*>(grad.data()),
                                           optim::GradType::f32, grad.size()));
  EXPECT_EQ(sums[1], 0.0);
  std::vector<float> expected = grad;
  for (float& g : expected) g *= 0.5F;
  scale(three, spans, 0.5F);
  EXPECT_EQ(grad, expected);
}

TEST_P(OffloadTest, ASessionThatDoesNotFitSaysSo) {
  const auto session =
      Session::make(*faulty_, runtime_->runtime(), *arena_, {1000, tile_, GetParam().moments});
  ASSERT_FALSE(session);
  EXPECT_EQ(session.error().code, Code::over_budget);
  EXPECT_THAT(session.error().what, HasSubstr("tile memory"));
}

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const char* store : {"memory:", "local:"})
    for (const MomentType moments : {MomentType::f32, MomentType::bf16, MomentType::q8})
      all.push_back({store, moments});
  // the slowest of them takes the paths of the others
  if (kLess != 1) {
    std::erase_if(all, [](const Setting& each) {
      return each.store == "memory:" && each.moments == MomentType::q8;
    });
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Stores, OffloadTest, ::testing::ValuesIn(settings()),
                         [](const auto& param) {
                           const MomentType moments = param.param.moments;
                           return param.param.store.substr(0, param.param.store.size() - 1) +
                                  (moments == MomentType::f32    ? "_exact"
                                   : moments == MomentType::bf16 ? "_bf16"
                                                                 : "_8bit");
                         });

}  // namespace
}  // namespace stoker::offload
