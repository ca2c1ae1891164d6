#include "stoker/io/buffered.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>
#include <vector>

#include "stoker/base/fd.h"

namespace stoker {
namespace {

class Buffered : public testing::Test {
 protected:
  void SetUp() override {
    char path[] = "buffered-test-XXXXXX";
    file_ = Fd(mkstemp(path));
    ASSERT_GE(file_.get(), 0);
    unlink(path);
    for (int i = 0; i < 100'000; ++i) text_ += std::to_string(i);
    ASSERT_EQ(write(file_.get(), text_.data(), text_.size()), static_cast<ssize_t>(text_.size()));
  }
  Fd file_;
  std::string text_;
};

TEST_F(Buffered, ManyMoreReadsThanDepthAllArrive) {
  BufferedReader reader(4);
  std::string memory(1000 * 37, '.');
  std::vector<BufferedRead> reads;
  for (size_t i = 0; i < 1000; ++i) {
    reads.push_back({.fd = file_.get(),
                     .offset = (i * 7919) % (text_.size() - 37),
                     .into = {reinterpret_cast<std::byte*>(memory.data()) + i * 37, 37}});
  }
  reader.run(reads);
  for (size_t i = 0; i < reads.size(); ++i) {
    EXPECT_EQ(reads[i].outcome, 37);
    EXPECT_EQ(memory.substr(i * 37, 37), text_.substr(reads[i].offset, 37)) << i;
  }
}

TEST_F(Buffered, TheEndOfTheFileAndABadFileAreOutcomes) {
  BufferedReader reader(8);
  std::string memory(30, '.');
  auto* const bytes = reinterpret_cast<std::byte*>(memory.data());
  std::vector<BufferedRead> reads{{file_.get(), text_.size() - 3, {bytes, 10}},
                                  {-1, 0, {bytes + 10, 10}},
                                  {file_.get(), text_.size() + 5, {bytes + 20, 10}}};
  reader.run(reads);
  EXPECT_EQ(reads[0].outcome, 3);
  EXPECT_EQ(memory.substr(0, 4), text_.substr(text_.size() - 3) + ".");
  EXPECT_EQ(reads[1].outcome, -EBADF);
  EXPECT_EQ(reads[2].outcome, 0);
  reader.run({});
}

}  // namespace
}  // namespace stoker
