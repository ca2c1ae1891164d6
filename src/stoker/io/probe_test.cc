#include "stoker/io/probe.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "stoker/base/bytes.h"

namespace stoker {
namespace {

class ProbeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  const std::string folder_ = ::testing::TempDir() + "probe";
};

TEST_F(ProbeTest, MeasuresKeepsAndLeavesNothingElse) {
  std::vector<std::string> told;
  const auto probe =
      run_probe(folder_, {.seconds = 1, .progress = [&](std::string_view doing, double fraction) {
                            told.emplace_back(doing);
                            EXPECT_GE(fraction, 0);
                            EXPECT_LE(fraction, 1);
                          }});
  ASSERT_TRUE(probe) << probe.error().message();
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
  EXPECT_GT(probe->best(Load::Kind::read), 0);
  EXPECT_GT(probe->first_write_bytes_per_second, 0);
  EXPECT_GE(told.size(), 3U);
  EXPECT_EQ(told.back(), "done");
  ASSERT_TRUE(save_probe(folder_, *probe));
  const auto back = load_probe(folder_);
  ASSERT_TRUE(back) << back.error().message();
  EXPECT_EQ(probe_json(*back), probe_json(*probe));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

TEST_F(ProbeTest, ErrorsAreSentences) {
  const auto missing = run_probe(folder_ + "/none");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::not_found);
  std::ofstream(folder_ + "/file") << "x";
  EXPECT_EQ(run_probe(folder_ + "/file").error().code, Code::invalid_argument);
  EXPECT_EQ(run_probe(folder_, {.engine = "floppy"}).error().code, Code::invalid_argument);
  EXPECT_FALSE(save_probe(folder_ + "/none", Probe{}));
}

TEST_F(ProbeTest, ReadsBackOnlyWhatItWrote) {
  EXPECT_EQ(load_probe(folder_).error().code, Code::not_found);
  const auto write = [&](const std::string& text) { std::ofstream(probe_path(folder_)) << text; };
  write("{");
  EXPECT_EQ(load_probe(folder_).error().code, Code::corruption);
  write("[]");
  EXPECT_EQ(load_probe(folder_).error().code, Code::corruption);
  write(R"({"version": 2})");
  EXPECT_EQ(load_probe(folder_).error().code, Code::mismatch);
  write(R"({"version": 1, "engine": 3})");
  EXPECT_EQ(load_probe(folder_).error().code, Code::corruption);
  Probe probe;
  probe.points.push_back({Load::Kind::mixed, 4096, 1, 1e9, 10});
  std::string text = probe_json(probe);
  text.replace(text.find("\"op\": \"mixed\""), 13, "\"op\": \"mixup\"");
  write(text);
  EXPECT_EQ(load_probe(folder_).error().code, Code::corruption);
}

TEST(Load, RefusesNonsenseAndMovesExactlyOnePass) {
  auto loop = std::move(*Loop::make(std::move(*make_engine("auto", 8))));
  const std::string path = ::testing::TempDir() + "load";
  std::filesystem::remove(path);
  const auto file = loop->open({.path = path, .create = true, .reserve_bytes = 2 * kMiB});
  std::filesystem::remove(path);
  ASSERT_TRUE(file) << file.error().message();
  Budget budget(4 * kMiB);
  const auto arena = std::move(*Arena::make(2 * kMiB, budget));
  const Buffer buffer = std::move(*arena->take(1 * kMiB));
  EXPECT_FALSE(run_load(*loop, file->id, buffer.slice(), {.depth = 0, .file_bytes = 2 * kMiB}));
  EXPECT_FALSE(run_load(*loop, file->id, buffer.slice(),
                        {.block_bytes = kMiB, .depth = 2, .file_bytes = 2 * kMiB}));
  const auto result = run_load(*loop, file->id, buffer.slice(),
                               {Load::Kind::mixed, 64 * kKiB, 8, 1 * kMiB, 0, 1 * kMiB});
  ASSERT_TRUE(result) << result.error().message();
  EXPECT_EQ(result->operations, 16U);
  EXPECT_EQ(result->read_bytes, 512 * kKiB);
  EXPECT_EQ(result->written_bytes, 512 * kKiB);
  // beyond the end
  EXPECT_FALSE(
      run_load(*loop, file->id, buffer.slice(), {Load::Kind::read, 64 * kKiB, 8, 8 * kMiB}));
}

}  // namespace
}  // namespace stoker
