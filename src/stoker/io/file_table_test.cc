#include "stoker/io/file_table.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace stoker {
namespace {

FileTable::File nothing() {
  FileTable::File file;
  file.fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  file.path = "nothing";
  return file;
}

TEST(FileTable, FilesStayWhereTheyAreHoweverManyFollow) {
  FileTable table;
  std::vector<const FileTable::File*> found;
  for (FileId id = 0; id < 500; ++id) {
    ASSERT_EQ(table.add(nothing()).id, id);
    found.push_back(table.find(id));
    ASSERT_NE(found.back(), nullptr);
    EXPECT_EQ(found.back()->info.id, id);
  }
  for (FileId id = 0; id < 500; ++id) EXPECT_EQ(table.find(id), found[static_cast<size_t>(id)]);
  for (const FileId none : {-1, 500, 1 << 30}) EXPECT_EQ(table.find(none), nullptr);
}

TEST(FileTable, TheSmallestFreeIdIsGiven) {
  FileTable table;
  for (int i = 0; i < 200; ++i) table.add(nothing());
  for (const FileId id : {150, 64, 3}) {
    EXPECT_TRUE(table.close(id));
    EXPECT_EQ(table.find(id), nullptr);
    EXPECT_FALSE(table.close(id));
  }
  for (const FileId id : {3, 64, 150, 200}) EXPECT_EQ(table.add(nothing()).id, id);
}

TEST(FileTable, FilesAreFoundWhileOthersOpenAndClose) {
  FileTable table;
  const FileId kept = table.add(nothing()).id;
  std::atomic<bool> over{false};
  std::thread other([&] {
    for (int round = 0; round < 20; ++round) {
      std::vector<FileId> ids;
      ids.reserve(100);
      for (int i = 0; i < 100; ++i) ids.push_back(table.add(nothing()).id);
      for (const FileId id : ids) EXPECT_TRUE(table.close(id));
    }
    over = true;
  });
  while (!over) {
    ASSERT_NE(table.find(kept), nullptr);
    EXPECT_EQ(table.find(kept)->path, "nothing");
  }
  other.join();
}

}  // namespace
}  // namespace stoker
