// The engines of this machine against the shared suite, and what only they do: falling back,
// registering.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
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
  return {.name = name,
          .make = [name](uint32_t depth) { return make_engine(name, depth); },
          .small_disk = mount_small_disk};
}

// A machine that refuses io_uring tests what it would use.
std::vector<EngineUnderTest> engines_here() {
  std::vector<EngineUnderTest> engines = {engine("posix")};
  if (make_engine("uring", 4)) engines.push_back(engine("uring"));
  return engines;
}

INSTANTIATE_TEST_SUITE_P(Machine, EngineConformance, ::testing::ValuesIn(engines_here()),
                         engine_name);

TEST(MakeEngine, KnowsItsNames) {
  const auto best = make_engine();
  ASSERT_TRUE(best) << best.error().message();
  EXPECT_EQ((*best)->traits().name, make_engine("uring", 4) ? "uring" : "posix");
  const auto wrong = make_engine("floppy");
  ASSERT_FALSE(wrong);
  EXPECT_EQ(wrong.error().code, Code::invalid_argument);
}

// Runs `body` in a child of its own, which may spoil itself; what it returns must be 0.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Makes io_uring_setup fail with `error` from now on, as a container's filter does.
bool forbid_uring(int error) {
  const std::array<sock_filter, 4> program = {
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter{program.size(), const_cast<sock_filter*>(program.data())};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

TEST(MakeEngine, FallsBackToPosixWhereUringIsRefused) {
  for (const int error : {EPERM, ENOSYS}) {
    EXPECT_EQ(in_child([error] {
                if (!forbid_uring(error)) return 2;
                const auto best = make_engine("auto", 4);
                if (!best || (*best)->traits().name != "posix") return 3;
                const auto uring = make_engine("uring", 4);
                return uring || uring.error().code != Code::unsupported ||
                               uring.error().sys_errno != error
                           ? 4
                           : 0;
              }),
              0);
  }
}

// With little locked memory allowed to an ordinary user the kernel has room for the rings but
// refuses to register the arena; transfers work all the same.
TEST(Uring, WorksWhereMemoryCannotBeRegistered) {
  if (!make_engine("uring", 4)) GTEST_SKIP() << "io_uring is refused here";
  EXPECT_EQ(in_child([] {
              const rlimit little{1 * kMiB, 1 * kMiB};
              setrlimit(RLIMIT_MEMLOCK, &little);
              if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) return 2;
              const auto made = make_engine("uring", 4);
              Budget budget{64 * kMiB};
              const auto arena = Arena::make(8 * kMiB, budget);
              if (!made || !arena || !(*made)->adopt(**arena)) return 3;
              std::string name = ::testing::TempDir() + "unregistered-XXXXXX";
              if (mkstemp(name.data()) < 0 || truncate(name.c_str(), 64 * kKiB) != 0) return 4;
              const auto file = (*made)->open({.path = name});
              unlink(name.c_str());
              if (!file) return 5;
              const Buffer buffer = std::move(*(*arena)->take(64 * kKiB));
              Op op;
              op.file = file->id;
              op.bytes = buffer.slice();
              op.done = [](Op&) noexcept {};
              Op* ops[] = {&op};
              if ((*made)->submit(ops) != 1) return 6;
              for (int i = 0; i < 100; ++i) {
                if ((*made)->poll(100'000'000) == 1) return op.result ? 0 : 7;
              }
              return 8;
            }),
            0);
}

}  // namespace
}  // namespace stoker
