#include <fcntl.h>
#include <gtest/gtest.h>
#include <isa-l/crc.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/base/clock.h"
#include "stoker/base/crc32c.h"
#include "stoker/base/fd.h"
#include "stoker/base/future.h"
#include "stoker/base/holders.h"
#include "stoker/base/log.h"
#include "stoker/base/pool.h"
#include "stoker/base/result.h"
#include "stoker/base/trace.h"

namespace stoker {
namespace {

Result<int> half(int value) {
  if (value % 2 != 0) return fail(Code::invalid_argument, "odd");
  return value / 2;
}

Result<int> quarter(int value) {
  STOKER_ASSIGN(const int once, half(value));
  STOKER_ASSIGN(const int twice, half(once));
  return twice;
}

TEST(Result, CarriesValueOrError) {
  EXPECT_EQ(*quarter(8), 2);
  const auto failed = quarter(6);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, Code::invalid_argument);
  EXPECT_EQ(failed.error().with("key w").message(), "invalid argument: key w: odd");
}

TEST(Error, TheReasonStandsBeforeWhatToDo) {
  EXPECT_EQ(fail(EACCES, "cannot open '{}'; open it as root", "x").sentence(),
            "cannot open 'x' (Permission denied); open it as root");
  EXPECT_EQ(fail(EACCES, "cannot open 'x'; do a; then b").with("key k").message(),
            "no permission: key k: cannot open 'x' (Permission denied); do a; then b");
  // A name may hold what stands between the two, and a word an apostrophe.
  EXPECT_EQ(
      fail(EACCES, "cannot open '{}' of the store's; open it as root", "a; b's; c").sentence(),
      "cannot open 'a; b's; c' of the store's (Permission denied); open it as root");
  EXPECT_EQ(fail(EEXIST, "cannot make '{}'", "a; b").sentence(),
            "cannot make 'a; b' (File exists)");
  // The text names no cure: the usual one of the errno follows.
  EXPECT_EQ(fail(ENOSPC, "cannot write 'x'").sentence(),
            "cannot write 'x' (No space left on device); free some space there, or name another "
            "place");
  EXPECT_EQ(fail(ENOENT, "cannot open 'x'").sentence(),
            "cannot open 'x' (No such file or directory)");
  // No system call failed: the text as it is.
  EXPECT_EQ(fail(Code::busy, "'x' is open; close it").sentence(), "'x' is open; close it");
}

TEST(Error, MapsErrno) {
  EXPECT_EQ(fail(ENOSPC, "x").code, Code::out_of_space);
  EXPECT_EQ(fail(EROFS, "x").code, Code::read_only);
  EXPECT_EQ(fail(EIO, "x").code, Code::io);
}

TEST(Future, ThenRunsBeforeAndAfterCompletion) {
  Promise<int> promise;
  auto future = promise.future();
  auto doubled = future.then([](const Result<int>& r) -> Result<int> { return *r * 2; });
  EXPECT_FALSE(doubled.ready());
  promise.complete(21);
  EXPECT_EQ(*doubled.wait(), 42);
  EXPECT_EQ(*future.then([](const Result<int>& r) -> Result<int> { return *r + 1; }).wait(), 22);
}

TEST(Future, AbandonedPromiseIsCancelled) {
  Future<void> future;
  {
    Promise<void> promise;
    future = promise.future();
  }
  ASSERT_TRUE(future.ready());
  EXPECT_EQ(future.wait().error().code, Code::cancelled);
}

TEST(Future, AllReportsFirstErrorAndCompletesOnce) {
  std::vector<Promise<void>> promises(3);
  std::vector<Future<void>> futures;
  for (auto& promise : promises) futures.push_back(promise.future());
  auto joined = all(futures);
  promises[2].complete(fail(Code::io, "third"));
  promises[0].complete({});
  EXPECT_FALSE(joined.ready());
  promises[1].complete(fail(Code::busy, "second"));
  EXPECT_EQ(joined.wait().error().code, Code::busy);
  EXPECT_TRUE(all({}).wait());
}

TEST(Future, WaitAcrossThreads) {
  for (int round = 0; round < 200; ++round) {
    Promise<int> promise;
    auto future = promise.future();
    std::thread other([p = std::move(promise)]() mutable { p.complete(7); });
    EXPECT_EQ(*future.wait(), 7);
    other.join();
  }
}

TEST(Pool, RunsEverythingBeforeItDies) {
  std::atomic<int> ran{0};
  {
    Pool pool(3);
    for (int i = 0; i < 1000; ++i) pool.run([&] { ++ran; });
  }
  EXPECT_EQ(ran, 1000);
}

TEST(Pool, WhatMayWaitGoesBehindTheRestAndIsNotForgotten) {
  std::string order;  // of the pool's one thread
  {
    Promise<void> begun, gate;
    const Future<void> at_work = begun.future();
    Pool pool(1);
    pool.run([&begun, open = gate.future()] {
      begun.complete(Status());
      (void)open.wait();
    });
    EXPECT_TRUE(at_work.wait());
    for (int i = 0; i < 4; ++i) pool.run_later([&] { order += 'l'; });
    for (int i = 0; i < 16; ++i) pool.run([&] { order += 'n'; });
    gate.complete(Status());
  }
  EXPECT_EQ(order, "nnnnnnnlnnnnnnnlnnll");
}

// What the log was told, as it would print it.
class Heard final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  std::vector<std::string> lines;

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    lines.emplace_back(message.payload.data(), message.payload.size());
  }
  void flush_() override {}
};

TEST(Log, PutsEachWordInItsPlace) {
  const auto heard = std::make_shared<Heard>();
  log().logger().sinks().push_back(heard);
  const std::string name = "b{}c\x1b[2J\n";
  log().warn("nothing {to} fill");
  log().warn("{} of {}: '{}'", 3U, int64_t{-4}, name);
  log().error("{}{}", "a", std::string_view("b"));
  log().logger().sinks().pop_back();
  const std::vector<std::string> expected = {"nothing {to} fill", "3 of -4: 'b{}c\\x1b[2J\\x0a'",
                                             "ab"};
  EXPECT_EQ(heard->lines, expected);
}

TEST(Crc32c, KnownVectorsReferenceAndChaining) {
  EXPECT_EQ(crc32c("123456789", 9), 0xE3069283U);
  EXPECT_EQ(crc32c("", 0), 0U);
  std::mt19937_64 random(1);
  std::string data(100000, 0);
  for (auto& byte : data) byte = static_cast<char>(random());
  for (size_t size : {1UL, 7UL, 8UL, 63UL, 4096UL, 99999UL}) {
    EXPECT_EQ(crc32c(data.data() + 1, size), crc32c_reference(data.data() + 1, size));
    EXPECT_EQ(crc32c(data.data() + size / 3, size - size / 3, crc32c(data.data(), size / 3)),
              crc32c(data.data(), size));
  }
}

#ifdef __x86_64__
// ISA-L chooses one of its forms by the processor; these are by their names, so that each machine
// compares the others too. They are no part of its headers.
extern "C" {
unsigned int crc32_iscsi_00(unsigned char* data, int bytes, unsigned int seed);  // SSE4.2
unsigned int crc32_iscsi_01(unsigned char* data, int bytes, unsigned int seed);  // and pclmulqdq
}

TEST(Crc32c, EveryFormOfIsalEqualsTheReference) {
  using Form = unsigned int (*)(unsigned char*, int, unsigned int);
  std::vector<Form> forms = {crc32_iscsi_base, crc32_iscsi};
  if (__builtin_cpu_supports("sse4.2")) forms.push_back(crc32_iscsi_00);
  if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) {
    forms.push_back(crc32_iscsi_01);
  }
  std::mt19937_64 random(2);
  std::vector<unsigned char> data(9000);
  for (auto& byte : data) byte = static_cast<unsigned char>(random());
  for (const Form form : forms) {
    for (int bytes = 0; bytes < 9000; bytes = bytes < 130 ? bytes + 1 : bytes * 3 / 2) {
      const int begin = bytes % 8;
      const int size = bytes - begin > 0 ? bytes - begin : bytes;
      const uint32_t ours = ~form(data.data() + (bytes - size), size, ~7U);
      EXPECT_EQ(ours, crc32c_reference(data.data() + (bytes - size), static_cast<size_t>(size), 7));
    }
  }
}
#endif

TEST(Bytes, ReaderNeverPassesTheEnd) {
  ByteWriter writer;
  writer.put<uint32_t>(7);
  writer.put_string("abc");
  const auto bytes = std::as_bytes(std::span(writer.bytes()));
  ByteReader whole(bytes);
  EXPECT_EQ(whole.get<uint32_t>(), 7U);
  EXPECT_EQ(whole.get_string(), "abc");
  EXPECT_TRUE(whole.ok());
  for (size_t cut = 0; cut < bytes.size(); ++cut) {
    ByteReader part(bytes.first(cut));
    part.get<uint32_t>();
    part.get_string();
    EXPECT_FALSE(part.ok()) << cut;
  }
}

TEST(Bytes, ParsesAndPrintsSizes) {
  EXPECT_EQ(*parse_bytes("160MiB"), 160 * kMiB);
  EXPECT_EQ(*parse_bytes("1.5 GiB"), 3 * kGiB / 2);
  EXPECT_EQ(*parse_bytes("7GB"), 7000000000U);
  EXPECT_EQ(*parse_bytes("4096"), 4096U);
  EXPECT_FALSE(parse_bytes("lots"));
  EXPECT_FALSE(parse_bytes("-1"));
  EXPECT_FALSE(parse_bytes("5 parsecs"));
  EXPECT_EQ(human_bytes(3 * kGiB / 2), "1.50 GiB");
}

TEST(Clock, VirtualMovesOnlyWhenTold) {
  VirtualClock clock;
  EXPECT_EQ(clock.now_ns(), 0U);
  clock.advance_to(5);
  EXPECT_EQ(clock.now_ns(), 5U);
  const uint64_t before = Clock::real().now_ns();
  EXPECT_LE(before, Clock::real().now_ns());
}

}  // namespace
TEST(Trace, KeepsSpansOnlyWhileItIsOnAndNoMoreThanItWasGivenRoomFor) {
  Trace trace;
  trace.add({.track = "disk", .name = "before"});
  EXPECT_TRUE(trace.stop().first.empty());
  trace.start(2);
  int named = 0;
  for (int i = 0; i < 3; ++i) {
    const TraceScope scope(&trace, "kernels", [&] { return "scope " + std::to_string(++named); });
  }
  const auto [spans, dropped] = trace.stop();
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(dropped, 1U);
  EXPECT_EQ(spans[1].name, "scope 2");
  EXPECT_LE(spans[0].begin_ns, spans[0].end_ns);
  EXPECT_EQ(spans[0].thread, spans[1].thread);
  {
    const TraceScope off(&trace, "kernels", [&] { return std::to_string(++named); });
    const TraceScope none(nullptr, "kernels", [&] { return std::to_string(++named); });
  }
  EXPECT_EQ(named, 3);  // nobody makes a name for a trace that is off
}

TEST(Trace, TakesSpansOfManyThreadsWhileItIsStopped) {
  Trace trace;
  trace.start(1 << 20);
  std::atomic<bool> go{true};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (go) trace.add({.track = "disk", .name = "op"});
    });
  }
  while (trace.stop().first.empty()) trace.start(1 << 20);
  go = false;
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE(trace.stop().first.empty());
}

namespace {

// Opens the file and locks it, in another process, until told to end.
class OtherProcess {
 public:
  explicit OtherProcess(const std::string& path) {
    EXPECT_EQ(pipe(ready_.data()), 0);
    EXPECT_EQ(pipe(end_.data()), 0);
    pid_ = fork();
    char byte = 0;
    if (pid_ != 0) {
      ::close(end_[0]);
      EXPECT_EQ(read(ready_[0], &byte, 1), 1);
      return;
    }
    ::close(end_[1]);
    const int fd = ::open(path.c_str(), O_RDWR);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0 && write(ready_[1], &byte, 1) == 1)
      byte += static_cast<char>(read(end_[0], &byte, 1));
    _exit(byte);
  }
  ~OtherProcess() {
    ::close(end_[1]);
    waitpid(pid_, nullptr, 0);
    for (const int fd : ready_) ::close(fd);
  }
  std::string name() const { return "process " + std::to_string(pid_); }

 private:
  std::array<int, 2> ready_{}, end_{};
  pid_t pid_ = -1;
};

}  // namespace

TEST(Holders, TheProcessThatHoldsALockIsNamed) {
  const Fd file(memfd_create("stoker-holders", MFD_CLOEXEC));
  ASSERT_TRUE(file);
  EXPECT_EQ(lock_holder(file.get()), "");
  {
    const OtherProcess other("/proc/self/fd/" + std::to_string(file.get()));
    EXPECT_EQ(lock_holder(file.get()).find(other.name() + " ("), 0U) << lock_holder(file.get());
  }
  ASSERT_EQ(flock(file.get(), LOCK_EX | LOCK_NB), 0);
  EXPECT_EQ(lock_holder(file.get()), "this process");
}

TEST(Holders, AnotherProcessThatHasAFileOpenIsNamed) {
  const std::string path = testing::TempDir() + "holders-" + std::to_string(getpid());
  const Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  ASSERT_TRUE(file);
  EXPECT_EQ(opener_of(path), "") << "we have it open ourselves: nobody is in the way";
  EXPECT_EQ(opener_of(path + "-none"), "");
  {
    const OtherProcess other(path);
    EXPECT_EQ(opener_of(path).find(other.name() + " ("), 0U) << opener_of(path);
  }
  EXPECT_EQ(opener_of(path), "");
  unlink(path.c_str());
}

}  // namespace stoker
