// kill -9 of a process that writes to nine folders, 20 times; after each kill three of them are
// away, and every acknowledged byte reads back. Which three is drawn; only where those that came
// back before are not resynced yet, it is them again. Some of the kills happen to a store that
// three folders had left, or that had just got them back and was resyncing them, and some while it
// is being opened. At the end three folders are deleted, with nothing between that and the last
// kill, everything is read, `repair --replace` makes them again, and three others are deleted.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <string>
#include <utility>

#include "kill.h"
#include "lab.h"
#include "stoker/store/coded/store.h"
#include "stoker/store/local/fsck.h"

namespace stoker {
namespace {

constexpr size_t kObjects = 4;
constexpr size_t kBytes = 600'000;

// The n-th commit, the same in every run: now a part of an object, now a whole one, now two objects
// at once.
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

// Commits are one after the other, so the store is as after some number of them, from the last
// acknowledged to the last begun.
Status check(Store& store, uint64_t acknowledged, uint64_t begun) {
  const uint64_t found = store.info().committed;
  if (found < acknowledged + 1 || found > begun + 1)
    return fail(Code::corruption, "the store is as after commit {}, acknowledged were {}, begun {}",
                found, acknowledged + 1, begun + 1);
  std::vector<Bytes> model(kObjects, Bytes(kBytes));
  for (uint64_t n = 1; n < found; ++n) apply(model, n);
  for (size_t object = 0; object < kObjects; ++object) {
    if (read_all(store, key_of(object)) != model[object])
      return fail(Code::corruption, "{} holds other bytes than were acknowledged", key_of(object));
  }
  return {};
}

constexpr size_t kShards = 9;

CodedPlan plan_in(const std::string& folder) {
  CodedPlan plan{6, 3, {}};
  for (size_t i = 0; i < kShards; ++i) plan.paths.push_back(folder + "/d" + std::to_string(i));
  return plan;
}

// Opening reads them, several times a cycle; and small ones are full, and folded, often.
CodedOptions small_logs() {
  CodedOptions coded;
  coded.segment_bytes = 256 << 10;
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
  STOKER_ASSIGN(const auto store,
                open_coded_store(plan_in(folder), runtime->runtime(), options, small_logs()));
  if (store->info().committed == 0) {
    STOKER_ASSIGN(auto change, store->begin());
    for (size_t object = 0; object < kObjects; ++object)
      STOKER_TRY(change->resize(key_of(object), kBytes));
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
  STOKER_ASSIGN(const auto report, fsck_coded_store(plan_in(folder), runtime->runtime(),
                                                    {.quick = true, .progress = {}}, small_logs()));
  if (report.problems.size() > 3)
    return fail(Code::busy, "more than three shards do not count: some are not resynced yet");
  STOKER_ASSIGN(const auto store,
                open_coded_store(plan_in(folder), runtime->runtime(), options, small_logs()));
  return check(*store, told.acknowledged, told.begun);
}

// As `stoker repair --replace` does it.
Status mend(const std::string& folder, const std::vector<size_t>& replaced) {
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make({.cpu_threads = 1}));
  RepairOptions options;
  for (const size_t shard : replaced) options.replace.push_back(plan_in(folder).paths[shard]);
  options.same_disk = true;
  STOKER_ASSIGN(const auto report,
                repair_coded_store(plan_in(folder), runtime->runtime(), options, small_logs()));
  if (!report.problems.empty()) return fail(Code::corruption, "repair: {}", report.problems[0]);
  return {};
}

Status nothing_is_wrong(const std::string& folder) {
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make({.cpu_threads = 1}));
  STOKER_ASSIGN(const auto report,
                fsck_coded_store(plan_in(folder), runtime->runtime(), {}, small_logs()));
  if (!report.problems.empty()) return fail(Code::corruption, "fsck: {}", report.problems[0]);
  return {};
}

std::vector<size_t> shuffled_shards(std::mt19937_64& random) {
  std::vector<size_t> shards(kShards);
  std::iota(shards.begin(), shards.end(), 0);
  std::shuffle(shards.begin(), shards.end(), random);
  return shards;
}

void remove_folders(const std::string& folder, const std::vector<size_t>& shards) {
  for (const size_t shard : shards)
    ASSERT_GT(std::filesystem::remove_all(plan_in(folder).paths[shard]), 0U);
}

TEST(CodedKill, AnyThreeOfNineFoldersMayGoAfterAKill) {
  // two runs at once do not meet
  const std::string folder = testing::TempDir() + "coded_kill." + std::to_string(getpid());
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  std::mt19937_64 random(printed_seed());
  Told told;
  const uint64_t kills = soak_factor > 1 ? 60 : 20;
  uint64_t without_three = 0, resyncing = 0;
  std::vector<size_t> gone, came_back;
  for (uint64_t done = 0; done < kills; ++done) {
    const bool opening = done % 5 == 4;
    ASSERT_NO_FATAL_FAILURE(run_and_kill([&](int out) { return write_on(folder, out); },
                                         opening ? 0 : 3 + random() % 24, random, told))
        << "kill " << done;
    if (gone.empty()) {
      gone = shuffled_shards(random);
      gone.resize(3);
      away(folder, gone, false);
    }
    auto checked = check_without(folder, told);
    if (!checked && checked.error().code == Code::busy) {
      // Those that came back a moment ago are not resynced yet: they are the three.
      ASSERT_FALSE(came_back.empty());
      ++resyncing;
      away(folder, gone, true);
      gone = came_back;
      away(folder, gone, false);
      checked = check_without(folder, told);
    }
    ASSERT_TRUE(checked) << "kill " << done << ": " << checked.error().message();
    for (const size_t shard : gone)
      without_three += std::filesystem::exists(plan_in(folder).paths[shard]) ? 0 : 1;
    if (done + 1 < kills && random() % 2 == 0) {
      // stale, if a writer was there meanwhile: the next one resyncs them beside its work
      away(folder, gone, true);
      came_back = std::exchange(gone, {});
    }
  }
  std::printf(
      "coded kill: %llu kills, %llu commits acknowledged; %llu times those were away that were "
      "being resynced\n",
      static_cast<unsigned long long>(kills), static_cast<unsigned long long>(told.acknowledged),
      static_cast<unsigned long long>(resyncing));
  EXPECT_EQ(without_three, 3 * kills) << "every time";

  // They do not come back: mended from what the last kill left on the six others.
  for (const size_t shard : gone)
    ASSERT_GT(std::filesystem::remove_all(folder + "/gone" + std::to_string(shard)), 0U);
  Status whole = mend(folder, gone);
  ASSERT_TRUE(whole) << whole.error().message();
  const std::vector<size_t> all = shuffled_shards(random);
  for (size_t first = 0; first < kShards; first += 3) {
    const std::vector<size_t> three(all.begin() + static_cast<ptrdiff_t>(first),
                                    all.begin() + static_cast<ptrdiff_t>(first) + 3);
    ASSERT_NO_FATAL_FAILURE(remove_folders(folder, three));
    whole = check_without(folder, told);
    ASSERT_TRUE(whole) << "three folders deleted: " << whole.error().message();
    whole = mend(folder, three);
    ASSERT_TRUE(whole) << whole.error().message();
  }
  whole = nothing_is_wrong(folder);  // and none of the nine is as it was written
  ASSERT_TRUE(whole) << whole.error().message();
  whole = check_without(folder, told);
  ASSERT_TRUE(whole) << whole.error().message();
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace stoker
