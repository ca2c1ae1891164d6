// Traces on real files: the counts are those of the model, every byte is compared after a node was
// rebuilt, and nothing is left behind.
#include "curm/file_replay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "curm/generator.h"
#include "curm/scheme_switch.h"
#include "curm/shard_cluster.h"

namespace stoker::curm {
namespace {

namespace fs = std::filesystem;

class FileReplay : public testing::TestWithParam<std::string_view> {
 protected:
  FileReplay() : folder_(testing::TempDir() + "file_replay." + std::to_string(getpid())) {
    files_.folder = folder_;
  }
  ~FileReplay() override { fs::remove_all(folder_); }
  const std::string folder_;
  FileReplayOptions files_;
};
INSTANTIATE_TEST_SUITE_P(All, FileReplay, testing::ValuesIn(kSchemes), [](const auto& each) {
  std::string name(each.param);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

Trace small_trace() {
  Trace trace = generate(*find_profile("hm"), 1, 60);
  for (Request& request : trace.requests) request.offset %= 4 << 20;  // few stripes, much overlap
  return trace;
}

ReplayOptions small_options(int clients) {
  ReplayOptions options;
  options.nodes = 10;
  options.clients = clients;
  options.chunk_bytes = 64 << 10;
  options.log_bytes = 256 << 10;
  options.reserved_bytes = 16 << 10;
  return options;
}

TEST_P(FileReplay, OneClientCountsWhatTheModelCounts) {
  const Trace trace = small_trace();
  ReplayOptions options = small_options(1);
  // windows of 256 KiB: some stripe is hot
  if (GetParam() == "curm-reserve") options.reserved_bytes = 4 << 10;
  const auto modelled = replay(trace, GetParam(), Form::safe, options);
  const auto done = replay_on_files(trace, GetParam(), options, files_);
  ASSERT_TRUE(done) << done.error().message();
  const Counts& counts = done->result.counts;
  const Counts& expected = modelled->counts;
  EXPECT_EQ(done->result.updates, modelled->updates);
  EXPECT_EQ(done->result.update_bytes, modelled->update_bytes);
  EXPECT_EQ(counts.reads, expected.reads);
  EXPECT_EQ(counts.random_writes, expected.random_writes);
  EXPECT_EQ(counts.sequential_writes, expected.sequential_writes);
  EXPECT_EQ(counts.flushes, expected.flushes);
  EXPECT_EQ(counts.messages, expected.messages);
  EXPECT_EQ(counts.round_trips, expected.round_trips);
  EXPECT_EQ(counts.payload_bytes, expected.payload_bytes);
  EXPECT_EQ(counts.framing_bytes, expected.framing_bytes);
  EXPECT_EQ(counts.background_reads, expected.background_reads);
  EXPECT_EQ(counts.background_writes, expected.background_writes);
  EXPECT_EQ(counts.background_payload_bytes, expected.background_payload_bytes);
  EXPECT_EQ(counts.background_framing_bytes, expected.background_framing_bytes);
  EXPECT_EQ(done->result.reserved_peak_bytes, modelled->reserved_peak_bytes);
  EXPECT_EQ(modelled->reserved_peak_bytes > 0, GetParam() == "plr" || GetParam() == "curm-reserve");
  EXPECT_GT(done->result.updates_per_second, 0);
  EXPECT_GT(done->result.recovery_seconds, 0);
  EXPECT_GE(done->result.space_peak_bytes, done->result.space_base_bytes);
  EXPECT_EQ(done->verified_bytes, done->result.space_base_bytes);
  EXPECT_FALSE(fs::exists(folder_ + "/stoker-curm-replay"));
}

TEST_P(FileReplay, ManyClientsLoseNothing) {
  const Trace trace = small_trace();
  const auto done =
      replay_on_files(trace, GetParam(), small_options(12), files_, &ClassTree::shipped());
  ASSERT_TRUE(done) << done.error().message();
  const ReplayResult& result = done->result;
  // they write through, or cut what is longer than a reserve
  if (!GetParam().starts_with("curm") && GetParam() != "plr") {
    EXPECT_EQ(result.counts.flushes, 4 * result.updates);
  }
  EXPECT_GT(done->disk_flushes, 0U);
  EXPECT_GT(result.p50_us, 0);
  EXPECT_LE(result.p50_us, result.p99_us);
  EXPECT_EQ(done->verified_bytes, result.space_base_bytes);
  // What the disks moved holds the payload, in whole blocks, and its frames.
  EXPECT_GE(done->disk_bytes_written + done->disk_bytes_read,
            result.counts.payload_bytes + result.counts.background_payload_bytes);
}

// Before every eighth write its stripe is given the next scheme, while others write and fold; every
// block is right in the end, and so is what stripes go by.
TEST(FileReplaySwitch, SchemesAreChangedWhileOthersWrite) {
  Trace trace = generate(*find_profile("hm"), 1, 240);
  for (Request& request : trace.requests) request.offset %= 4 << 20;
  FileReplayOptions files;
  files.folder = testing::TempDir() + "file_replay_switch." + std::to_string(getpid());
  const auto done = replay_on_files(trace, kSwitch, small_options(12), files);
  ASSERT_TRUE(done) << done.error().message();
  EXPECT_EQ(done->verified_bytes, done->result.space_base_bytes);
  EXPECT_GE(done->changes, std::size(kSchemes));
  for (const std::string_view scheme : kSchemes)
    EXPECT_GT(done->writes_by_scheme.count(std::string(scheme)), 0U) << scheme;
  fs::remove_all(files.folder);
}

// An update of a block is a frame of two blocks in each of 1 + m logs, where nobody else's goes
// along; and nothing else is moved before a fold.
TEST(FileReplayBytes, AnUpdateIsTwoBlocksInEachLog) {
  Trace trace;
  trace.name = "blocks";
  trace.objects = {"0"};
  for (uint64_t i = 0; i < 16; ++i) trace.requests.push_back({i, 0, true, i * 4096, 4096});
  FileReplayOptions files;
  files.folder = testing::TempDir() + "file_replay_bytes." + std::to_string(getpid());
  ReplayOptions options = small_options(1);
  options.log_bytes = 4 << 20;  // segments that hold it all
  const auto done = replay_on_files(trace, "vdl", options, files);
  ASSERT_TRUE(done) << done.error().message();
  const uint64_t begun = 4 * 4096, frames = 16 * 4 * 8192;  // four segments are begun
  // new data out of the log, old data, old parity
  const uint64_t fold_reads = (1 + 1 + 3) * 16 * 4096;
  // of the three parities; of all four
  const uint64_t stages = 3 * (16 * 4096 + 4096), commits = 4 * 4096;
  const uint64_t bases = 4 * (16 * 4096 + 2 * 4096);  // and their headers, twice
  EXPECT_EQ(done->disk_bytes_read, fold_reads);
  EXPECT_EQ(done->disk_bytes_written, begun + frames + stages + commits + bases);
  // the same in turn; bases, then their marks
  EXPECT_EQ(done->disk_flushes, 4 + 16 * 4 + 3 + 4 + 2 * 4);
  fs::remove_all(files.folder);
}

// A lost node is rebuilt in a folder that is empty, missing, or its own; what else is there is left
// alone.
TEST(ShardFolders, OfOthersAreNotTaken) {
  const std::string folder = testing::TempDir() + "shard_folders." + std::to_string(getpid());
  const Geometry geometry{2, 1, 3, 64 << 10, 3};
  auto loop = std::move(*Loop::make(std::move(*make_engine())));
  std::vector<std::string> paths = {folder + "/n0", folder + "/n1", folder + "/n2"};
  ASSERT_TRUE(ShardCluster::make(*loop, paths, geometry, {}));
  const std::string other = folder + "/other";
  fs::create_directories(other);
  for (const char* name : {"head", "data", "log.txt"}) std::ofstream(other + "/" + name) << "mine";
  paths[1] = other;
  const auto refused = ShardCluster::open(*loop, paths, {});
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().what,
              testing::AllOf(testing::HasSubstr(other), testing::HasSubstr("Nothing was changed")));
  for (const char* name : {"head", "data", "log.txt"})
    EXPECT_EQ(fs::file_size(other + "/" + name), 4U) << name;
  EXPECT_FALSE(fs::exists(other + "/parity"));

  for (const char* name : {"head", "data", "log.txt"}) fs::remove(other + "/" + name);
  std::ofstream(other + "/head").close();  // as a crash leaves it
  const auto taken = ShardCluster::open(*loop, paths, {});
  ASSERT_TRUE(taken) << taken.error().message();
  EXPECT_EQ((*taken)->replaced(), std::set<NodeId>{1});
  fs::remove_all(folder);
}

// What stands under the name and is not the replay's own is not deleted.
TEST(FileReplayRefusals, WhatIsThereIsLeftAlone) {
  FileReplayOptions files;
  files.folder = testing::TempDir() + "file_replay_there." + std::to_string(getpid());
  fs::create_directories(files.folder);
  std::ofstream(files.folder + "/stoker-curm-replay") << "mine";
  EXPECT_FALSE(replay_on_files(small_trace(), "vdl", small_options(1), files));
  EXPECT_EQ(fs::file_size(files.folder + "/stoker-curm-replay"), 4U);
  fs::remove_all(files.folder);
}

TEST(FileReplayRefusals, AreSentences) {
  const Trace trace = small_trace();
  FileReplayOptions files;
  files.folder = testing::TempDir() + "file_replay_no." + std::to_string(getpid());
  ReplayOptions huge = small_options(1);
  huge.log_bytes = uint64_t{1} << 50;
  EXPECT_THAT(replay_on_files(trace, "vdl", huge, files).error().what,
              testing::HasSubstr("free some space, give another --dir, or a smaller --log"));
  EXPECT_FALSE(fs::exists(files.folder));
  ReplayOptions few = small_options(1);
  few.nodes = 8;
  EXPECT_THAT(replay_on_files(trace, "vdl", few, files).error().what,
              testing::HasSubstr("needs at least as many nodes as chunks"));
  EXPECT_THAT(replay_on_files(trace, "raid", small_options(1), files).error().what,
              testing::HasSubstr("there is no scheme `raid`"));
  fs::create_directories(files.folder + "/stoker-curm-replay");
  EXPECT_THAT(replay_on_files(trace, "vdl", small_options(1), files).error().what,
              testing::HasSubstr("is there already"));
  EXPECT_TRUE(fs::exists(files.folder + "/stoker-curm-replay"));
  fs::remove_all(files.folder);
}

}  // namespace
}  // namespace stoker::curm
