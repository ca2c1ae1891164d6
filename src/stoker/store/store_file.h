// StoreFile: one of the files or devices that hold a store: what the user called it, open in the
// Loop, locked, our name in it.
#pragma once

#include <string>

#include "stoker/io/loop.h"
#include "stoker/store/open.h"
#include "stoker/store/record_log.h"

namespace stoker {

struct StoreFile {
  std::string path;                 // as given by the user
  std::string file_path;            // the file or device that this means
  std::string locked_path() const;  // what the lock is put on: the device of an NVMe namespace
  FileInfo file;
  int lock_fd = -1;
  bool made = false;   // by this call, and unlinked again if the store does not come to be
  bool named = false;  // our name stands in it as the holder's
};

// Says in it who holds it. Only what is known to be of the store: another file may be anybody's.
void name_holder(StoreFile& file, const StoreOptions& options);

// Closes it and lets go of the lock. A file that the kernel still has transfers of stays locked:
// nobody may write where a late write of ours can still land.
void close_store_file(Loop& loop, StoreFile& file);

StoreId random_store_id();

}  // namespace stoker
