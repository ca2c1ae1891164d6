// The engines of this machine against the shared suite, and what only they do: falling back, registering.
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stoker/io/loop.h"
#include "stoker/testing/engine_conformance.h"

namespace stoker {
namespace {

// A tmpfs of 1 MiB, where we may mount one.
std::shared_ptr<std::string> mount_small_disk() {
  const std::string at = ::testing::TempDir() + "small-disk-" + std::to_string(getpid());
  std::filesystem::create_directories(at);
  if (mount("none", at.c_str(), "tmpfs", 0, "size=1m") != 0) return nullptr;
  return {new std::string(at), [](std::string* path) {
            umount2(path->c_str(), MNT_DETACH);
            std::filesystem::remove(*path);
            delete path;
          }};
}

EngineUnderTest engine(const std::string& name) {
  return {.name = name, .make = [name](uint32_t depth) { return make_engine(name, depth); }, .small_disk = mount_small_disk};
}

// A machine that refuses io_uring tests what it would use.
std::vector<EngineUnderTest> engines_here() {
  std::vector<EngineUnderTest> engines = {engine("posix")};
  if (make_engine("uring", 4)) engines.push_back(engine("uring"));
  return engines;
}

INSTANTIATE_TEST_SUITE_P(Machine, EngineConformance, ::testing::ValuesIn(engines_here()), engine_name);

TEST(MakeEngine, KnowsItsNames) {
  const auto best = make_engine();
  ASSERT_TRUE(best) << best.error().message();
  EXPECT_EQ((*best)->traits().name, make_engine("uring", 4) ? "uring" : "posix");
  const auto wrong = make_engine("floppy");
  ASSERT_FALSE(wrong);
  EXPECT_EQ(wrong.error().code, Code::invalid_argument);
}

// With little locked memory allowed to an ordinary user the kernel has room for the rings but refuses to register the arena;
// transfers work all the same.
TEST(Uring, WorksWhereMemoryCannotBeRegistered) {
  if (!make_engine("uring", 4)) GTEST_SKIP() << "io_uring is refused here";
  const auto child = fork();
  if (child == 0) {
    const rlimit little{1 * kMiB, 1 * kMiB};
    setrlimit(RLIMIT_MEMLOCK, &little);
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) _exit(2);
    auto made = make_engine("uring", 4);
    Budget budget{64 * kMiB};
    auto arena = Arena::make(8 * kMiB, budget);
    if (!made || !arena || !(*made)->adopt(**arena)) _exit(3);
    std::string name = ::testing::TempDir() + "unregistered-XXXXXX";
    if (mkstemp(name.data()) < 0 || truncate(name.c_str(), 64 * kKiB) != 0) _exit(4);
    const auto file = (*made)->open({.path = name});
    unlink(name.c_str());
    if (!file) _exit(5);
    auto buffer = std::move(*(*arena)->take(64 * kKiB));
    Op op;
    op.file = file->id;
    op.bytes = buffer.slice();
    op.done = [](Op&) noexcept {};
    Op* ops[] = {&op};
    if ((*made)->submit(ops) != 1) _exit(6);
    for (int i = 0; i < 100; ++i) {
      if ((*made)->poll(100'000'000) == 1) _exit(op.result ? 0 : 7);
    }
    _exit(8);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace stoker
