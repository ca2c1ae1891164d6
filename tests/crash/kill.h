// kill -9 of a process that writes: what the tests of it share.
#pragma once

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <random>
#include <thread>

#include "stoker/base/result.h"

namespace stoker {

// Of what is written one after the other, and numbered: the last that was begun, and the last that
// was acknowledged.
struct Told {
  uint64_t begun = 0, acknowledged = 0;
};

// In the writer: it begins with the n-th, or was acknowledged. False: nobody listens.
inline bool tell(int out, bool acknowledged, uint64_t n) {
  const uint64_t record[2] = {acknowledged ? 1U : 0U, n};
  return write(out, record, sizeof record) == sizeof record;
}

// Runs a writer in a process of its own until it was acknowledged so often, and kills it in the
// midst of something. 0 times: it is killed a few milliseconds after it was started, which is while
// it opens what it writes to.
inline void run_and_kill(const std::function<Status(int out)>& writer, uint64_t times,
                         std::mt19937_64& random, Told& told) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(ends[0]);
    const Status done = writer(ends[1]);
    if (!done) std::fprintf(stderr, "the writer failed: %s\n", done.error().message().c_str());
    _exit(done ? 0 : 1);
  }
  close(ends[1]);
  uint64_t record[2];
  uint64_t seen = 0;
  bool killed = false;
  const auto kill_within = [&](uint64_t microseconds) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % microseconds));
    kill(child, SIGKILL);
    killed = true;
  };
  if (times == 0) kill_within(30'000);
  // also what it said before it was killed
  while (read(ends[0], record, sizeof record) == sizeof record) {
    (record[0] == 0 ? told.begun : told.acknowledged) = record[1];
    seen += record[0];
    if (!killed && seen >= times && record[0] == 0) kill_within(4'000);
  }
  close(ends[0]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(killed && WIFSIGNALED(status)) << "the writer ended by itself with status " << status;
}

// Another one in each run, unless one is given.
inline uint64_t printed_seed() {
  const uint64_t seed = GTEST_FLAG_GET(random_seed) != 0
                            ? static_cast<uint64_t>(GTEST_FLAG_GET(random_seed))
                            : std::random_device{}() & 0x7FFFFFFF;
  std::printf("replay with --gtest_random_seed=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace stoker
