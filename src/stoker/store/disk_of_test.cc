// Which disks a device is on, over made-up folders of the kernel's.
#include "stoker/store/disk_of.h"

#include <gtest/gtest.h>

#include <sys/sysmacros.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace stoker {
namespace {

namespace fs = std::filesystem;

class DiskOf : public ::testing::Test {
 protected:
  DiskOf() : root_(testing::TempDir() + "sysfs." + std::to_string(getpid())) {
    fs::remove_all(root_);
    fs::create_directories(root_ / "dev/block");
    add("pci/sda", "8:0");
    add("pci/sda/sda1", "8:1", true);
    add("pci/sda/sda2", "8:2", true);
    add("pci/sdb", "8:16");
    add("pci/sdb/sdb1", "8:17", true);
    add("pci/sdc", "8:32");
  }
  ~DiskOf() override { fs::remove_all(root_); }

  // A device's folder, and the link to it by its number.
  void add(const std::string& name, const std::string& number, bool partition = false) {
    const fs::path node = root_ / "devices" / name;
    fs::create_directories(node);
    std::ofstream(node / "dev") << number << "\n";
    if (partition) std::ofstream(node / "partition") << "1\n";
    fs::create_directory_symlink(node, root_ / "dev/block" / number);
  }
  // A device that is made of others.
  void add_over(const std::string& name, const std::string& number,
                const std::vector<std::string>& below) {
    add(name, number);
    fs::create_directories(root_ / "devices" / name / "slaves");
    for (const std::string& each : below) {
      const fs::path node = root_ / "devices" / each;
      fs::create_directory_symlink(node, root_ / "devices" / name / "slaves" / node.filename());
    }
  }
  Disks of(unsigned major, unsigned minor) const {
    return disks_of_device(major, minor, root_.string());
  }

  static uint64_t disk(unsigned minor) { return makedev(8, minor); }
  const fs::path root_;
};

TEST_F(DiskOf, APartitionIsOnItsDisk) {
  EXPECT_EQ(of(8, 0).numbers, std::set<uint64_t>{disk(0)});
  EXPECT_EQ(of(8, 1).numbers, std::set<uint64_t>{disk(0)});
  EXPECT_TRUE(of(8, 1).told);
  EXPECT_TRUE(of(8, 1).shares(of(8, 2)));
  EXPECT_FALSE(of(8, 1).shares(of(8, 17)));
}

TEST_F(DiskOf, WhatIsPutTogetherOfOthersIsOnAllOfThem) {
  add_over("virtual/block/dm-0", "253:0", {"pci/sda/sda1"});
  add_over("virtual/block/dm-1", "253:1", {"pci/sda/sda2"});
  add_over("virtual/block/dm-2", "253:2", {"virtual/block/dm-1"});  // encrypted, on a volume
  add_over("virtual/block/md0", "9:0", {"pci/sdb/sdb1", "pci/sdc"});
  add("virtual/block/md0/md0p1", "259:0", true);
  EXPECT_EQ(of(253, 0).numbers, std::set<uint64_t>{disk(0)});
  EXPECT_TRUE(of(253, 0).shares(of(253, 1))) << "two volumes on one disk";
  EXPECT_TRUE(of(253, 2).shares(of(8, 1)));
  EXPECT_EQ(of(9, 0).numbers, (std::set<uint64_t>{disk(16), disk(32)}));
  EXPECT_EQ(of(259, 0).numbers, of(9, 0).numbers);
  EXPECT_TRUE(of(259, 0).shares(of(8, 32))) << "one of its disks";
  EXPECT_FALSE(of(9, 0).shares(of(253, 2)));
  for (const auto& [major, minor] : {std::pair{253U, 0U}, {253U, 2U}, {9U, 0U}, {259U, 0U}})
    EXPECT_TRUE(of(major, minor).told);
}

TEST_F(DiskOf, WhatTheKernelDoesNotTellIsSaidToBeSo) {
  const Disks subvolume = of(0, 41);
  EXPECT_FALSE(subvolume.told);
  EXPECT_TRUE(subvolume.shares(of(0, 41)))
      << "two paths on one file system are on the same disks, whichever they are";
  EXPECT_FALSE(subvolume.shares(of(0, 42)));
  add_over("virtual/block/dm-3", "253:3", {"pci/sda/sda1"});
  fs::create_directory_symlink(root_ / "devices/nowhere",
                               root_ / "devices/virtual/block/dm-3/slaves/nowhere");
  EXPECT_FALSE(of(253, 3).told) << "a part of it leads nowhere";
}

TEST_F(DiskOf, TwoFoldersOfOneFileSystemShareIt) {
  const auto here = disks_of(testing::TempDir());
  const auto there = disks_of(root_.string());
  ASSERT_TRUE(here && there);
  EXPECT_TRUE(here->shares(*there));
  EXPECT_FALSE(disks_of(root_.string() + "/nowhere"));
}

}  // namespace
}  // namespace stoker
