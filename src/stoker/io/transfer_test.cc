#include "stoker/io/transfer.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "stoker/base/bytes.h"

namespace stoker {
namespace {

class TransferTest : public ::testing::Test {
 protected:
  Op& begin(Op::Kind kind, size_t bytes) {
    op_ = Op{};
    op_.kind = kind;
    op_.bytes = Slice{memory_, bytes};
    if (kind == Op::Kind::sync) op_.bytes = {};
    EXPECT_TRUE(check_op(op_, kIoAlign, "file"));
    return op_;
  }
  bool step(int64_t outcome) { return advance(op_, outcome, "file", counters_); }

  alignas(kIoAlign) std::byte memory_[16384];
  Op op_;
  IoCounters counters_;
};

TEST_F(TransferTest, AWholeTransferIsDoneAndCounted) {
  begin(Op::Kind::read, 8192);
  EXPECT_TRUE(step(8192));
  EXPECT_EQ(*op_.result, 8192U);
  EXPECT_EQ(counters_.reads.get(), 1U);
  EXPECT_EQ(counters_.read_bytes.get(), 8192U);
  begin(Op::Kind::sync, 0);
  EXPECT_TRUE(step(0));
  EXPECT_EQ(counters_.syncs.get(), 1U);
}

TEST_F(TransferTest, AShortTransferIsContinuedFromASector) {
  for (const Op::Kind kind : {Op::Kind::read, Op::Kind::write}) {
    begin(kind, 16384);
    EXPECT_FALSE(step(4096));
    EXPECT_EQ(op_.moved, 4096U);
    EXPECT_FALSE(step(1000));  // the odd rest is moved again
    EXPECT_EQ(op_.moved, 4096U + 512U);
    EXPECT_TRUE(step(16384 - 4096 - 512));
    EXPECT_EQ(*op_.result, 16384U);
  }
  EXPECT_EQ(counters_.short_transfers.get(), 4U);
  EXPECT_EQ(counters_.written_bytes.get(), 16384U);
}

TEST_F(TransferTest, InterruptedCallsAreRepeated) {
  begin(Op::Kind::write, 4096);
  EXPECT_FALSE(step(-EINTR));
  EXPECT_FALSE(step(-EAGAIN));
  EXPECT_EQ(op_.moved, 0U);
  EXPECT_TRUE(step(4096));
  EXPECT_TRUE(op_.result);
  EXPECT_EQ(counters_.retries.get(), 2U);
}

TEST_F(TransferTest, NoProgressIsAnErrorAndNotALoop) {
  for (const int64_t moved : {0, 1, 511}) {
    begin(Op::Kind::read, 8192);
    EXPECT_FALSE(step(4096));
    EXPECT_TRUE(step(moved));
    ASSERT_FALSE(op_.result);
    EXPECT_EQ(op_.result.error().code, Code::io);
    EXPECT_NE(op_.result.error().what.find("ends before"), std::string::npos);
  }
  begin(Op::Kind::write, 8192);
  EXPECT_TRUE(step(0));
  EXPECT_FALSE(op_.result);
  EXPECT_EQ(counters_.reads.get() + counters_.writes.get(), 0U);
}

TEST_F(TransferTest, ErrorsNameTheFileAndTheirCause) {
  begin(Op::Kind::write, 8192);
  EXPECT_TRUE(step(-ENOSPC));
  ASSERT_FALSE(op_.result);
  EXPECT_EQ(op_.result.error().code, Code::out_of_space);
  EXPECT_NE(op_.result.error().message().find("write of 8192 bytes at 0 of 'file'"),
            std::string::npos)
      << op_.result.error().message();
  begin(Op::Kind::read, 4096);
  EXPECT_TRUE(step(-EIO));
  EXPECT_EQ(op_.result.error().code, Code::io);
  EXPECT_EQ(op_.result.error().sys_errno, EIO);
}

}  // namespace
}  // namespace stoker
