// kill -9 of a process that writes to nine folders; then any three of them are taken away, and every acknowledged byte reads back. Some of the kills
// happen to a store that three folders had left, or that had just got them back and was resyncing them.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>

#include "kill.h"
#include "lab.h"
#include "stoker/store/coded/store.h"
#include "stoker/store/local/fsck.h"

namespace stoker {
namespace {

constexpr size_t kObjects = 4;
constexpr size_t kBytes = 600'000;

// The n-th commit, the same in every run: now a part of an object, now a whole one, now two objects at once.
struct Step {
  size_t object, offset, bytes;
  bool both;
};
Step step_of(uint64_t n) {
  std::mt19937_64 random(n);
  Step step{random() % kObjects, 0, kBytes, false};
  const uint64_t kind = random() % 10;
  if (kind == 0) return step;
  step.both = kind == 1;
  step.offset = random() % (kBytes - 1);
  step.bytes = std::min<size_t>(random() % 40'000 + 1, kBytes - step.offset);
  if (kind < 7) {
    step.offset = align_down(step.offset, 4096);
    step.bytes = std::min<size_t>(4096 << random() % 3, kBytes - step.offset);
  }
  return step;
}

std::string key_of(size_t object) { return "object/" + std::to_string(object); }

void apply(std::vector<Bytes>& model, uint64_t n) {
  const Step step = step_of(n);
  const Bytes bytes = pattern(step.bytes, n);
  for (size_t object = 0; object < kObjects; ++object) {
    if (object != step.object && !(step.both && object == (step.object + 1) % kObjects)) continue;
    std::memcpy(model[object].data() + step.offset, bytes.data(), bytes.size());
  }
}

Status commit(Store& store, uint64_t n) {
  const Step step = step_of(n);
  Bytes bytes = pattern(step.bytes, n);
  STOKER_ASSIGN(auto change, store.begin());
  for (size_t object = 0; object < kObjects; ++object) {
    if (object != step.object && !(step.both && object == (step.object + 1) % kObjects)) continue;
    STOKER_TRY(change->resize(key_of(object), kBytes));
    STOKER_TRY(change->write(key_of(object), step.offset, slice_of(bytes)).wait());
  }
  const auto version = change->commit(Durability::durable).wait();
  return version ? Status() : Status(version.error());
}

// Commits are one after the other, so the store is as after some number of them, from the last acknowledged to the last begun.
Status check(Store& store, uint64_t acknowledged, uint64_t begun) {
  const uint64_t found = store.info().committed;
  if (found < acknowledged + 1 || found > begun + 1) return make_error(Code::corruption, "the store is as after commit " + std::to_string(found) + ", acknowledged were " + std::to_string(acknowledged + 1) + ", begun " + std::to_string(begun + 1));
  std::vector<Bytes> model(kObjects, Bytes(kBytes));
  for (uint64_t n = 1; n < found; ++n) apply(model, n);
  for (size_t object = 0; object < kObjects; ++object) {
    if (read_all(store, key_of(object)) != model[object]) return make_error(Code::corruption, key_of(object) + " holds other bytes than were acknowledged");
  }
  return {};
}

constexpr size_t kShards = 9;

CodedPlan plan_in(const std::string& folder) {
  CodedPlan plan{6, 3, {}};
  for (size_t i = 0; i < kShards; ++i) plan.paths.push_back(folder + "/d" + std::to_string(i));
  return plan;
}

CodedOptions small_logs() {
  CodedOptions coded;
  coded.segment_bytes = 1 << 20;
  coded.segments = 6;
  return coded;
}

// In the child: commits until it is killed, and tells of each by a record in the pipe.
Status write_on(const std::string& folder, int out) {
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make({.cpu_threads = 1}));
  StoreOptions options;
  options.create = true;
  options.capacity_bytes = 8 << 20;
  options.chunk_bytes = 64 << 10;
  options.objects_max = 64;
  options.same_disk = true;
  options.holder = "the writer of a test";
  STOKER_ASSIGN(const auto store, open_coded_store(plan_in(folder), runtime->runtime(), options, small_logs()));
  if (store->info().committed == 0) {
    STOKER_ASSIGN(auto change, store->begin());
    for (size_t object = 0; object < kObjects; ++object) STOKER_TRY(change->resize(key_of(object), kBytes));
    STOKER_TRY(change->commit(Durability::durable).wait());
  }
  for (uint64_t n = store->info().committed;; ++n) {
    if (!tell(out, false, n)) return {};
    STOKER_TRY(commit(*store, n));
    if (!tell(out, true, n)) return {};
  }
}

void away(const std::string& folder, const std::vector<size_t>& shards, bool back) {
  for (const size_t shard : shards) {
    const std::string here = folder + "/d" + std::to_string(shard);
    const std::string there = folder + "/gone" + std::to_string(shard);
    std::filesystem::rename(back ? there : here, back ? here : there);
  }
}

Status check_without(const std::string& folder, const Told& told) {
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make({.cpu_threads = 1}));
  StoreOptions options;
  options.read_only = true;
  STOKER_ASSIGN(const auto report, fsck_coded_store(plan_in(folder), runtime->runtime(), {.quick = true, .progress = {}}, small_logs()));
  if (report.problems.size() > 3) return make_error(Code::busy, "more than three shards do not count: some are not resynced yet");
  STOKER_ASSIGN(const auto store, open_coded_store(plan_in(folder), runtime->runtime(), options, small_logs()));
  return check(*store, told.acknowledged, told.begun);
}

TEST(CodedKill, AnyThreeOfNineFoldersMayGoAfterAKill) {
  const std::string folder = testing::TempDir() + "coded_kill." + std::to_string(getpid());  // two runs at once do not meet
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  std::mt19937_64 random(printed_seed());
  Told told;
  uint64_t commits = 0;
  const auto begun = std::chrono::steady_clock::now();
  const uint64_t kills = soak_factor > 1 ? 60 : 12;
  uint64_t done = 0;
  std::vector<size_t> gone;
  for (; done < kills; ++done) {
    // A slow machine does fewer in CI.
    if (soak_factor == 1 && done >= 5 && std::chrono::steady_clock::now() - begun > std::chrono::seconds(12)) break;
    ASSERT_NO_FATAL_FAILURE(run_and_kill([&](int out) { return write_on(folder, out); }, 5 + random() % 60, random, told));
    if (!gone.empty() && random() % 2 == 0) {
      away(folder, gone, true);  // stale now: the next writer resyncs them beside its work
      gone.clear();
      continue;
    }
    if (gone.empty()) {
      std::vector<size_t> shards;
      for (size_t i = 0; i < kShards; ++i) shards.push_back(i);
      std::shuffle(shards.begin(), shards.end(), random);
      shards.resize(3);
      // Those that came back a moment ago may not be resynced yet: then they are among the three.
      away(folder, shards, false);
      auto checked = check_without(folder, told);
      const bool resyncing = !checked && checked.error().code == Code::busy;
      away(folder, shards, true);
      if (resyncing) checked = check_without(folder, told);
      ASSERT_TRUE(checked) << checked.error().message();
      if (!resyncing && random() % 2 == 0) {
        gone = shards;
        away(folder, gone, false);
      }
    } else {
      const auto checked = check_without(folder, told);
      ASSERT_TRUE(checked) << checked.error().message();
    }
    commits = told.acknowledged;
  }
  if (!gone.empty()) away(folder, gone, true);
  std::printf("coded kill: %llu kills, %llu commits acknowledged\n", static_cast<unsigned long long>(done), static_cast<unsigned long long>(commits));
  EXPECT_GE(done, 5U);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace stoker
