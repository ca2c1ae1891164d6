// FileTable: the files an engine has open, by FileId. Opens them for direct I/O, reserves space,
// says plainly why not.
#pragma once

#include <cstdint>
#include <deque>
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
    int fd = -1;  // -1: this place is free
    FileInfo info;
    std::string path;
    bool write = false;
    // Of an NVMe namespace that takes commands: what it is, and where the file begins in it.
    std::optional<nvme::Space> space;
    uint64_t base = 0;
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
  // on it.
  const File* find(FileId id) const;

 private:
  mutable Mutex mutex_;
  std::deque<File> files_ GUARDED_BY(mutex_);  // never shrinks, so that pointers hold
};

// Why `op` cannot be started on `file` (null: unknown id), as the op's error; true if it can.
bool startable(Op& op, const FileTable::File* file);

}  // namespace stoker
