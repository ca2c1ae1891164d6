// FileTable: the files an engine has open, by FileId. Opens them for direct I/O, reserves space,
// says plainly why not.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/base/result.h"
#include "stoker/io/engine.h"
#include "stoker/io/nvme/command.h"

namespace stoker {

// Any thread. Ids count from 0; the smallest free one is given, so that they can index a table of
// the kernel.
class FileTable {
 public:
  struct File {
    int fd = -1;
    FileInfo info;
    std::string path;
    bool write = false;
    // Of an NVMe namespace that takes commands: what it is, and where the file begins in it.
    std::optional<nvme::Space> space;
    uint64_t base = 0;
    size_t drive = 0;  // which of its drives, of an engine that has several
  };

  FileTable() = default;
  ~FileTable();
  FileTable(const FileTable&) = delete;
  FileTable& operator=(const FileTable&) = delete;

  Result<FileInfo> open(const OpenFile& request);
  // Takes a file that is open already, under an id of its own.
  FileInfo add(File file);
  Status close(FileId id);
  // The file, or null; stays valid until close(id), which may come only when nothing is in flight
  // on it. Takes no lock: engines ask for each op.
  const File* find(FileId id) const;

 private:
  struct Place {
    std::atomic<bool> open{false};
    File file;  // changes only while it is not open
  };
  // Room k has 64 << k places, once it is made; then it never moves.
  static constexpr size_t kFirst = 64, kRooms = 20;
  static size_t room_of(size_t place);
  Place& place(size_t id) const;
  size_t free_place() REQUIRES(mutex_);

  Mutex mutex_;  // of those that open and close
  mutable std::array<std::vector<Place>, kRooms> rooms_;
  std::atomic<size_t> places_{0};  // in the rooms that are made
};

// Why `op` cannot be started on `file` (null: unknown id), as the op's error; true if it can.
bool startable(Op& op, const FileTable::File* file);

}  // namespace stoker
