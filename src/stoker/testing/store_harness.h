// What tests of stores share: byte patterns, a world in which a store can be opened again and
// again, and a reference model.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/store/open.h"
#include "stoker/testing/sanitized.h"

namespace stoker {

using Bytes = std::vector<std::byte>;

// Repeatable bytes; a shorter pattern of the same seed is the beginning of a longer one, others
// differ everywhere.
inline Bytes pattern(size_t bytes, uint64_t seed) {
  Bytes out(bytes + 8);
  uint64_t state = seed * 0x9E3779B97F4A7C15ULL + 0xD1B54A32D192ED03ULL;
  for (size_t at = 0; at < bytes; at += 8) {
    state += 0x9E3779B97F4A7C15ULL;
    uint64_t word = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ULL;
    word ^= word >> 27;
    std::memcpy(out.data() + at, &word, 8);
  }
  out.resize(bytes);
  return out;
}

inline Slice slice_of(Bytes& bytes) { return {bytes.data(), bytes.size()}; }

// The error's code; a success is itself a failure of the test.
template <typename T>
Code code_of(const Result<T>& result) {
  EXPECT_FALSE(result.has_value()) << "should have failed";
  if (result.has_value()) return Code::cancelled;
  EXPECT_FALSE(result.error().what.empty());
  return result.error().code;
}

template <typename T>
::testing::AssertionResult is_ok(const Result<T>& result) {
  if (result.has_value()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << result.error().message();
}
#define EXPECT_OK(expr) EXPECT_TRUE(::stoker::is_ok(expr))
#define ASSERT_OK(expr) ASSERT_TRUE(::stoker::is_ok(expr))

inline Bytes read_all(Store& store, std::string_view key, std::string_view snapshot = {}) {
  const auto info = store.stat(key, snapshot);
  EXPECT_OK(info);
  if (!info) return {};
  Bytes into(info->bytes, std::byte{0x5A});
  EXPECT_OK(store.read(key, 0, slice_of(into), {.snapshot = snapshot}).wait());
  return into;
}

// Where a store lives: a budget, a folder, a simulated disk. Open at most one store of it at a
// time.
class StoreWorld {
 public:
  virtual ~StoreWorld() = default;
  virtual Result<std::unique_ptr<Store>> open(const StoreOptions& options) = 0;
  virtual bool persists() const { return false; }  // an opened store holds what an earlier one held
};

struct StoreUnderTest {
  std::string name;
  std::function<std::unique_ptr<StoreWorld>()> make;  // each call a new, empty world
};

// What a store should hold: the plainest thing that could be right.
struct ModelObject {
  Bytes bytes;
  uint32_t chunk_bytes = 0;
  Version version = 0;
};
using ModelState = std::map<std::string, ModelObject>;

// The oracle: every object of `state` is there with every byte, and no other.
inline ::testing::AssertionResult holds(Store& store, const ModelState& state,
                                        std::string_view snapshot = {}) {
  const auto listed = store.list("", snapshot);
  if (!listed) return ::testing::AssertionFailure() << "list: " << listed.error().message();
  if (listed->size() != state.size())
    return ::testing::AssertionFailure()
           << listed->size() << " objects instead of " << state.size();
  Bytes into;
  for (const ObjectInfo& info : *listed) {
    const auto expected = state.find(info.key);
    if (expected == state.end())
      return ::testing::AssertionFailure() << "object " << info.key << " should not be there";
    const ModelObject& object = expected->second;
    if (info.bytes != object.bytes.size() || info.chunk_bytes != object.chunk_bytes ||
        info.version != object.version) {
      return ::testing::AssertionFailure()
             << info.key << " has " << info.bytes << " bytes, chunks of " << info.chunk_bytes
             << ", version " << info.version << " instead of " << object.bytes.size() << ", "
             << object.chunk_bytes << ", " << object.version;
    }
    into.assign(info.bytes, std::byte{0x5A});
    const auto read = store.read(info.key, 0, slice_of(into), {.snapshot = snapshot}).wait();
    if (!read) return ::testing::AssertionFailure() << info.key << ": " << read.error().message();
    if (into != object.bytes)
      return ::testing::AssertionFailure() << info.key << " holds other bytes than were written";
  }
  return ::testing::AssertionSuccess();
}

// Random operations on a store and on the model, compared as they go. The same seed makes the same
// operations.
class RandomRun {
 public:
  RandomRun(StoreWorld& world, uint64_t seed) : world_(world), random_(seed) {}
  ~RandomRun() { open_.clear(); }
  void run(int operations);

 private:
  struct Open {
    std::unique_ptr<Transaction> change;
    std::map<std::string, std::optional<ModelObject>> staged;
  };
  uint64_t below(uint64_t n) { return random_() % n; }
  std::string some_key() { return "k" + std::to_string(below(8)); }
  bool owned_elsewhere(const Open& mine, const std::string& key) const;
  std::optional<ModelObject> seen(const Open& by, const std::string& key) const;
  void reopen(bool create);
  void one_change(Open& open);
  void commit(size_t index);
  void abandon(size_t index) { open_.erase(open_.begin() + static_cast<ptrdiff_t>(index)); }
  void snapshot_or_drop();
  void compare_a_read();
  void made_durable();

  StoreWorld& world_;
  std::mt19937_64 random_;
  std::unique_ptr<Store> store_;
  std::vector<Open> open_;  // destroyed before the store
  ModelState state_;
  Version version_ = 0;
  std::map<Version, ModelState> history_;  // since the last durable version, which is its first
  std::map<std::string, ModelState> snapshots_;
};

inline void RandomRun::reopen(bool create) {
  open_.clear();
  store_.reset();
  StoreOptions options;
  options.create = create;
  options.capacity_bytes = 96 << 20;
  options.chunk_bytes = 64 << 10;
  options.objects_max = 256;
  auto store = world_.open(options);
  ASSERT_OK(store);
  store_ = std::move(*store);
}

inline bool RandomRun::owned_elsewhere(const Open& mine, const std::string& key) const {
  for (const Open& other : open_) {
    if (&other != &mine && other.staged.count(key) != 0) return true;
  }
  return false;
}

inline std::optional<ModelObject> RandomRun::seen(const Open& by, const std::string& key) const {
  if (const auto staged = by.staged.find(key); staged != by.staged.end()) return staged->second;
  const auto committed = state_.find(key);
  return committed == state_.end() ? std::nullopt : std::optional(committed->second);
}

// One resize, write, remove or read within a transaction. Only what succeeds is tried: errors have
// tests of their own.
inline void RandomRun::one_change(Open& open) {
  const std::string key = some_key();
  std::optional<ModelObject> object = seen(open, key);
  const uint64_t kind = below(10);
  if (kind < 2 && object) {
    Bytes into(object->bytes.size());
    ASSERT_OK(open.change->read(key, 0, slice_of(into)).wait());
    ASSERT_EQ(into, object->bytes) << key << " within its transaction";
    return;
  }
  if (owned_elsewhere(open, key)) {
    ASSERT_EQ(code_of(open.change->resize(key, 1)), Code::busy);
    return;
  }
  if (!object || kind < 4) {
    const uint64_t bytes = below(4) == 0 ? below(4) * 65536 : below(300'000);
    const uint32_t chunk = object || below(2) == 0 ? 0 : 65536U << below(3);
    ASSERT_OK(open.change->resize(key, bytes, chunk));
    if (!object) object = ModelObject{{}, chunk != 0 ? chunk : 65536U, 0};
    object->bytes.resize(bytes);
  } else if (kind == 4) {
    ASSERT_OK(open.change->remove(key));
    object.reset();
  } else {
    if (object->bytes.empty()) return;
    const uint64_t offset = below(3) == 0 ? align_down(below(object->bytes.size()), 65536)
                                          : below(object->bytes.size());
    const uint64_t size = below(object->bytes.size() - offset) + 1;
    Bytes from = pattern(size + 16, random_());
    const size_t skew = below(2) == 0 ? 0 : below(16);
    ASSERT_OK(open.change->write(key, offset, {from.data() + skew, size}).wait());
    std::memcpy(object->bytes.data() + offset, from.data() + skew, size);
  }
  open.staged[key] = std::move(object);
}

inline void RandomRun::made_durable() { history_.erase(history_.begin(), history_.find(version_)); }

inline void RandomRun::commit(size_t index) {
  const bool durable = below(2) == 0;
  const auto version =
      open_[index].change->commit(durable ? Durability::durable : Durability::deferred).wait();
  ASSERT_OK(version);
  ASSERT_EQ(*version, ++version_);
  for (auto& [key, object] : open_[index].staged) {
    if (object) object->version = version_;
    if (object) {
      state_[key] = *object;
    } else {
      state_.erase(key);
    }
  }
  history_[version_] = state_;
  if (durable) made_durable();
  open_.erase(open_.begin() + static_cast<ptrdiff_t>(index));
}

inline void RandomRun::snapshot_or_drop() {
  const std::string name = "s" + std::to_string(below(3));
  if (snapshots_.count(name) != 0) {
    ASSERT_OK(store_->drop(name).wait());
    snapshots_.erase(name);
  } else {
    ASSERT_OK(store_->snapshot(name).wait());
    snapshots_[name] = state_;
    made_durable();
  }
}

inline void RandomRun::compare_a_read() {
  if (state_.empty()) return;
  const auto object = std::next(state_.begin(), static_cast<ptrdiff_t>(below(state_.size())));
  const Bytes& bytes = object->second.bytes;
  if (bytes.empty()) return;
  const size_t offset = below(bytes.size());
  Bytes into(below(bytes.size() - offset) + 1);
  ASSERT_OK(store_->read(object->first, offset, slice_of(into)).wait());
  ASSERT_EQ(std::memcmp(into.data(), bytes.data() + offset, into.size()), 0)
      << object->first << " at " << offset;
}

inline void RandomRun::run(int operations) {
  history_[0] = {};
  ASSERT_NO_FATAL_FAILURE(reopen(true));
  for (int i = 0; i < operations; ++i) {
    SCOPED_TRACE("operation " + std::to_string(i));
    const uint64_t kind = below(100);
    if (kind < 10 && open_.size() < 3) {
      open_.push_back({std::move(*store_->begin()), {}});
    } else if (kind < 70 && !open_.empty()) {
      ASSERT_NO_FATAL_FAILURE(one_change(open_[below(open_.size())]));
    } else if (kind < 80 && !open_.empty()) {
      ASSERT_NO_FATAL_FAILURE(commit(below(open_.size())));
    } else if (kind < 83 && !open_.empty()) {
      abandon(below(open_.size()));
    } else if (kind < 87 && store_->features().snapshots) {
      ASSERT_NO_FATAL_FAILURE(snapshot_or_drop());
    } else if (kind < 90) {
      ASSERT_TRUE(holds(*store_, state_));
      for (const auto& [name, state] : snapshots_)
        ASSERT_TRUE(holds(*store_, state, name)) << "snapshot " << name;
    } else if (kind < 92 && world_.persists()) {
      ASSERT_NO_FATAL_FAILURE(reopen(false));
      // Deferred commits may be lost, from the newest backwards; what was durable may not.
      version_ = store_->info().committed;
      ASSERT_EQ(history_.count(version_), 1U)
          << "version " << version_ << " is not one that could come back";
      state_ = history_[version_];
      history_ = {{version_, state_}};
      ASSERT_TRUE(holds(*store_, state_));
    } else {
      ASSERT_NO_FATAL_FAILURE(compare_a_read());
    }
  }
  open_.clear();
  ASSERT_TRUE(holds(*store_, state_));
}

}  // namespace stoker
