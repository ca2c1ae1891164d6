// Plain files in a folder, each an object. docs/stores/dir.md says what that promises.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "stoker/store/open.h"

namespace stoker {

// One step on the way of an object to the disk, after it was done. For the replay of crashes.
struct DirStep {
  enum class Kind : uint8_t {
    make_folder,
    create,
    write,
    resize,  // to `offset` bytes
    sync_file,
    rename,
    link,
    unlink,
    sync_folder
  };
  Kind kind = Kind::create;
  std::string path = {};  // below the folder
  std::string to = {};    // of rename and link
  uint64_t offset = 0;
  std::vector<std::byte> bytes = {};
};

struct DirOptions {
  bool openat2 = true;               // false: as on a kernel without it
  bool no_replace = true;            // false: as on a file system without RENAME_NOREPLACE
  uint64_t spare_bytes = 8 << 20;    // smaller files are as quickly made anew: keep_space()
  std::function<void()> frees = {};  // called before the space of an old file is given back later
  std::function<void(const DirStep&)> steps = {};  // told of each step, by any thread, where given
};

Result<std::unique_ptr<Store>> open_dir_store(const std::string& path, const Runtime& runtime,
                                              const StoreOptions& options,
                                              const DirOptions& dir = {});

}  // namespace stoker
