// DirStore: what is special to plain files.
#include <gtest/gtest.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <latch>
#include <string>
#include <thread>

#include "stoker/store/blocking_io.h"
#include "stoker/store/dir/spares.h"
#include "stoker/store/dir/store.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/store_harness.h"

static std::atomic<int> full_for{0};  // calls that find no room
static std::atomic<int> full_says{ENOSPC};
static std::atomic<bool> no_zero_range{false};

// Stands before the C library's.
extern "C" int fallocate64(int fd, int mode, off_t offset, off_t bytes) {
  using Function = int (*)(int, int, off_t, off_t);
  static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "fallocate64"));
  if (no_zero_range && mode != 0) {
    errno = EOPNOTSUPP;
    return -1;
  }
  if (full_for.load() <= 0) return real(fd, mode, offset, bytes);
  --full_for;
  errno = full_says;
  return -1;
}
extern "C" int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  return fallocate64(fd, mode, offset, bytes);
}

namespace stoker {
namespace {

namespace fs = std::filesystem;

// Each test runs on a kernel with openat2 and on one without.
class DirStoreTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    root_ = testing::TempDir() + "dir_store_" + std::to_string(getpid());
    fs::remove_all(root_);
    fs::create_directories(root_ + "/outside");
    runtime_ = std::move(*RuntimeOwner::make({.engine = "posix", .cpu_threads = 2}));
    open();
  }
  void TearDown() override {
    store_.reset();
    runtime_.reset();
    fs::remove_all(root_);
  }
  void open(const StoreOptions& options = {.create = true}, uint64_t spare_bytes = 8 * kMiB) {
    store_.reset();
    auto opened = open_dir_store(root_ + "/in", runtime_->runtime(), options,
                                 {.openat2 = GetParam(), .spare_bytes = spare_bytes});
    ASSERT_OK(opened);
    store_ = std::move(*opened);
  }
  Status put(const std::string& key, Bytes bytes) {
    auto change = std::move(*store_->begin());
    STOKER_TRY(change->resize(key, bytes.size()));
    STOKER_TRY(change->write(key, 0, slice_of(bytes)).wait());
    const auto done = change->commit(Durability::durable).wait();
    return done ? Status() : Status(done.error());
  }
  std::string file(const std::string& name) const { return root_ + "/in/" + name; }
  void write_file(const std::string& path, const std::string& text) { std::ofstream(path) << text; }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& each : fs::recursive_directory_iterator(root_ + "/in"))
      found.push_back(each.path().filename());
    std::sort(found.begin(), found.end());
    return found;
  }

  std::string root_;
  std::unique_ptr<RuntimeOwner> runtime_;
  std::unique_ptr<Store> store_;
};

INSTANTIATE_TEST_SUITE_P(Kernels, DirStoreTest, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "openat2" : "walk"; });

TEST_P(DirStoreTest, AnObjectIsAPlainFileAndAPlainFileIsAnObject) {
  EXPECT_OK(put("a/b/object", pattern(5000, 1)));
  EXPECT_EQ(fs::file_size(file("a/b/object")), 5000U);
  EXPECT_EQ(names(), (std::vector<std::string>{"a", "b", "object"})) << "and nothing else is left";
  write_file(file("a/theirs"), "hello");
  EXPECT_EQ(store_->stat("a/theirs")->bytes, 5U);
  Bytes into(5);
  EXPECT_OK(store_->read("a/theirs", 0, slice_of(into)).wait());
  EXPECT_EQ(std::memcmp(into.data(), "hello", 5), 0);
  const std::string tag = store_->stat("a/theirs")->tag;
  write_file(file("a/theirs"), "world");
  EXPECT_NE(store_->stat("a/theirs")->tag, tag);
}

TEST_P(DirStoreTest, NamesThatLeadOutAreRefused) {
  write_file(root_ + "/outside/secret", "secret");
  Bytes into(1);
  for (const std::string& key :
       {std::string("../outside/secret"), std::string("a/../../outside/secret"),
        std::string("/etc/passwd"), std::string("a//b"), std::string("a/"), std::string("."),
        std::string("a/./b"), std::string(".stoker-0123.tmp"), std::string("a\0b", 3),
        std::string(300, 'x'), std::string(5000, 'x')}) {
    EXPECT_EQ(code_of(store_->stat(key)), Code::invalid_argument) << key;
    EXPECT_EQ(code_of(store_->read(key, 0, slice_of(into)).wait()), Code::invalid_argument) << key;
    EXPECT_EQ(code_of(put(key, pattern(10, 1))), Code::invalid_argument) << key;
    EXPECT_EQ(code_of((*store_->begin())->remove(key)), Code::invalid_argument) << key;
  }
  EXPECT_EQ(code_of(store_->list("../outside/")), Code::invalid_argument);
  EXPECT_TRUE(names().empty());
}

TEST_P(DirStoreTest, LinksAreNotFollowed) {
  write_file(root_ + "/outside/secret", "secret");
  fs::create_directory_symlink(root_ + "/outside", file("folder"));
  fs::create_symlink(root_ + "/outside/secret", file("link"));
  fs::create_symlink("/proc/self/root", file("magic"));
  Bytes into(1);
  for (const char* key : {"folder/secret", "link", "magic/etc/passwd"}) {
    EXPECT_EQ(code_of(store_->stat(key)), Code::not_found) << key;
    EXPECT_EQ(code_of(store_->read(key, 0, slice_of(into)).wait()), Code::not_found) << key;
    EXPECT_EQ(code_of(put(key, pattern(10, 1))), Code::invalid_argument) << key;
    EXPECT_EQ(code_of((*store_->begin())->remove(key)), Code::not_found) << key;
    EXPECT_EQ(code_of(store_->copy(key, "to")), Code::not_found) << key;
  }
  EXPECT_TRUE(store_->list("")->empty());
  EXPECT_TRUE(store_->list("folder/")->empty());
  EXPECT_EQ(fs::file_size(root_ + "/outside/secret"), 6U);
  EXPECT_EQ(std::distance(fs::directory_iterator(root_ + "/outside"), {}), 1);
}

TEST_P(DirStoreTest, ANameIsAFileOrAFolder) {
  EXPECT_OK(put("m/1", pattern(10, 1)));
  EXPECT_EQ(code_of(put("m", pattern(10, 1))), Code::invalid_argument);
  EXPECT_EQ(code_of(put("m/1/below", pattern(10, 1))), Code::invalid_argument);
  EXPECT_EQ(code_of(store_->stat("m")), Code::not_found);
  EXPECT_EQ(code_of(store_->stat("m/1/below")), Code::not_found);
  {
    auto change = std::move(*store_->begin());
    EXPECT_OK(change->remove("m/1"));
    EXPECT_OK(change->commit(Durability::durable).wait());
  }
  EXPECT_OK(put("m", pattern(10, 1))) << "a folder that became empty is in nobody's way";
  EXPECT_EQ(names(), std::vector<std::string>{"m"});
}

TEST_P(DirStoreTest, APipeIsNoObjectAndHangsNobody) {
  ASSERT_EQ(mkfifo(file("pipe").c_str(), 0600), 0);
  Bytes into(1);
  EXPECT_EQ(code_of(store_->read("pipe", 0, slice_of(into)).wait()), Code::not_found);
  EXPECT_EQ(code_of(put("pipe", pattern(1, 1))), Code::invalid_argument);
  EXPECT_TRUE(store_->list("")->empty());
}

TEST_P(DirStoreTest, TemporaryFilesOfTheDeadAreRemovedAndThoseOfTheLivingStay) {
  fs::create_directories(file("a"));
  write_file(file("a/.stoker-00000000000000aa.tmp"), "dead");
  write_file(file("a/.stoker-00000000000000bb.tmp"), "alive");
  const int alive = ::open(file("a/.stoker-00000000000000bb.tmp").c_str(), O_RDWR);
  ASSERT_EQ(flock(alive, LOCK_EX), 0);
  EXPECT_TRUE(store_->list("")->empty()) << "neither is an object";
  EXPECT_OK(put("a/object", pattern(10, 1)));
  EXPECT_EQ(names(), (std::vector<std::string>{".stoker-00000000000000bb.tmp", "a", "object"}));
  ::close(alive);
}

TEST_P(DirStoreTest, AConflictLeavesNoTemporaryFile) {
  EXPECT_OK(put("object", pattern(10, 1)));
  for (const std::string_view tag : {kAbsent, std::string_view("another tag")}) {
    auto change = std::move(*store_->begin());
    EXPECT_OK(change->resize("object", 10));
    EXPECT_OK(change->require("object", tag));
    EXPECT_EQ(code_of(change->commit(Durability::durable).wait()), Code::conflict);
  }
  EXPECT_EQ(names(), std::vector<std::string>{"object"});
}

TEST_P(DirStoreTest, LargePiecesMoveByDirectTransfersAndOddOnesToo) {
  const size_t size = 5 * kMiB + 1234;
  const Bytes bytes = pattern(size + 8192, 3);
  AlignedBytes memory(size + 8192);
  const uint64_t before = runtime_->loop().counters().written_bytes.get();
  for (const size_t skew :
       {0, 1, 511, 4095}) {  // of offset and memory alike: the whole blocks between go direct
    std::memcpy(memory.data(), bytes.data(), bytes.size());
    auto change = std::move(*store_->begin());
    EXPECT_OK(change->resize("object", size + skew));
    EXPECT_OK(change->write("object", skew, memory.slice().sub(skew, size)).wait());
    EXPECT_OK(change->commit(Durability::durable).wait());
    std::memset(memory.data(), 0, memory.size());
    EXPECT_OK(store_->read("object", skew, memory.slice().sub(skew, size)).wait());
    ASSERT_EQ(std::memcmp(memory.data() + skew, bytes.data() + skew, size), 0) << skew;
    Bytes head(skew);
    EXPECT_OK(store_->read("object", 0, slice_of(head)).wait());
    EXPECT_EQ(head, Bytes(skew));
  }
  EXPECT_GE(runtime_->loop().counters().written_bytes.get() - before, 4 * (5 * kMiB - 8192))
      << "through the Loop";
}

TEST_P(DirStoreTest, ACopyOfACopyOntoItselfLeavesNoName) {
  EXPECT_OK(put("from", pattern(1000, 1)));
  for (int i = 0; i < 2; ++i)
    EXPECT_OK(store_->copy("from", "to"));  // the second finds the same file there
  EXPECT_EQ(names(), (std::vector<std::string>{"from", "to"}));
  EXPECT_OK(put("to", pattern(1000, 2)));
  EXPECT_EQ(read_all(*store_, "from"), pattern(1000, 1));
}

// Open files without a name, which still hold their space.
size_t nameless(const std::string& root) {
  size_t found = 0;
  for (const auto& each : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string path = fs::read_symlink(each.path(), gone);
    found += path.starts_with(root) && path.ends_with(" (deleted)") ? 1 : 0;
  }
  return found;
}

TEST_P(DirStoreTest, SpaceOfReplacedObjectsIsGivenBackBesideTheNextCommits) {
  store_.reset();
  std::latch begin{1};
  const DirOptions how{.openat2 = GetParam(), .frees = [&] { begin.wait(); }};
  store_ = std::move(*open_dir_store(root_ + "/in", runtime_->runtime(), {.create = true}, how));
  const Bytes bytes = pattern(1 * kMiB, 1);
  EXPECT_OK(put("object", bytes));
  for (size_t i = 1; i <= 6; ++i) {
    EXPECT_OK(put("object", bytes));
    EXPECT_EQ(nameless(root_), std::min<size_t>(i, 4)) << "no more than four wait";
  }
  EXPECT_OK(put("small", pattern(1000, 1)));
  EXPECT_OK(store_->remove({"small"}));
  EXPECT_EQ(nameless(root_), 4U) << "a small one is no matter";
  full_for = 1;
  begin.count_down();
  EXPECT_OK(put("other", bytes)) << "a full disk has room again when these are gone";
  EXPECT_EQ(nameless(root_), 0U);
  EXPECT_OK(store_->remove({"object"}));
  store_.reset();
  EXPECT_EQ(nameless(root_), 0U);
  EXPECT_EQ(names(), std::vector<std::string>{"other"});
}

// Of removed objects, which new ones are written into.
class DirSpares : public DirStoreTest {
 protected:
  void SetUp() override {
    DirStoreTest::SetUp();
    if (!dir::spares_gain(Fd(::open(testing::TempDir().c_str(), O_RDONLY))))
      GTEST_SKIP() << "no ext4 and no XFS";
    store_->keep_space(kKept);
    EXPECT_OK(put("m/old", pattern(kBytes, 1)));
  }
  static constexpr size_t kBytes = 9 * kMiB, kKept = 20 * kMiB;
  uint64_t inode(const std::string& name) const {
    struct stat status {};
    EXPECT_EQ(::stat(file(name).c_str(), &status), 0) << name;
    return status.st_ino;
  }
  uint32_t mode_of(const std::string& name) const {
    struct stat status {};
    EXPECT_EQ(::stat(file(name).c_str(), &status), 0) << name;
    return status.st_mode;
  }
  std::string spare() const {
    for (const std::string& name : names()) {
      if (name.starts_with(".stoker-")) return name;
    }
    return "";
  }
  // Not opened again: another number of the same open file.
  int open_shared(const std::string& name) const {
    for (const auto& each : fs::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const auto path = fs::read_symlink(each.path(), gone);
      if (!gone && path.filename() == name) return dup(std::stoi(each.path().filename()));
    }
    return -1;
  }
  size_t spares() const {
    size_t found = 0;
    for (const auto& each : fs::directory_iterator(root_ + "/in"))
      found += each.path().filename().string().starts_with(".stoker-") ? 1 : 0;
    return found;
  }
  void remove(const std::string& key) { EXPECT_OK(store_->remove({key})); }
};

TEST_P(DirSpares, ANewObjectIsWrittenIntoARemovedOne) {
  const uint64_t old = inode("m/old");
  const std::string tag = store_->stat("m/old")->tag;
  remove("m/old");
  EXPECT_EQ(spares(), 1U);
  EXPECT_TRUE(store_->list("")->empty());
  for (const size_t bytes : {kBytes + 5, kBytes - 5000, kBytes}) {
    EXPECT_OK(put("m/new", pattern(bytes, 2)));
    EXPECT_EQ(inode("m/new"), old);
    EXPECT_NE(store_->stat("m/new")->tag, tag);
    EXPECT_EQ(spares(), 0U);
    EXPECT_EQ(read_all(*store_, "m/new"), pattern(bytes, 2));
    remove("m/new");
  }
  EXPECT_EQ(spares(), 1U);
  EXPECT_OK(put("small", pattern(1000, 3)));
  EXPECT_EQ(spares(), 1U) << "for large ones";
  store_.reset();
  EXPECT_EQ(names(), std::vector<std::string>{"small"});
}

TEST_P(DirSpares, WhatNobodyWroteIsZeros) {
  const uint64_t old = inode("m/old");
  remove("m/old");
  auto change = std::move(*store_->begin());
  Bytes expected(kBytes + 10000), piece = pattern(2 * kMiB + 100, 4);
  ASSERT_OK(change->resize("new", expected.size()));
  for (const size_t at : {3 * kMiB + 5, 4 * kMiB, 7 * kMiB}) {
    ASSERT_OK(change->write("new", at, slice_of(piece)).wait());
    std::copy(piece.begin(), piece.end(), expected.begin() + static_cast<ptrdiff_t>(at));
  }
  ASSERT_OK(change->commit(Durability::durable).wait());
  EXPECT_EQ(inode("new"), old);
  EXPECT_EQ(read_all(*store_, "new"), expected);
}

TEST_P(DirSpares, WhatNobodyWroteIsZerosWhereTheFileSystemCannotSay) {
  remove("m/old");
  auto change = std::move(*store_->begin());
  Bytes expected(kBytes), piece = pattern(100, 4);
  ASSERT_OK(change->resize("new", kBytes));
  ASSERT_OK(change->write("new", 5000, slice_of(piece)).wait());
  std::copy(piece.begin(), piece.end(), expected.begin() + 5000);
  no_zero_range = true;
  const auto done = change->commit(Durability::durable).wait();
  no_zero_range = false;
  ASSERT_OK(done);
  EXPECT_EQ(read_all(*store_, "new"), expected);
}

// The kernel tells by a signal that somebody opens what is looked at.
TEST_P(DirSpares, WhoLooksAtASpareDoesNotEndTheProgram) {
  std::atomic<bool> ends{false};
  std::thread other([&] {
    while (!ends) {
      for (const std::string& name : names()) {
        for (int i = 0; name.starts_with(".stoker-") && i < 5000; ++i) {
          if (!Fd(::open(file(name).c_str(), O_RDONLY | O_NONBLOCK)) && errno == ENOENT) break;
        }
      }
    }
  });
  for (int i = 0; i < 30; ++i) {
    auto change = std::move(*store_->begin());
    EXPECT_OK(change->resize("x", kBytes));
    EXPECT_OK(change->commit(Durability::durable).wait());
    remove("x");
  }
  ends = true;
  other.join();
}

TEST_P(DirSpares, AnObjectBelongsToWhoWritesIt) {
  if (geteuid() != 0) GTEST_SKIP() << "only root gives files to others";
  ASSERT_EQ(chmod(file("m/old").c_str(), 0666), 0);
  remove("m/old");
  EXPECT_EQ(mode_of(spare()) & ALLPERMS, 0600U) << "m may be a folder that nobody else reads";
  EXPECT_OK(put("m/new", pattern(kBytes, 2)));
  EXPECT_OK(put("fresh", pattern(1, 2)));
  EXPECT_EQ(mode_of("m/new"), mode_of("fresh"));
  ASSERT_EQ(chown(file("m/new").c_str(), 65534, 65534), 0);
  remove("m/new");
  EXPECT_OK(put("m/new", pattern(kBytes, 2)));
  struct stat status {};
  ASSERT_EQ(::stat(file("m/new").c_str(), &status), 0);
  EXPECT_EQ(status.st_uid, 0U);
  EXPECT_EQ(spares(), 0U);
}

TEST_P(DirSpares, WhatCannotBeKeptIsRemoved) {
  const bool root = geteuid() == 0;
  if (root) {
    ASSERT_EQ(chmod(root_.c_str(), 0755), 0);
    ASSERT_EQ(chown(file("m").c_str(), 65534, 65534), 0);
    ASSERT_EQ(chown(file("m/old").c_str(), 65534, 65534), 0);
    ASSERT_EQ(seteuid(65534), 0);  // root may do everything
  } else {
    ASSERT_EQ(chmod((root_ + "/in").c_str(), 0555), 0);
  }
  const auto removed = store_->remove({"m/old"});
  ASSERT_EQ(seteuid(root ? 0 : geteuid()), 0);
  ASSERT_EQ(chmod((root_ + "/in").c_str(), 0755), 0);
  EXPECT_OK(removed);
  EXPECT_TRUE(store_->list("")->empty());
}

TEST_P(DirSpares, AForkedChildHoldsNeitherTheLockNorTheSpace) {
  remove("m/old");
  const Fd shared(open_shared(spare()));  // as a child has it
  ASSERT_TRUE(shared);
  EXPECT_OK(put("m/new", pattern(kBytes, 2)));
  const Fd object(::open(file("m/new").c_str(), O_RDONLY));
  EXPECT_EQ(flock(object.get(), LOCK_SH | LOCK_NB), 0) << "copy() waits for it";
}

TEST_P(DirSpares, SparesOfAChildAreEmptied) {
  remove("m/old");
  const Fd shared(open_shared(spare()));
  store_->keep_space(0);
  struct stat status {};
  ASSERT_EQ(fstat(shared.get(), &status), 0);
  EXPECT_EQ(status.st_blocks, 0);
}

TEST_P(DirSpares, WhoFoundASpareKeepsIt) {
  remove("m/old");
  ASSERT_EQ(link(file(spare()).c_str(), (root_ + "/outside/kept").c_str()), 0);
  EXPECT_OK(put("new", pattern(kBytes, 2)));
  std::ifstream kept(root_ + "/outside/kept", std::ios::binary);
  Bytes into(kBytes);
  kept.read(reinterpret_cast<char*>(into.data()), kBytes);
  EXPECT_EQ(into, pattern(kBytes, 1));
}

TEST_P(DirSpares, ManySmallOnesDoNotUseUpTheOpenFiles) {
  open({}, 1);
  store_->keep_space(kKept);
  for (int i = 0; i < 140; ++i) EXPECT_OK(put("x" + std::to_string(i), pattern(100, 5)));
  for (int i = 0; i < 140; ++i) remove("x" + std::to_string(i));
  EXPECT_EQ(spares(), 128U);
}

TEST_P(DirSpares, AFullDiskHasRoomAgainWithoutThoseOfTheDead) {
  for (const int says : {ENOSPC, EDQUOT}) {
    EXPECT_OK(put("m/old", pattern(kBytes, 1)));
    remove("m/old");
    EXPECT_EQ(spares(), 1U);
    write_file(file(".stoker-0123456789abcdef.tmp"), "left behind");
    full_says = says;
    full_for = 1;
    EXPECT_OK(put("m/other", pattern(1000, 2)));
    full_says = ENOSPC;
    EXPECT_EQ(spares(), 0U);
  }
}

TEST_P(DirSpares, BegunAnewItIsEmpty) {
  remove("m/old");
  auto change = std::move(*store_->begin());
  for (int i = 0; i < 2; ++i) ASSERT_OK(change->resize("new", kBytes));
  ASSERT_OK(change->commit(Durability::durable).wait());
  EXPECT_EQ(read_all(*store_, "new"), Bytes(kBytes));
}

TEST_P(DirSpares, WhoReadsTheOldFileGoesOn) {
  const Fd reader(::open(file("m/old").c_str(), O_RDONLY));
  remove("m/old");
  EXPECT_EQ(spares(), 0U);
  EXPECT_OK(put("new", pattern(kBytes, 2)));
  Bytes into(kBytes);
  ASSERT_EQ(pread(reader.get(), into.data(), kBytes, 0), static_cast<ssize_t>(kBytes));
  EXPECT_EQ(into, pattern(kBytes, 1));
}

TEST_P(DirSpares, WhatHasAnotherNameStaysWhatItIs) {
  ASSERT_EQ(link(file("m/old").c_str(), (root_ + "/outside/kept").c_str()), 0);
  remove("m/old");
  EXPECT_EQ(spares(), 0U);
  EXPECT_OK(put("new", pattern(kBytes, 2)));
  std::ifstream kept(root_ + "/outside/kept", std::ios::binary);
  Bytes into(kBytes);
  kept.read(reinterpret_cast<char*>(into.data()), kBytes);
  EXPECT_EQ(into, pattern(kBytes, 1));
}

TEST_P(DirSpares, NoMoreIsKeptThanWasSaid) {
  for (int i = 0; i < 3; ++i) EXPECT_OK(put("x" + std::to_string(i), pattern(kBytes, 5)));
  for (int i = 0; i < 3; ++i) remove("x" + std::to_string(i));
  EXPECT_EQ(spares(), 2U);
  remove("m/old");
  EXPECT_EQ(spares(), 2U);
  store_->keep_space(kBytes);
  EXPECT_EQ(spares(), 1U);
  full_for = 1;
  EXPECT_OK(put("other", pattern(1000, 2))) << "a full disk has room again without them";
  EXPECT_EQ(spares(), 0U);
  remove("other");
  store_->keep_space(0);
  EXPECT_OK(put("y", pattern(kBytes, 5)));
  remove("y");
  EXPECT_EQ(spares(), 0U);
}

TEST_P(DirSpares, ThoseOfTheDeadAreRemoved) {
  write_file(file(".stoker-0123456789abcdef.tmp"), "left behind");
  const auto other = std::move(*open_dir_store(root_ + "/in", runtime_->runtime(), {}, {}));
  remove("m/old");  // a spare of the living
  EXPECT_EQ(spares(), 2U);
  other->keep_space(kKept);
  EXPECT_EQ(spares(), 1U);
}

INSTANTIATE_TEST_SUITE_P(Kernels, DirSpares, ::testing::Bool());

TEST_P(DirStoreTest, AFullDiskIsSaidAndLeavesWhatWasThere) {
  EXPECT_OK(put("object", pattern(10, 1)));
  full_for = 2;  // it looks again where files are being freed
  const Status full = put("object", pattern(1000, 2));
  EXPECT_EQ(code_of(full), Code::out_of_space);
  EXPECT_NE(full.error().what.find("cannot reserve 1000 B for 'object'"), std::string::npos)
      << full.error().what;
  EXPECT_EQ(read_all(*store_, "object"), pattern(10, 1));
  EXPECT_EQ(names(), std::vector<std::string>{"object"});
}

// Each is another sentence of the same error.
TEST_P(DirStoreTest, ANameThatIsAFolderAndAFolderWithoutRightsAreSaid) {
  EXPECT_OK(put("m/1", pattern(10, 1)));
  EXPECT_NE(put("m", pattern(10, 1)).error().what.find("is a folder already"), std::string::npos);
  EXPECT_NE(put("m/1/below", pattern(10, 1)).error().what.find("nothing can lie below it"),
            std::string::npos);
  ASSERT_EQ(chmod(file("m").c_str(), 0), 0);
  const bool root = geteuid() == 0;
  if (root) {
    ASSERT_EQ(chmod(root_.c_str(), 0755), 0);
    ASSERT_EQ(seteuid(65534), 0);  // root may do everything
  }
  Bytes into(1);
  const Status read = store_->read("m/1", 0, slice_of(into)).wait();
  const Status written = put("m/2", pattern(10, 1));
  const auto listed = store_->list("");
  ASSERT_EQ(seteuid(root ? 0 : geteuid()), 0);
  ASSERT_EQ(chmod(file("m").c_str(), 0755), 0);
  for (const Status& each : {read, written, listed ? Status() : Status(listed.error())}) {
    ASSERT_FALSE(each);
    EXPECT_NE(each.error().message().find("ermission"), std::string::npos)
        << each.error().message();
  }
  EXPECT_EQ(read_all(*store_, "m/1"), pattern(10, 1));
}

TEST_P(DirStoreTest, WhatIsNoFolderIsSaid) {
  write_file(root_ + "/file", "x");
  const auto not_one = open_dir_store(root_ + "/file", runtime_->runtime(), {}, {});
  EXPECT_FALSE(not_one);
  const auto missing = open_dir_store(root_ + "/none", runtime_->runtime(), {}, {});
  EXPECT_EQ(code_of(missing), Code::not_found);
  EXPECT_EQ(code_of(open_store("dir:", runtime_->runtime(), {})), Code::invalid_argument);
  open({.read_only = true});
  EXPECT_EQ(code_of(store_->begin()), Code::read_only);
  EXPECT_EQ(code_of(store_->copy("a", "b")), Code::read_only);
}

}  // namespace
}  // namespace stoker
